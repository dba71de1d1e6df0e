"""The default scorer finds the answer in free text and guards the datasets' own scorers."""

import pytest
import reasoning_gym

from rollout_service.rewards.builtin import extract_answer, math_verify
from rollout_service.rewards.builtin import reasoning_gym as score


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("The answer is 7.", "7"),
        ("4 - 9 = -5", "-5"),
        ("9-4", "4"),
        ("It costs 1,234.50 dollars", "1234.50"),
        ("First 3, then 5, 6", "6"),
        (r"So \boxed{12} and not 13", "12"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("<answer>8</answer> is what I say, not 9", "8"),
        ("<answer>8</answer> no, <answer> 9\n</answer>", "9"),
        ("  no number ", "no number"),
    ],
)
def test_the_answer_in_a_completion(completion, answer):
    assert extract_answer(completion, numeric=True) == answer


def test_text_is_taken_whole_where_the_reference_is_text():
    assert extract_answer(" 7 red apples ", numeric=False) == "7 red apples"


def source_of(dataset: str, index: int = 0) -> tuple[dict, dict]:
    options = {"seed": 3, "size": 10}
    entry = reasoning_gym.create_dataset(dataset, **options)[index]
    return {"dataset": dataset, "options": options, "index": index}, entry


def test_right_and_wrong():
    source, entry = source_of("chain_sum", 2)
    assert score(f"That makes {entry['answer']}.", source=source) == 1.0
    assert score(f"That makes 1{entry['answer']}.", source=source) < 1.0


def test_an_entry_that_json_would_change_scores_all_the_same():
    source, entry = source_of("arc_agi")
    assert score(entry["answer"], source=source) == 1.0


def test_text_that_a_scorer_cannot_parse_is_worth_nothing():
    source, entry = source_of("prime_factorization")
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.get_score_answer_fn("prime_factorization")("a x b", entry)
    assert score("a x b", source=source) == 0.0


def test_a_scorer_that_raises_on_the_reference_answer_is_broken(monkeypatch):
    source, _ = source_of("chain_sum", 4)

    def broken(self, answer, entry):
        raise KeyError("metadata")

    monkeypatch.setattr(reasoning_gym.arithmetic.ChainSumDataset, "score_answer", broken)
    with pytest.raises(KeyError, match="metadata"):
        score("5", source=source)


def test_math_verify_compares_as_mathematics():
    assert math_verify(r"So the result is \boxed{0.5}", answer="1/2") == 1.0
    assert math_verify("I think it is 3", answer="1/2") == 0.0
