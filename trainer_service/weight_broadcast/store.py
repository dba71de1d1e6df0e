"""Which policies are on offer, and how to get from one to the next.

The store holds the newest policy, the chain of deltas that led to it, and at times an anchor: a
policy whose snapshot is kept whole, from which late joiners start. A link of the chain leads from
one digest to the next; the way from any policy on the chain to the newest is the sum of the links
between.

Invariants: the chain ends at the newest policy and reaches back to the anchor; a snapshot is read
only while its slot belongs to the store; an offer is whole, and holds as long as `Offer.valid`.
`prepare` and `compose` are heavy, change nothing and may run in a thread beside the rest, which
runs in one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from leeway import deltas
from leeway.deltas import Change, Delta
from leeway.manifests import Canary, Manifest, seal
from leeway.tensors import Encoding, Record, Tensor, digest_of, policy_digest
from leeway.v1 import weights_pb2 as pb
from trainer_service.weight_broadcast.snapshots import SlotReader, Snapshot

# An old anchor that nobody has read for so long gives way to a newer one.
_ANCHOR_IDLE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """One version, whole, in a slot.

    Attributes:
        payload: The slot's bytes: all tensors.
        records: Full records over `payload`.
    """

    version: int
    slot: int
    tensors: Mapping[str, Tensor]
    payload: memoryview
    records: tuple[Record, ...]
    digest: str
    canary: Canary | None


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """The delta from one policy to the next."""

    base_digest: str
    digest: str
    delta: Delta

    @property
    def nbytes(self) -> int:
        return len(self.delta.payload)

    @property
    def changed_ratio(self) -> float:
        """Elements that change, of all; those of dense and full tensors count as changed."""
        changed = total = 0
        for record in self.delta.records:
            whole = record.encoding in (Encoding.DENSE, Encoding.FULL)
            changed += record.elements if whole else record.changed
            total += record.elements
        return changed / max(total, 1)


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """A policy that is encoded and hashed, not yet on offer."""

    policy: Policy
    link: Link | None


@dataclass(slots=True, eq=False)
class Offer:
    """A way to a policy: the sealed manifest and the payload that it describes."""

    digest: str
    base_digest: str
    manifest: pb.GetManifestResponse
    payload: memoryview
    last_read: float
    valid: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class Anchor:
    policy: Policy
    offer: Offer


class PolicyStore:
    """See the module."""

    def __init__(
        self,
        run_id: str,
        incarnation: int,
        readers: Sequence[SlotReader],
        *,
        kept_versions: int,
        anchor_every: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run_id = run_id
        self.incarnation = incarnation
        self._readers = readers
        self._kept_versions = kept_versions
        self._anchor_every = anchor_every
        self._clock = clock
        self._newest: Policy | None = None
        self._anchor: Anchor | None = None
        self._chain: list[Link] = []
        self._deltas: OrderedDict[tuple[str, str], Offer] = OrderedDict()

    @property
    def newest(self) -> Policy | None:
        return self._newest

    def prepare(self, snapshot: Snapshot) -> Prepared:
        """Finds, encodes and hashes what changed since the newest policy."""
        tensors, payload = self._readers[snapshot.slot].read(snapshot)
        base = self._newest
        held = base.tensors if base is not None else {}
        known = {r.name: r.digest for r in base.records} if base is not None else {}
        changes: list[tuple[Record, Change]] = []
        for placed in snapshot.tensors:
            tensor = tensors[placed.name]
            change = deltas.difference(held.get(placed.name), tensor)
            same = change.encoding is Encoding.SAME
            record = Record(
                name=placed.name,
                dtype=placed.dtype,
                shape=placed.shape,
                encoding=Encoding.FULL,
                offset=placed.offset,
                length=tensor.nbytes,
                changed=0,
                digest=known[placed.name] if same else digest_of(tensor),
            )
            changes.append((record, change))
        records = tuple(record for record, _ in changes)
        policy = Policy(
            version=snapshot.version,
            slot=snapshot.slot,
            tensors=tensors,
            payload=payload,
            records=records,
            digest=policy_digest(records),
            canary=snapshot.canary,
        )
        if base is None or base.digest == policy.digest:
            return Prepared(policy, None)
        return Prepared(policy, Link(base.digest, policy.digest, deltas.pack(changes)))

    def commit(self, prepared: Prepared, in_use: Collection[str] = ()) -> list[int]:
        """Puts a prepared policy on offer as the newest.

        Args:
            in_use: Digests that live nodes hold; the chain keeps them as bases.

        Returns:
            The slots that are free from now on.
        """
        before = self._slots()
        self._newest = prepared.policy
        if (link := prepared.link) is not None:
            self._chain.append(link)
            self.remember(self._delta_offer(prepared.policy, link.base_digest, link.delta))
        self._retire(in_use)
        return sorted(before - self._slots())

    def known(self, digest: str, base_digest: str) -> Offer | None:
        """The offer from a base (empty: none) to a policy, if it was made before and still
        holds."""
        if base_digest:
            return self._deltas.get((digest, base_digest))
        if self._anchor is not None and self._anchor.policy.digest == digest:
            return self._anchor.offer
        return None

    def compose(self, base_digest: str) -> Offer | None:
        """The way from a policy on the chain to the newest; None where there is no way."""
        newest, start = self._newest, self._after(base_digest)
        if newest is None or start is None:
            return None
        total: dict[str, Change] = {}
        for link in self._chain[start:]:
            for record, change in deltas.unpack(link.delta.records, link.delta.payload):
                earlier = total.get(record.name)
                total[record.name] = change if earlier is None else deltas.compose(earlier, change)
        same = Change(Encoding.SAME)
        changes = [(record, total.get(record.name, same)) for record in newest.records]
        return self._delta_offer(newest, base_digest, deltas.pack(changes))

    def remember(self, offer: Offer) -> None:
        """Keeps a delta for more requests, and for transfers that resume."""
        assert self._newest is not None
        self._deltas[offer.digest, offer.base_digest] = offer
        room = len(self._newest.payload)
        while len(self._deltas) > 1 and sum(len(o.payload) for o in self._deltas.values()) > room:
            self._deltas.popitem(last=False)

    def full(self) -> Offer | None:
        """Full weights: the anchor's, or, without an anchor, the newest policy's, which becomes
        it."""
        if self._newest is None:
            return None
        if self._anchor is None:
            policy = self._newest
            sealed = self._seal(policy, "", policy.records, policy.payload)
            offer = Offer(policy.digest, "", sealed, policy.payload, self._clock())
            self._anchor = Anchor(policy, offer)
        return self._anchor.offer

    def read(self, offer: Offer, offset: int, length: int) -> memoryview | None:
        """A part of an offer's payload; None when the offer does not hold any more."""
        if not offer.valid:
            return None
        offer.last_read = self._clock()
        return offer.payload[offset : offset + length]

    def _retire(self, in_use: Collection[str]) -> None:
        """Drops an old anchor that is not read, and the links that nobody needs. A chain that
        outweighs full weights is cut, whoever needs it."""
        assert self._newest is not None
        needed = [*in_use]
        if (anchor := self._anchor) is not None:
            old = self._newest.version - anchor.policy.version >= self._anchor_every
            if old and self._clock() - anchor.offer.last_read >= _ANCHOR_IDLE_SECONDS:
                self._drop_anchor()
            else:
                needed.append(anchor.policy.digest)
        start = max(0, len(self._chain) - self._kept_versions)
        for digest in needed:
            after = self._after(digest)
            start = start if after is None else min(start, after)
        weights = [link.nbytes for link in self._chain]
        while sum(weights[start:]) > len(self._newest.payload):
            start += 1
        del self._chain[:start]
        if self._anchor is not None and not self._reachable(self._anchor.policy.digest):
            self._drop_anchor()

    def _drop_anchor(self) -> None:
        assert self._anchor is not None
        self._anchor.offer.valid = False
        self._anchor = None

    def _reachable(self, digest: str) -> bool:
        assert self._newest is not None
        return digest == self._newest.digest or self._after(digest) is not None

    def _after(self, digest: str) -> int | None:
        """The place of the link that leads on from a policy, if the chain holds it."""
        places = [i for i, link in enumerate(self._chain) if link.base_digest == digest]
        return places[-1] if places else None

    def _slots(self) -> set[int]:
        policies = (self._newest, self._anchor.policy if self._anchor is not None else None)
        return {policy.slot for policy in policies if policy is not None}

    def _delta_offer(self, policy: Policy, base_digest: str, delta: Delta) -> Offer:
        payload = memoryview(delta.payload)
        sealed = self._seal(policy, base_digest, delta.records, payload)
        return Offer(policy.digest, base_digest, sealed, payload, self._clock())

    def _seal(
        self, policy: Policy, base_digest: str, records: tuple[Record, ...], payload: memoryview
    ) -> pb.GetManifestResponse:
        return seal(
            Manifest(
                run_id=self.run_id,
                incarnation=self.incarnation,
                version=policy.version,
                base_digest=base_digest,
                records=records,
                payload_length=len(payload),
                digest=policy.digest,
                canary=policy.canary,
            )
        )
