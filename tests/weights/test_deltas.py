"""The codec: lossless, additive, and suspicious of what it decodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway import byte_planes, deltas
from leeway.deltas import Change, Delta
from leeway.errors import WireError
from leeway.tensors import Encoding, Tensor, describe, digest_of, numpy_dtype, words_of
from tests.weights.support import Trainer

DTYPES = ["<u2", "<f2", "<f4", "<f8", "i1", "<i2", "<i4", "<i8", "u1", "<u4", "<u8", "?"]


def random_bits(random: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Any bits: NaNs, infinities and negative zeros among them."""
    if dtype == "?":
        return random.integers(0, 2, shape).astype(np.bool_)
    size = int(np.prod(shape, dtype=int)) * np.dtype(dtype).itemsize
    return np.frombuffer(random.bytes(size), dtype).reshape(shape).copy()


@st.composite
def policies(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Three in a row; from one to the next any share of a tensor changes, by little or much, and
    now and then its dtype or shape."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 4))
    rows: list[dict[str, Tensor]] = [{}, {}, {}]
    for index in range(count):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        tensor = random_bits(random, dtype, shape)
        for row in rows:
            row[f"t{index}"] = tensor.copy()
            kind = draw(st.sampled_from(["same", "some", "few", "all", "other"]))
            share = {"same": 0.0, "few": 0.02, "some": 0.3, "all": 1.0, "other": 0.0}[kind]
            words = words_of(tensor)
            hit = random.random(words.size) < share
            # A bool's byte is 0 or 1.
            bound = 1 if tensor.dtype == np.bool_ else 1 << (8 * words.itemsize - 1)
            bound = min(bound, 4) if draw(st.booleans()) else bound
            moves = random.integers(-bound, bound, words.size).astype(words.dtype)
            words[hit] += moves[hit] if bound > 1 else 0
            if kind == "other":
                tensor = random_bits(random, draw(st.sampled_from(DTYPES)), shape[::-1])
    return rows


def encode(base: dict[str, Tensor], new: dict[str, Tensor]) -> Delta:
    return deltas.pack(
        [(r, deltas.difference(base.get(r.name), new[r.name])) for r in describe(new)]
    )


def decode(base: dict[str, Tensor], delta: Delta) -> dict[str, Tensor]:
    held = {name: tensor.copy() for name, tensor in base.items()}
    for record, change in deltas.unpack(delta.records, delta.payload):
        if change.encoding is Encoding.FULL:
            assert change.words is not None
            dtype = numpy_dtype(record.dtype)
            held[record.name] = change.words.copy().view(dtype).reshape(record.shape)
        else:
            deltas.apply(change, held[record.name])
    return held


def agree(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return {n: digest_of(t) for n, t in left.items()} == {n: digest_of(t) for n, t in right.items()}


@given(policies())
def test_any_bits_come_back(rows: list[dict[str, Tensor]]) -> None:
    base, new, _ = rows
    delta = encode(base, new)
    assert agree(decode(base, delta), new)
    for record in delta.records:
        same = np.array_equal(words_of(base[record.name]), words_of(new[record.name]))
        if base[record.name].dtype == new[record.name].dtype and same:
            assert record.encoding is Encoding.SAME or base[record.name].shape != record.shape


@given(policies())
def test_two_deltas_in_a_row_are_their_sum(rows: list[dict[str, Tensor]]) -> None:
    first, second, third = rows
    changes = []
    for record in describe(third):
        name = record.name
        one = deltas.difference(first[name], second[name])
        two = deltas.difference(second[name], third[name])
        changes.append((record, deltas.compose(one, two)))
    assert agree(decode(first, deltas.pack(changes)), third)


@given(policies(), st.data())
@settings(max_examples=200)
def test_damage_is_an_error_or_another_digest(
    rows: list[dict[str, Tensor]], data: st.DataObject
) -> None:
    base, new, _ = rows
    delta = encode(base, new)
    payload = bytearray(delta.payload)
    if payload:
        place = data.draw(st.integers(0, len(payload) - 1))
        payload[place] ^= data.draw(st.integers(1, 255))
    damaged = Delta(delta.records, bytes(payload[: data.draw(st.integers(0, len(payload)))]))
    try:
        result = decode(base, damaged)
    except WireError:
        return
    # Some bits of a frame's header carry nothing; otherwise the digest gives the damage away.
    digests = {record.name: record.digest for record in delta.records}
    wrong = [n for n, t in result.items() if digest_of(t) != digests[n]]
    assert wrong or agree(result, new)


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("byte", range(8))
def test_a_length_that_was_damaged_is_an_error(plane: int, byte: int) -> None:
    """Of a plane with another behind it, and of the last."""
    words = np.array([1, 2, 300, 65535], dtype=np.uint16)
    planes = bytearray(byte_planes.encode(words))
    at = 1
    for _ in range(plane):
        at += 8 + int.from_bytes(planes[at : at + 8], "little")
    planes[at + byte] ^= 0x80
    with pytest.raises(WireError, match="a byte plane of"):
        byte_planes.decode(memoryview(planes), words.size, words.dtype)


def test_the_cheaper_encoding_is_chosen() -> None:
    random = np.random.default_rng(0)
    base = random.integers(0, 1 << 16, 40_000).astype(np.uint16)
    few, most = base.copy(), base + 1
    few[::100] += 1
    assert deltas.difference(base, base.copy()).encoding is Encoding.SAME
    assert deltas.difference(base, few).encoding is Encoding.SPARSE
    assert deltas.difference(base, most).encoding is Encoding.DENSE
    assert deltas.difference(base, base.view(np.int16)).encoding is Encoding.FULL
    assert deltas.difference(None, base).encoding is Encoding.FULL


def test_a_delta_of_an_rl_step_is_small() -> None:
    trainer = Trainer(scale=100)
    before = trainer.weights()
    trainer.step(1e-6)
    after = trainer.weights()
    changed = sum(int((before[n] != after[n]).sum()) for n in before)
    delta = encode(before, after)
    assert len(delta.payload) < 2.2 * changed, "bytes a change"


@pytest.mark.parametrize("field", ["changed", "offset", "length"])
def test_a_record_that_lies_is_refused(field: str) -> None:
    trainer = Trainer()
    before = trainer.weights()
    trainer.step()
    delta = encode(before, trainer.weights())
    for wrong in (1, 1 << 40):
        records = tuple(
            replace(r, **{field: wrong}) if r.encoding is Encoding.SPARSE else r
            for r in delta.records
        )
        with pytest.raises(WireError):
            decode(before, Delta(records, delta.payload))


def test_a_change_outside_of_its_tensor_is_refused() -> None:
    tensor = np.zeros(4, np.uint16)
    change = Change(Encoding.SPARSE, np.array([1, 4]), np.ones(2, np.uint16))
    with pytest.raises(WireError, match="outside"):
        deltas.apply(change, tensor)
