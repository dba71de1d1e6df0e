"""The graph of answers: every sampled id is trained once, where it was sampled."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leeway.errors import DataError
from leeway.trajectory import FinishReason
from leeway.versions import expand, spans_of
from rollout_service.gateway.conversation import Answer, Conversation


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    """Answers that continue any earlier one, or none; some never reached their client."""
    conversation = Conversation()
    # Each id once, so that it says where it came from.
    ids = iter(range(1, 10_000))
    for number in range(draw(st.integers(1, 8))):
        parents: list[Answer | None] = [None, *conversation.answers]
        parent = draw(st.sampled_from(parents))
        fewest = 1 if parent is None else 0
        context = [next(ids) for _ in range(draw(st.integers(fewest, 4)))]
        sampled = [next(ids) for _ in range(draw(st.integers(1, 4)))]
        versions = np.sort(
            draw(st.lists(st.integers(0, 3), min_size=len(sampled), max_size=len(sampled)))
        )
        conversation.add(
            Answer(
                answer_id=str(number),
                parent=parent,
                context=np.array(context, dtype=np.int32),
                token_ids=np.array(sampled, dtype=np.int32),
                logprobs=-np.array(sampled, dtype=np.float32) / 10_000,
                versions=spans_of(versions),
                finish_reason=FinishReason.STOP,
                seconds=1.0,
                delivered=draw(st.booleans()),
                reward=draw(st.none() | st.integers(-3, 3).map(float)),
                constrained=draw(st.booleans()),
            )
        )
    return conversation


@settings(max_examples=400, deadline=None)
@given(conversations())
def test_what_was_delivered_is_trained_once_and_where_it_was_sampled(
    conversation: Conversation,
) -> None:
    delivered = conversation.delivered
    if not delivered:
        with pytest.raises(DataError, match="nothing to train on"):
            conversation.sampled()
        return
    sampled = conversation.sampled()
    starts = [0, *sampled.branch_starts, sampled.token_ids.size]
    branches = [sampled.token_ids[a:b] for a, b in pairwise(starts)]
    trained = sampled.token_ids[sampled.prompt_length :][sampled.loss_mask]
    own = [answer for answer in delivered if not answer.constrained]
    assert sorted(trained.tolist()) == sorted(
        token for answer in own for token in answer.token_ids.tolist()
    )
    assert set(sampled.token_ids.tolist()).issuperset(
        token for answer in delivered for token in answer.token_ids.tolist()
    )
    # Wherever an answer is trained, its whole conversation is before it, and nothing else.
    for answer in own:
        last = int(answer.token_ids[-1])
        place = int(
            np.flatnonzero(
                (sampled.token_ids == last)
                & np.concatenate([np.zeros(sampled.prompt_length, dtype=bool), sampled.loss_mask])
            )[0]
        )
        branch = max(i for i, start in enumerate(starts[:-1]) if start <= place)
        upto = branches[branch][: place - starts[branch] + 1]
        assert upto.tolist() == answer.sequence().tolist()
    # Log-probabilities, versions and rewards lie at their tokens; masked ones carry none.
    everywhere = expand(sampled.versions)
    for answer in own:
        for offset, (token, version) in enumerate(
            zip(answer.token_ids, expand(answer.versions), strict=True)
        ):
            at = int(
                np.flatnonzero(
                    (sampled.token_ids[sampled.prompt_length :] == token) & sampled.loss_mask
                )[0]
            )
            assert sampled.logprobs[at] == answer.logprobs[offset]
            assert everywhere[at] == version
            end = offset == answer.token_ids.size - 1
            assert sampled.turn_rewards[at] == ((answer.reward or 0.0) if end else 0.0)
    assert not sampled.logprobs[~sampled.loss_mask].any()
    assert sampled.turn_rewards.sum() == conversation.turn_reward


@settings(max_examples=100, deadline=None)
@given(conversations())
def test_a_path_is_one_sequence(conversation: Conversation) -> None:
    """One that always continued its last answer needs no second sequence."""
    last: Answer | None = None
    path = Conversation()
    for answer in conversation.answers:
        answer.parent = last
        answer.delivered = True
        path.add(answer)
        last = answer
    assert path.sampled().branch_starts == ()


def test_continuing_an_answer_proves_that_it_was_delivered() -> None:
    conversation = Conversation()
    one = _answer("one", None)
    conversation.add(one)
    assert conversation.delivered == []
    conversation.add(_answer("two", one))
    assert conversation.delivered == [one]


def test_turns_are_rated_by_name() -> None:
    conversation = Conversation()
    with pytest.raises(DataError, match="nothing was sampled"):
        conversation.reward_turn(1.0)
    conversation.add(_answer("one", None))
    conversation.add(_answer("two", conversation.answers[0]))
    conversation.reward_turn(0.5)
    conversation.reward_turn(0.25, "one")
    assert [answer.reward for answer in conversation.answers] == [0.25, 0.5]
    with pytest.raises(DataError, match=r"turn = 'three'.*'one', 'two'"):
        conversation.reward_turn(1.0, "three")


def _answer(name: str, parent: Answer | None) -> Answer:
    ids = np.array([1, 2], dtype=np.int32)
    return Answer(
        answer_id=name,
        parent=parent,
        context=ids,
        token_ids=ids,
        logprobs=np.zeros(2, dtype=np.float32),
        versions=spans_of([0, 0]),
        finish_reason=FinishReason.STOP,
        seconds=0.0,
    )
