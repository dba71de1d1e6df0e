"""Continuous batching: which sequences are in the next forward pass, and what becomes of them.

Synchronous and single-threaded; its caller is the torch engine's thread. A sequence waits (in
order), runs in a slot, and ends. Every step decodes one token of each running sequence and prefills
those that join, in one packed forward pass.

- Joining means forwarding all tokens known so far, prompt or partial generation alike; the first
  new token comes from the last of them. `recompute` is nothing but sending running sequences back
  to the head of the queue.
- Sequences with equal known tokens share that work: in the same step one span serves them all;
  later ones copy it from a slot, unless the weights have changed since (`epoch`), and rerun its
  last token.
- Sequences that only begin alike share their beginning: the first to join keeps it (`_prefix`), for
  all that come in later steps, again until the weights change.
- New weights may bring a canary: a prompt whose log-probabilities under them are known. The first
  forward pass under the new weights computes it beside the sequences, and nothing is drawn from
  that pass unless it agrees.
- Running sequences occupy the first slots, without holes. A slot outlives its sequence until the
  next step, so that one that joins may take over its prefix.
- An idle batch keeps nothing. What an idle batch generates is a function of the weights and the
  sequences submitted, in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from itertools import chain

import numpy as np
import numpy.typing as npt
from torch import Tensor

from leeway.manifests import Canary
from leeway.trajectory import FinishReason, Int32Array, Sampling
from leeway.versions import expand, spans_of
from rollout_service.engines.base import GenerateRequest, Generation, prove
from rollout_service.engines.kv_cache import Span
from rollout_service.engines.sampler import draw, uniforms
from rollout_service.engines.torch_model import HeldModel, chosen_logprobs, unkept

# Most tokens prefilled in one step (a single longer sequence still goes in whole): bounds the
# memory of a step, and how long running sequences wait for those that join. Matrix products are
# at their best from 256 rows on; larger steps were not faster.
PREFILL_TOKENS = 512
NO_SLOT = -1
# A shared beginning shorter than this is not worth its bookkeeping.
LEAST_PREFIX = 16


class RunningSequence:
    """One request, and what was generated for it so far."""

    def __init__(self, request: GenerateRequest, submitted: float) -> None:
        self.request_id = request.request_id
        self.sampling: Sampling = request.sampling
        self.seed = request.seed & (2**64 - 1)
        self.prompt_length = int(request.prompt.size)
        self.submitted = submitted
        self.finish_reason = FinishReason.UNFINISHED
        self.order = 0
        self.slot = NO_SLOT
        self.interrupted = False
        room = self.prompt_length + max(
            self.sampling.max_new_tokens, request.resume.token_ids.size if request.resume else 0
        )
        self.tokens = np.zeros(room, dtype=np.int64)
        self.logprobs = np.zeros(room - self.prompt_length, dtype=np.float32)
        self.versions = np.zeros(room - self.prompt_length, dtype=np.int64)
        self.tokens[: self.prompt_length] = request.prompt
        self.length = self.prompt_length
        self.earlier_seconds = 0.0
        if request.resume is not None:
            partial = request.resume
            self.length += int(partial.token_ids.size)
            self.tokens[self.prompt_length : self.length] = partial.token_ids
            self.logprobs[: self.generated] = partial.logprobs
            self.versions[: self.generated] = expand(partial.versions)
            self.earlier_seconds = partial.seconds
        self.on_tokens = request.on_tokens
        self._told = self.length
        self.prefix = b""
        self.prefix_epoch = -1

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def waits(self) -> bool:
        """Whether it has no slot and has not ended."""
        return self.slot == NO_SLOT and self.finish_reason is FinishReason.UNFINISHED

    @property
    def known(self) -> npt.NDArray[np.int64]:
        return self.tokens[: self.length]

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens[self.length] = token
        self.logprobs[self.generated] = logprob
        self.versions[self.generated] = version
        self.length += 1

    def news(self) -> Int32Array:
        """int32 [n]: what was sampled since this was last asked."""
        told, self._told = self._told, self.length
        return self.tokens[told : self.length].astype(np.int32)

    def generation(self, now: float) -> Generation:
        n = self.generated
        return Generation(
            request_id=self.request_id,
            token_ids=self.tokens[self.prompt_length : self.length].astype(np.int32),
            logprobs=self.logprobs[:n].copy(),
            versions=spans_of(self.versions[:n]),
            finish_reason=self.finish_reason,
            seconds=self.earlier_seconds + now - self.submitted,
        )


class ContinuousBatch:
    """The sequences that wait and run, over one model and its cache."""

    def __init__(
        self, model: HeldModel, concurrency: int, stop_tokens: Collection[int], version: int
    ) -> None:
        self.version = version
        self.tokens_generated = 0
        self.tokens_prefilled = 0
        self._model = model
        self._concurrency = concurrency
        self._stop_tokens = frozenset(stop_tokens)
        self._cache = model.new_cache(concurrency)
        # Counts changes of weights: a version alone might be sent twice with different weights.
        self._epoch = 0
        self._submitted = 0
        # Of the weights in place, until it has agreed.
        self._canary: Canary | None = None
        # The tokens whose keys and values the cache keeps as a prefix, and under which weights.
        self._prefix = np.empty(0, dtype=np.int64)
        self._prefix_epoch = -1
        self._waiting: deque[RunningSequence] = deque()
        # By slot. A sequence that has left (its own `slot` is none) stays until the next step.
        self._slots: list[RunningSequence] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running())

    @property
    def kv_use(self) -> float:
        """Tokens in the cache, as a part of those that all slots can hold."""
        tokens = sum(sequence.length for sequence in self._running())
        return tokens / (self._concurrency * self._model.context_length)

    def followed(self) -> list[RunningSequence]:
        """Running sequences whose tokens somebody wants as they come."""
        return [s for s in self._running() if s.on_tokens is not None]

    @property
    def interrupted(self) -> bool:
        """Whether sequences that new weights interrupted have yet to go on."""
        return any(sequence.interrupted for sequence in self._waiting)

    @property
    def unproven(self) -> bool:
        """Whether the weights in place have yet to prove that they are those that were sent."""
        return self._canary is not None

    def submit(self, sequences: Iterable[RunningSequence]) -> list[RunningSequence]:
        """Queues the sequences; returns those that have nothing left to generate."""
        ended = []
        for sequence in sequences:
            sequence.order = self._submitted
            self._submitted += 1
            if self._judge(sequence):
                ended.append(sequence)
            else:
                self._waiting.append(sequence)
        return ended

    def abort(self, request_ids: Collection[str]) -> list[RunningSequence]:
        """Takes the sequences out, unfinished; ids that have ended already are ignored."""
        running = [s for s in self._running() if s.request_id in request_ids]
        for sequence in running:
            sequence.slot = NO_SLOT
        waiting = [s for s in self._waiting if s.request_id in request_ids]
        for sequence in waiting:
            self._waiting.remove(sequence)
        self._forget_if_idle()
        return running + waiting

    def weights_changed(self, version: int, recompute: bool, canary: Canary | None) -> None:
        """Prefixes kept so far are stale; `recompute` sends the running sequences back as well."""
        self.version = version
        self._canary = canary
        self._epoch += 1
        if recompute:
            for sequence in sorted(self._running(), key=lambda s: s.order, reverse=True):
                sequence.slot = NO_SLOT
                sequence.interrupted = True
                self._waiting.appendleft(sequence)

    def step(self, admit: bool) -> list[RunningSequence]:
        """One forward pass, one token for each sequence in it; returns those that ended.

        `admit`: whether waiting sequences may join. With none running or joining, nothing happens
        but the canary.

        Raises:
            CanaryError: the weights are not those that were sent.
        """
        groups = self._join(admit)
        canary, self._canary = self._canary, None
        probe = canary.token_ids.astype(np.int64) if canary is not None else None
        if not self._slots:
            if canary is not None and probe is not None:
                prove(canary, self.version, self._model.logprobs(probe))
            return []
        decoding = self._slots[: len(self._slots) - sum(map(len, groups))]
        lengths = np.array([s.length for s in decoding], dtype=np.int64)
        tokens = [np.array([s.tokens[s.length - 1] for s in decoding], dtype=np.int64)]
        positions = [lengths - 1]
        spans = []
        # Rows of the packed tokens whose logits are wanted, and which of them each slot draws from.
        rows = list(range(len(decoding)))
        row_of_slot = list(rows)
        end = len(decoding)
        for group in groups:
            known = group[0].known
            shared = self._shared_prefix(known)
            start, end = end, end + known.size - shared
            tokens.append(known[shared:])
            positions.append(np.arange(shared, known.size))
            spans.append(Span(start, end, slice(group[0].slot, group[-1].slot + 1), shared))
            row_of_slot += [len(rows)] * len(group)
            rows.append(end - 1)
        self.tokens_prefilled += end - len(decoding)
        drawn = len(rows)
        if probe is not None:
            tokens.append(probe)
            positions.append(np.arange(probe.size))
            spans.append(unkept(end, end + probe.size))
            rows += range(end, end + probe.size - 1)

        logits = self._model.forward(
            np.concatenate(tokens),
            np.concatenate(positions),
            self._cache.plan(lengths, spans),
            np.array(rows) if spans else None,
        )
        if canary is not None and probe is not None:
            prove(canary, self.version, chosen_logprobs(logits[drawn:], probe))
            logits = logits[:drawn]
        if groups and self._prefix_epoch != self._epoch:
            self._prefix, self._prefix_epoch = groups[0][0].known.copy(), self._epoch
            self._cache.keep_prefix(groups[0][0].slot, self._prefix.size)
        return self._draw(logits[row_of_slot] if len(row_of_slot) > drawn else logits)

    def _shared_prefix(self, known: npt.NDArray[np.int64]) -> int:
        """How many first tokens the kept prefix spares; at least one token remains to compute."""
        if self._prefix_epoch != self._epoch or self._model.deterministic:
            return 0
        most = min(known.size - 1, self._prefix.size)
        differ = np.flatnonzero(known[:most] != self._prefix[:most])
        shared = int(differ[0]) if differ.size else most
        return shared if shared >= LEAST_PREFIX else 0

    def _running(self) -> list[RunningSequence]:
        return [s for slot, s in enumerate(self._slots) if s.slot == slot]

    def _join(self, admit: bool) -> list[list[RunningSequence]]:
        """Brings waiting sequences into slots; returns groups that share a prefill, in slot order.

        Afterwards the slots hold decoding sequences first, then those of the groups.
        """
        groups: dict[bytes, list[RunningSequence]] = {}
        followers: list[tuple[RunningSequence, RunningSequence]] = []
        # Later entries win, so that a slot that was left is preferred and taken over.
        left_last = sorted(self._slots, key=lambda s: s.slot == NO_SLOT)
        # What was prefilled for one and continues another is rounded as neither is by itself.
        shares = not self._model.deterministic
        donors = {s.prefix: s for s in left_last if shares and s.prefix_epoch == self._epoch}
        room = self._concurrency - self.running if admit else 0
        budget = PREFILL_TOKENS
        while room and self._waiting:
            sequence = self._waiting[0]
            known = sequence.known.tobytes()
            if known in donors:
                donor = donors[known]
                if donor.slot == NO_SLOT:
                    sequence.slot = self._slots.index(donor)
                    self._slots[sequence.slot] = donors[known] = sequence
                else:
                    followers.append((sequence, donor))
            elif known in groups:
                groups[known].append(sequence)
            else:
                cost = sequence.length - self._shared_prefix(sequence.known)
                # The first of all keeps its prefix; the others follow a step later and share it.
                if groups and (cost > budget or self._prefix_epoch != self._epoch):
                    break
                budget -= cost
                groups.setdefault(known, []).append(sequence)
            sequence.prefix, sequence.prefix_epoch = known, self._epoch
            sequence.interrupted = False
            self._waiting.popleft()
            room -= 1

        self._close_holes()
        joining = [*(s for s, _ in followers), *chain.from_iterable(groups.values())]
        longest = max((s.length for s in chain(self._slots, joining)), default=0)
        self._cache.reserve(longest, len(self._slots))
        for sequence in joining:
            sequence.slot = len(self._slots)
            self._slots.append(sequence)
        for sequence, donor in followers:
            self._cache.copy(donor.slot, sequence.slot, sequence.length - 1)
        return list(groups.values())

    def _close_holes(self) -> None:
        """Moves the last running sequences into slots that were left."""
        slot = 0
        while slot < len(self._slots):
            if self._slots[slot].slot == slot:
                slot += 1
                continue
            last = self._slots.pop()
            if last.slot == len(self._slots) and slot < len(self._slots):
                self._cache.copy(last.slot, slot, last.length - 1)
                last.slot = slot
                self._slots[slot] = last

    def _draw(self, logits: Tensor) -> list[RunningSequence]:
        """Draws the next token of the sequence in each slot from its row of the logits."""
        seeds = np.array([s.seed for s in self._slots], dtype=np.uint64)
        places = np.array([s.length for s in self._slots], dtype=np.uint64)
        samplings = [s.sampling for s in self._slots]
        tokens, logprobs = draw(logits, samplings, uniforms(seeds, places))
        self.tokens_generated += len(self._slots)
        ended = []
        drawn = zip(self._slots, tokens.tolist(), logprobs.tolist(), strict=True)
        for sequence, token, logprob in drawn:
            sequence.append(token, logprob, self.version)
            if self._judge(sequence):
                sequence.slot = NO_SLOT
                ended.append(sequence)
        self._forget_if_idle()
        return ended

    def _forget_if_idle(self) -> None:
        if not self._waiting and not self._running():
            self._slots.clear()
            self._cache.clear()
            self._prefix_epoch = -1

    def _judge(self, sequence: RunningSequence) -> bool:
        """Whether the sequence has ended; sets why."""
        if sequence.generated and int(sequence.known[-1]) in self._stop_tokens:
            sequence.finish_reason = FinishReason.STOP
        elif (
            sequence.generated >= sequence.sampling.max_new_tokens
            or sequence.length >= self._model.context_length
        ):
            sequence.finish_reason = FinishReason.LENGTH
        return sequence.finish_reason is not FinishReason.UNFINISHED
