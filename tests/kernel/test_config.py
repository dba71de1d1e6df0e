"""The configuration: sources, messages, secrets."""

from pathlib import Path

import pytest

from leeway.config import Config, load
from leeway.errors import ConfigError

MINIMAL = ["model.path=m", "task.jsonl=rows.jsonl", "task.reward=r.py:reward"]


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {path: m}\n"
        "task: {jsonl: rows.jsonl, reward: 'r.py:reward'}\n"
        "trainer: {lr: 1.0e-3, steps: 7}\n"
    )
    environment = {"LEEWAY__TRAINER__LR": "1e-4", "LEEWAY__RUN__SEED": "5"}
    config = load(file, ["trainer.lr=1e-5"], environment)
    assert config.trainer.lr == 1e-5
    assert config.trainer.steps == 7
    assert config.run.seed == 5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.lrr=1e-5", "trainer.lrr: unknown key; did you mean 'lr'?"),
        ("trainr.lr=1e-5", "trainr: unknown key; did you mean 'trainer'?"),
        ("trainer.zzz=1", "trainer.zzz: unknown key; known: steps,"),
        ("trainer.lr=-1", "trainer.lr = -1"),
        ("trainer.steps=many", "trainer.steps = 'many'"),
        ("sampling.group_size=1", "sampling.group_size = 1: advantages are relative"),
        ("trainer.minibatches=3", "trainer.minibatches = 3 does not divide"),
        ("queue.min_group=9", "queue.min_group = 9: use 2 to sampling.group_size = 8"),
        ("queue.group_release=streaming", "compares the answers to a prompt"),
        ("trainer.lora_publish=adapters", "trainer.lora_rank = 0"),
        ("security.certificate=a.pem", "security.certificate and security.key belong together"),
        ("run.name=a/b", "run.name = 'a/b'"),
        ("trainer", "write key=value"),
        ("model.path.x=1", "'path' is a value, not a section"),
    ],
)
def test_a_wrong_key_or_value_is_named_with_its_remedy(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [*MINIMAL, override], {})
    assert message in str(caught.value)


def test_every_fault_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, [*MINIMAL, "trainer.lr=0", "trainer.steps=0"], {})
    assert "trainer.lr" in str(caught.value)
    assert "trainer.steps" in str(caught.value)


def test_only_a_run_with_rollouts_needs_a_reward() -> None:
    load(None, MINIMAL, {}).task.check_scored()
    unscored = load(None, [*MINIMAL, "task.reward=null"], {})
    with pytest.raises(ConfigError, match=r"task\.jsonl needs task\.reward"):
        unscored.task.check_scored()
    load(None, [*MINIMAL, "task.reward=null", "task.agent=external"], {}).task.check_scored()


def test_exactly_one_task_source() -> None:
    with pytest.raises(ConfigError, match="exactly one source"):
        load(None, ["model.path=m", "task.reward=r.py:reward"], {})


@pytest.mark.parametrize("text", ["[1, 2]", "key: [unclosed"])
def test_a_file_that_is_not_a_configuration(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        load(file, [], {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "absent.yaml", [], {})


def test_secrets_never_print() -> None:
    config = load(None, [*MINIMAL, "security.token=hunter2", "queue.redis_url=redis://:pw@h"], {})
    for text in (config.to_yaml(), repr(config), str(config.model_dump())):
        assert "hunter2" not in text
        assert "pw@h" not in text


def test_the_recorded_configuration_loads_again_without_its_secrets(tmp_path: Path) -> None:
    file = tmp_path / "resolved.yaml"
    file.write_text(load(None, [*MINIMAL, "security.token=hunter2"], {}).to_yaml(secret=None))
    assert load(file, [], {}) == load(None, MINIMAL, {})


def test_no_default_secret_and_loopback_only() -> None:
    config = Config.model_validate({"model": {"path": "m"}, "task": {"jsonl": "a", "reward": "b"}})
    assert not config.security.secured
    assert config.queue.address.startswith("127.0.0.1:")
    assert config.weights.address.startswith("127.0.0.1:")
