"""The built-in verifiable task: mini-Countdown, with an endless, seeded supply of problems.

    prompt      8 15 6 10 ->25 :
    response    6 + 10 = 16 off 9 , 10 - 6 = 4 off 21 , 15 + 10 = 25 off 0 answer 15 + 10 <eos>

A problem is solvable with exactly two of its numbers. A demonstration searches: it tries the sums
and differences of pairs in random order, each at most once, and writes every try and its distance
to the target. After each failed try it gives up with probability `give_up`, and answers with the
failed try. So response lengths have a long tail, the accuracy of imitation is limited, and
reinforcement learning has something to learn: not to give up. Small reproductions of R1's training
(Jiayi Pan's TinyZero) use the same game with more operators.

Every problem, prompt and demonstration is a pure function of the task's parameters, its seed, the
split and an index. Knows nothing of models, rollouts or training. Called by the data buffer, the
SFT loader and the loops.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slipstream.data.chat_template import prompt_ids
from slipstream.data.keyed import KeyedDraws
from slipstream.data.tokenizer import NUM_NUMBERS, build_tokenizer
from slipstream.errors import ConfigError
from slipstream.rewards.countdown import Verdict, verify
from slipstream.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "held_out")
DATA_SOURCE = "countdown"

_MAX_DRAWS = 100_000
_MAX_REPEATS = 10_000


@dataclass(frozen=True, slots=True)
class Problem:
    """Distinct positive numbers, in display order, and a target that two of them reach."""

    numbers: tuple[int, ...]
    target: int

    @property
    def canonical(self) -> str:
        """A text that does not depend on the order of the numbers; it decides the split."""
        return f"{' '.join(str(n) for n in sorted(self.numbers))} -> {self.target}"

    @property
    def text(self) -> str:
        """The content of the prompt."""
        return f"{' '.join(str(n) for n in self.numbers)} ->{self.target} :"


@dataclass(frozen=True, slots=True)
class Try:
    """One step of a search: `left sign right = value`."""

    left: int
    sign: str
    right: int
    value: int

    @property
    def expression(self) -> str:
        return f"{self.left} {self.sign} {self.right}"

    def text(self, target: int) -> str:
        """The try as written in a demonstration: its value and its distance to the target."""
        return f"{self.expression} = {self.value} off {abs(target - self.value)}"


def _tries(numbers: Sequence[int]) -> list[Try]:
    """Return the sum and the difference of every pair of `numbers`."""
    tries = []
    for i, a in enumerate(numbers):
        for b in numbers[i + 1 :]:
            high, low = max(a, b), min(a, b)
            tries += [Try(a, "+", b, a + b), Try(high, "-", low, high - low)]
    return tries


def _shuffled(tries: list[Try], draws: KeyedDraws) -> list[Try]:
    """Shuffle `tries` in place, uniformly (Fisher and Yates)."""
    for last in range(len(tries) - 1, 0, -1):
        chosen = draws.below(last + 1)
        tries[last], tries[chosen] = tries[chosen], tries[last]
    return tries


def split_of(problem: Problem, holdout_fraction: float) -> Split:
    """Return the split of a problem. It depends on a hash of the problem, not on any seed."""
    digest = hashlib.blake2b(problem.canonical.encode(), digest_size=8).digest()
    held_out = int.from_bytes(digest, "little") < holdout_fraction * 2.0**64
    return "held_out" if held_out else "train"


class CountdownTask:
    """Problems, prompts, demonstrations and verification of mini-Countdown.

    A problem has `min_numbers` to `max_numbers` distinct numbers from 1 to `max_number`. The target
    is the sum or positive difference of a pair, and never one of the numbers. `give_up` is the
    probability, after each failed try, that a demonstration ends with a wrong answer; after
    `max_tries` failed tries (None: no limit) it always does. `holdout_fraction` of all problems,
    chosen by hash, are held out. `tokenizer` renders the prompts; None is the task's own
    (`build_tokenizer`). Raises ConfigError for impossible parameters.
    """

    name = DATA_SOURCE

    def __init__(
        self,
        seed: int = 0,
        *,
        min_numbers: int = 3,
        max_numbers: int = 5,
        max_number: int = 12,
        give_up: float = 0.1,
        max_tries: int | None = None,
        holdout_fraction: float = 0.15,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if not 3 <= min_numbers <= max_numbers:
            raise ConfigError(
                f"countdown: min_numbers {min_numbers} and max_numbers {max_numbers} must satisfy "
                "3 <= min_numbers <= max_numbers (two numbers leave nothing to search)"
            )
        largest = (NUM_NUMBERS - 1) // 2
        if not max(6, max_numbers) <= max_number <= largest:
            raise ConfigError(
                f"countdown: max_number {max_number} must be at least 6, at least max_numbers "
                f"({max_numbers}), and at most {largest} so that every sum is one token (0 to "
                f"{NUM_NUMBERS - 1})"
            )
        if not 0.0 <= give_up < 1.0:
            raise ConfigError(f"countdown: give_up {give_up} must be in [0, 1)")
        if max_tries is not None and max_tries < 1:
            raise ConfigError(f"countdown: max_tries {max_tries} must be at least 1, or null")
        if not 0.0 < holdout_fraction < 1.0:
            raise ConfigError(
                f"countdown: holdout_fraction {holdout_fraction} must be between 0 and 1 "
                "(both excluded): each split needs problems"
            )
        self.seed = seed
        self.min_numbers = min_numbers
        self.max_numbers = max_numbers
        self.max_number = max_number
        self.give_up = give_up
        self.max_tries = max_tries
        self.holdout_fraction = holdout_fraction
        self._held_out: list[Problem] = []
        self._held_out_seen: set[str] = set()
        self._held_out_draws = 0
        self.tokenizer = build_tokenizer() if tokenizer is None else tokenizer

    def problem(self, split: Split, index: int) -> Problem:
        """Return problem `index` (from 0) of `split`.

        There are endless training problems, and a problem may occur at several indices. Held-out
        problems are distinct, so that an evaluation on n prompts uses n different problems. The two
        splits have no problem in common. Raises ConfigError past the last held-out problem.
        """
        _check_address(split, index)
        if split == "train":
            return self._drawn(split, index)
        while len(self._held_out) <= index:
            self._find_held_out()
        return self._held_out[index]

    def _find_held_out(self) -> None:
        """Append the next new held-out problem, in the order of the draws."""
        for _ in range(_MAX_REPEATS):
            problem = self._drawn("held_out", self._held_out_draws)
            self._held_out_draws += 1
            if problem.canonical not in self._held_out_seen:
                self._held_out_seen.add(problem.canonical)
                self._held_out.append(problem)
                return
        raise ConfigError(
            f"countdown: there are only {len(self._held_out)} held-out problems; ask for fewer, or "
            "raise data.task_kwargs.max_number or holdout_fraction"
        )

    def _drawn(self, split: Split, index: int) -> Problem:
        """Draw problems until one belongs to the split."""
        for draw in range(_MAX_DRAWS):
            draws = KeyedDraws("countdown-problem", self.seed, split, index, draw)
            problem = self._draw(draws)
            if problem is not None and split_of(problem, self.holdout_fraction) == split:
                return problem
        raise ConfigError(
            f"countdown: no {split} problem in {_MAX_DRAWS} draws with holdout_fraction "
            f"{self.holdout_fraction}: set it closer to 0.1 or widen the number range"
        )

    def _draw(self, draws: KeyedDraws) -> Problem | None:
        count = self.min_numbers + draws.below(self.max_numbers - self.min_numbers + 1)
        numbers = tuple(draws.shuffled(range(1, self.max_number + 1))[:count])
        # Use distinct values, so that a target with many solutions is not drawn more often.
        targets = sorted({step.value for step in _tries(numbers)} - set(numbers))
        return Problem(numbers, targets[draws.below(len(targets))]) if targets else None

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return prompt `index` of `split`, rendered with the tokenizer's chat template."""
        problem = self.problem(split, index)
        messages: list[Message] = [{"role": "user", "content": problem.text}]
        return Prompt(
            uid=f"{DATA_SOURCE}/{self.seed}/{split}/{index}",
            ids=prompt_ids(self.tokenizer, messages),
            messages=messages,
            data_source=DATA_SOURCE,
            ground_truth={"numbers": list(problem.numbers), "target": problem.target},
            extra_info={"split": split, "index": index},
            ability="math",
        )

    def demonstration(self, split: Split, index: int, *, variant: int = 0) -> list[Message]:
        """Return a worked conversation `[user, assistant]` for problem `index`.

        Different values of `variant` give independent demonstrations of the same problem.
        """
        problem = self.problem(split, index)
        draws = KeyedDraws("countdown-demonstration", self.seed, split, index, variant)
        words: list[str] = []
        for count, step in enumerate(_shuffled(_tries(problem.numbers), draws), start=1):
            words.append(step.text(problem.target))
            solved = step.value == problem.target
            if solved or draws.unit() < self.give_up or count == self.max_tries:
                words.append(f"answer {step.expression}")
                break
            words.append(",")
        return [
            {"role": "user", "content": problem.text},
            {"role": "assistant", "content": " ".join(words)},
        ]

    def verify(self, problem: Problem, response_text: str) -> Verdict:
        """Return whether a response is correct, and why (see `rewards.countdown.verify`)."""
        return verify(problem.numbers, problem.target, response_text)

    def max_prompt_tokens(self) -> int:
        """Return the maximum prompt length in tokens of the task's own vocabulary."""
        return self.max_numbers + 2

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that determine all prompts, apart from the tokenizer."""
        return {
            "seed": self.seed,
            "min_numbers": self.min_numbers,
            "max_numbers": self.max_numbers,
            "max_number": self.max_number,
            "give_up": self.give_up,
            "max_tries": self.max_tries,
            "holdout_fraction": self.holdout_fraction,
        }


def _check_address(split: str, index: int) -> None:
    if split not in SPLITS:
        raise ConfigError(f"countdown: unknown split {split!r}; use one of {', '.join(SPLITS)}")
    if index < 0:
        raise ConfigError(f"countdown: index {index} must be 0 or more")
