"""What the engine is given is what it lacks: after any number of versions, in whatever encoding."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from leeway import deltas
from leeway.manifests import Manifest
from leeway.tensors import Tensor, aligned, describe, lay_out, policy_digest, words_of
from rollout_service.engines.base import ChangedElements
from rollout_service.host_copy import HostCopy
from tests.weights.support import Trainer, same

# Sizes of a step: nothing moves, a few elements do, most do.
STEPS = st.lists(st.sampled_from([0.0, 1e-6, 3e-6, 1e-2]), min_size=1, max_size=4)


def manifest(base: dict[str, Tensor] | None, new: dict[str, Tensor]) -> tuple[Manifest, bytes]:
    records = describe(new)
    held = base or {}
    delta = deltas.pack([(r, deltas.difference(held.get(r.name), new[r.name])) for r in records])
    payload = delta.payload
    if base is None:
        records = lay_out(records)
        whole = bytearray(aligned(records[-1].offset + records[-1].length))
        for r in records:
            whole[r.offset : r.offset + r.length] = words_of(new[r.name]).tobytes()
        payload = bytes(whole)
    base_digest = policy_digest(describe(base)) if base is not None else ""
    digest = policy_digest(records)
    packed = records if base is None else delta.records
    return Manifest("run", 1, 1, base_digest, packed, len(payload), digest), payload


def hand_over(host: HostCopy, engine: dict[str, Tensor]) -> int:
    """Gives the engine what it lacks; returns in how many tensors that was only some elements."""
    sparse = 0
    for name, update in host.lacking().items():
        if isinstance(update, ChangedElements):
            assert (update.positions[1:] > update.positions[:-1]).all()
            engine[name].reshape(-1)[update.positions] = update.values
            sparse += 1
        else:
            engine[name] = update.copy()
    host.loaded()
    return sparse


@given(st.lists(st.tuples(STEPS, st.booleans()), min_size=1, max_size=4), st.booleans())
def test_the_engine_gets_what_it_lacks(
    rounds: list[tuple[list[float], bool]], loaded: bool
) -> None:
    """Several versions are staged before each hand-over, some of them as full weights."""
    trainer = Trainer()
    host, engine = HostCopy(), dict[str, Tensor]()
    if loaded:
        host.adopt(trainer.weights())
        engine = trainer.weights()
        assert host.lacking() == {}
    for steps, full in rounds:
        for size in steps:
            before = trainer.weights()
            trainer.step(size)
            known = None if full or not host.digest else before
            described, payload = manifest(known, trainer.weights())
            host.stage(described, np.frombuffer(payload, dtype=np.uint8).copy())
        hand_over(host, engine)
        assert same(engine, trainer.weights())
        assert host.lacking() == {}


def test_few_changes_are_handed_over_as_elements() -> None:
    trainer = Trainer()
    host, engine = HostCopy(), trainer.weights()
    host.adopt(trainer.weights())
    for _ in range(2):
        before = trainer.weights()
        trainer.step(1e-6)
        described, payload = manifest(before, trainer.weights())
        host.stage(described, np.frombuffer(payload, dtype=np.uint8).copy())
    assert hand_over(host, engine) == 2
    assert same(engine, trainer.weights())
