"""The part of gem-llm 0.1.0 that the page's adapter uses, with a game that fails in some ways."""

import os
import random
import re


class Guess:
    def reset(self, seed: int) -> tuple[str, dict[str, str]]:
        random.seed(seed)
        self.number = random.randint(1, 10)
        return "Guess my number.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, str]]:
        guess = re.search(r"\\boxed{(\d+)}", action)
        if "die" in action:
            os._exit(3)
        if guess is None:
            return "That is no guess.", -0.1, True, False, {}
        won = int(guess[1]) == self.number + 1 // (int(guess[1]) - 13) * 0  # an unlucky guess divides by zero
        return "right" if won else "wrong", float(won), won, False, {}


def make(game: str) -> Guess:
    assert game == "game:GuessTheNumber-v0-easy"
    return Guess()
