"""What is learned: prompts, who scores them, how they are sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, SecretStr, model_validator

from leeway.errors import ConfigError
from leeway.section import Section


class ReasoningGymConfig(Section):
    dataset: str
    """Name of a `reasoning-gym` dataset, e.g. chain_sum."""
    args: dict[str, Any] = Field(default_factory=dict)
    """The dataset's own options."""


class ExampleConfig(Section):
    """A worked example: what a user asked, and how it was answered."""

    user: str
    assistant: str


class EndpointConfig(Section):
    """A model that others serve, behind an OpenAI-compatible server."""

    url: Annotated[str, Field(pattern=r"^https?://")]
    """Its routes lie below, e.g. http://judge.example:8000/v1."""
    model: str
    """The name under which it is served there."""
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    """Holds the key instead."""
    concurrency: PositiveInt = 8
    """Requests that a node has under way there at once, over all its reward processes."""
    seconds: PositiveFloat = 60.0
    """Deadline of one question, waiting for its turn and retries included."""

    @model_validator(mode="after")
    def _one_key(self) -> EndpointConfig:
        if self.api_key is not None and self.api_key_file is not None:
            raise ValueError("give one of api_key and api_key_file")
        return self

    def key(self) -> str | None:
        """Raises `ConfigError` when its file cannot be read."""
        if self.api_key_file is None:
            return self.api_key.get_secret_value() if self.api_key is not None else None
        try:
            return self.api_key_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"api_key_file = {self.api_key_file}: {error.strerror}") from error


class TaskConfig(Section):
    """Where prompts come from and how answers are scored. Give exactly one source, and at most one
    of `reward`, `environment` and `agent`."""

    reasoning_gym: ReasoningGymConfig | None = None
    jsonl: Path | None = None
    """A file of one JSON object a line, with `prompt` (text or chat messages), `answer`, and any
    other columns."""
    bad_rows: Literal["skip", "stop"] = "skip"
    """What an unreadable row of `jsonl` does: it is left out, counted and reported, or it ends the
    run."""
    system_prompt: str | None = None
    """By default what the model's chat template says."""
    examples: tuple[ExampleConfig, ...] = ()
    """Turns that come before every prompt and show how to answer."""
    keep: str | None = None
    """`module:function` or `path/to/file.py:function`, called as `keep(**columns) -> bool` on each
    row of the source: those for which it is false are neither trained on nor held out."""
    reward: str | None = None
    """`module:function` or `path/to/file.py:function`, called as `reward(completion, **columns)`.
    By default a reasoning-gym source scores with its dataset's own scorer."""
    reward_seconds: PositiveFloat = 10.0
    """Deadline of one reward call, without what judges take; the process that misses it is
    killed."""
    reward_processes: PositiveInt = 1
    judges: dict[Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*$")], EndpointConfig] = Field(
        default_factory=dict
    )
    """By name: a reward function, or an environment's `reset`, gets each that it has a parameter
    for."""
    environment: str | None = None
    """`module:Class` or `path/to/file.py:Class`, with `reset(**columns)` and tools or
    `step(action)`."""
    environment_seconds: PositiveFloat = 60.0
    """Deadline of one of its calls; the process that misses it is killed."""
    environment_processes: PositiveInt = 64
    """Episodes at once: each has a process of its own."""
    environment_turns: PositiveInt = 16
    """Most answers of the model in an episode."""
    agent: str | tuple[str, ...] | None = None
    """`module:function` or `path/to/file.py:function`, an `async def run(task, session)`; or a
    command line, started for each session; or "external": programs that run elsewhere open
    sessions."""
    session_seconds: PositiveFloat = 600.0
    """Deadline of one session of an environment or agent."""
    memory_bytes: PositiveInt = 4 << 30
    """What each process with a reward, environment or agent function may have of its own."""
    heldout: NonNegativeInt = 0
    """So many problems are kept out of training and scored before and after."""

    @model_validator(mode="after")
    def _one_source(self) -> TaskConfig:
        if (self.reasoning_gym is None) == (self.jsonl is None):
            raise ValueError("give exactly one source: task.reasoning_gym or task.jsonl")
        ways = [self.reward, self.environment, self.agent]
        given = sum(way is not None for way in ways)
        if given > 1:
            raise ValueError("give one of task.reward, task.environment and task.agent")
        if self.judges and self.reward is None and self.environment is None:
            raise ValueError("task.judges are asked by task.reward or task.environment; give one")
        return self

    @property
    def judge_seconds(self) -> float:
        """The longest that one question to a judge may take."""
        return max((judge.seconds for judge in self.judges.values()), default=0.0)

    def check_scored(self) -> None:
        """What a run with rollouts needs beyond one that learns from written answers.

        Raises:
            ConfigError: Nothing would score an answer.
        """
        if self.jsonl is not None and (self.reward or self.environment or self.agent) is None:
            raise ConfigError(
                "task.jsonl needs task.reward, e.g. my_rewards.py:reward, or task.environment or "
                "task.agent"
            )


class SamplingConfig(Section):
    """How answers are drawn; the same on both sides of the queue."""

    group_size: PositiveInt = 8
    max_new_tokens: PositiveInt = 256
    temperature: Annotated[float, Field(gt=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    top_k: NonNegativeInt = 0
