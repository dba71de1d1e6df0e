"""Megatron's parameters are Hugging Face's, cut and joined: both ways, and in every part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.errors import ConfigError
from tests.trainer.trainer_cases import random_groups
from trainer_service.backends.inputs import decode, encode
from trainer_service.backends.megatron import context, names
from trainer_service.backends.megatron.names import Heads, Join, Source
from trainer_service.backends.packed_attention import attend
from trainer_service.batching import pack
from trainer_service.packed import Inputs

HEADS = Heads(count=8, groups=4, width=3)
SHAPES = {
    Join.COPY: [(5, 7)],
    Join.ROWS: [(8, 7)],
    Join.COLUMNS: [(5, 8)],
    Join.GATE_UP: [(12, 5), (12, 5)],
    Join.QKV: [(24, 5), (12, 5), (12, 5)],
    Join.EXPERT: [(4, 6)],
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("join", list(Join))
def test_what_ranks_hold_joins_to_the_whole(join: Join, ranks: int) -> None:
    source = Source(join, ("x",) * len(SHAPES[join]))
    whole = [torch.randn(shape) for shape in SHAPES[join]]
    parts = [names.join(source, whole, HEADS, ranks, rank) for rank in range(ranks)]
    again = names.split(source, parts, HEADS)
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    if join not in (Join.COPY, Join.EXPERT):
        assert sum(part.numel() for part in parts) == sum(w.numel() for w in whole)


def test_biases_of_queries_keys_and_values_are_joined_like_their_weights() -> None:
    source = Source(Join.QKV, ("q", "k", "v"))
    whole = [torch.randn(24), torch.randn(12), torch.randn(12)]
    joined = names.join(source, whole, HEADS, 1, 0)
    # The first group: two queries, a key and a value, of width 3.
    torch.testing.assert_close(joined[:6], whole[0][:6])
    torch.testing.assert_close(joined[6:9], whole[1][:3])
    torch.testing.assert_close(joined[9:12], whole[2][:3])


@pytest.mark.parametrize(
    ("parameter", "tied", "expected"),
    [
        ("decoder.layers.1.mlp.linear_fc2.weight", False, "model.layers.5.mlp.down_proj.weight"),
        (
            "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight",
            False,
            "model.layers.4.input_layernorm.weight",
        ),
        ("head.weight", False, "lm_head.weight"),
        ("head.weight", True, "model.embed_tokens.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
            False,
            "model.layers.4.mlp.experts.gate_up_proj",
        ),
    ],
)
def test_names(parameter: str, tied: bool, expected: str) -> None:
    assert names.source(parameter, 4, tied=tied).names[0] == expected


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'decoder\.layers\.0\.mlp\.shared\.weight' has no"):
        names.source("decoder.layers.0.mlp.shared.weight", 0, tied=False)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1000), st.sampled_from([2, 3]))
def test_context_parallel_ranks_attend_as_one(seed: int, ranks: int) -> None:
    """Each rank's queries over all keys: the same as all queries on one rank."""
    groups = random_groups(seed)
    count = sum(len(g.trajectories) for g in groups)
    (batch,) = pack(groups, np.ones(count), np.ones(count), 10_000).microbatches
    row = batch.filled(2 * ranks)
    size = row.token_ids.size
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, 1, 2, size, 4, generator=generator)
    whole = attend(query, key, value, row.segments, range(len(row.segments)), None)
    seen = []
    for rank in range(ranks):
        part = context.part(row.segments, ranks, rank)
        places = torch.from_numpy(part.tokens)
        own = attend(query[:, :, places], key, value, part.segments, part.own, None)
        torch.testing.assert_close(own, whole[:, places], rtol=1e-5, atol=1e-6)
        assert part.tokens.size == size // ranks
        seen.append(part.tokens)
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), np.arange(size))


def test_inputs_travel_whole() -> None:
    groups = random_groups(3, temperature=0.7)
    count = sum(len(g.trajectories) for g in groups)
    batches = pack(groups, np.ones(count), np.ones(count), 60).microbatches
    sent = [*batches, Inputs.idle()]
    received = decode(encode(sent))
    assert len(received) == len(sent) == len(batches) + 1
    for one, other in zip(sent, received, strict=True):
        assert one.segments == other.segments
        for name in ("token_ids", "positions", "rows", "temperatures", "predictions", "targets"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
    assert decode(encode([])) == []
