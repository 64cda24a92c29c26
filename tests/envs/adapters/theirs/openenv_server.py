"""A server of the real OpenEnv that plays the game of ``scripted_openenv.py``; its argument is the port."""

import sys
import time

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import field_validator


class Guess(Action):
    """A guess."""

    number: int

    @field_validator("number")
    @classmethod
    def check(cls, number: int) -> int:
        # The server can't write this error down, and ends the session: SESSION_ERROR.
        if number == 102:
            raise ValueError("an odd number")
        return number


class Seen(Observation):
    text: str = ""


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int = 0, **_: object) -> Seen:
        self.right = 1 + seed % 20
        return Seen(text="Guess my number, from 1 to 20.")

    def step(self, action: Guess, **_: object) -> Seen:
        match action.number:
            case 101:
                raise ZeroDivisionError("division by zero")
            case 103:
                time.sleep(5.0)
            case 104:
                return Seen(text="x" * (17 << 20))
            case 105:
                return Seen(text="well done", reward=1_000_000, done=True)
            case 106:
                return Seen(text="well done", reward=float("nan"), done=True)
        won = action.number == self.right
        return Seen(text="right" if won else "wrong", reward=1.0 if won else None, done=won)


uvicorn.run(create_app(Game, Guess, Seen, max_concurrent_envs=8), port=int(sys.argv[1]), log_level="error")
