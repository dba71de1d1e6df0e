"""A small environment on OpenEnv's real server, run by OpenEnv's own Python: guess a secret."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    message: str


class Hint(Observation):
    hint: str


class Move(Action):
    row: int
    column: str


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="", step_count=0)
        self._secret = ""

    def reset(self, seed=None, episode_id=None, **options):
        self._secret = options.get("secret", "7")
        self._state = State(episode_id=episode_id or "", step_count=0)
        return Hint(hint=options.get("question", "Guess."), done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
        self._state.step_count += 1
        if action.message == "break":
            raise RuntimeError("the environment broke")
        right = self._secret in action.message
        return Hint(hint="right" if right else "wrong", done=right, reward=1.0 if right else -0.1)

    @property
    def state(self):
        return self._state


class Board(Observation):
    rows: int
    told: str


class MoveEnvironment(GuessEnvironment):
    def reset(self, seed=None, episode_id=None, **options):
        return Board(rows=seed or 0, told="go", done=False, reward=None)

    def step(self, action, timeout_s=None, **options):
        return Board(rows=action.row, told=action.column, done=True, reward=0.5)


if __name__ == "__main__":
    port, kind = int(sys.argv[1]), sys.argv[2]
    made = {"guess": (GuessEnvironment, Guess, Hint), "move": (MoveEnvironment, Move, Board)}
    uvicorn.run(
        create_app(*made[kind], max_concurrent_envs=2),
        host="127.0.0.1",
        port=port,
        log_level="warning",
    )
