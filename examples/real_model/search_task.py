"""reasoning-gym's `countdown` as a task that a small pretrained model can learn by search.

    Using all the numbers 8, 15, 6, create an expression that equals 17.  (and format instructions)

    8 + 15 + 6: 23, 29. 17? no
    8 + 15 - 6: 23, 17. 17? yes
    <answer>8 + 15 - 6</answer>

A demonstration tries the signs in a fixed order. It writes the running totals of each try and
compares the last one with the target. After a failed try it gives up with probability `give_up`,
and answers with the failed try. So imitation has a limited accuracy, and RL can learn to search on.
Prompts and grading are those of reasoning-gym.

Use it with this folder in PYTHONPATH, `actor_rollout_ref.model.external_lib=search_task` and
`data.task=gym_search`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, Literal

from slipstream.data.gym import ReasoningGymTask
from slipstream.data.keyed import KeyedDraws
from slipstream.data.registry import register_task
from slipstream.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "gym_search"


class GymSearchTask(ReasoningGymTask):
    """Countdown with plus and minus.

    A problem has `min_numbers` to `max_numbers` numbers from 1 to `max_value`.
    """

    name = NAME

    def __init__(
        self,
        seed: int = 0,
        *,
        min_numbers: int = 3,
        max_numbers: int = 5,
        max_value: int = 20,
        max_target: int = 50,
        give_up: float = 0.1,
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int = 192,
    ) -> None:
        config = {
            "min_numbers": min_numbers,
            "max_numbers": max_numbers,
            "min_value": 1,
            "max_value": max_value,
            "min_target": 1,
            "max_target": max_target,
            "operators": ("+", "-"),
        }
        super().__init__(
            seed,
            datasets={"countdown": {"config": config}},
            tokenizer=tokenizer,
            max_prompt_length=max_prompt_length,
            system_prompt=None,
        )
        self._give_up = give_up

    def demonstration(
        self, split: Literal["train", "held_out"], index: int, *, variant: int = 0
    ) -> list[Message]:
        """Return the problem and a search; another `variant` gives up at another try."""
        entry, messages, _ = self._problem(split, index)
        numbers, target = entry["metadata"]["numbers"], entry["metadata"]["target"]
        draws = KeyedDraws("gym-search", self._seed, split, index, variant)
        lines = []
        for terms in tries(numbers):
            expression = written(terms)
            totals = list(accumulate(terms))[1:]
            found = totals[-1] == target
            shown = ", ".join(map(str, totals))
            lines.append(f"{expression}: {shown}. {target}? {'yes' if found else 'no'}")
            if found or draws.unit() < self._give_up:
                break
        lines.append(f"<answer>{expression}</answer>")
        return [*messages, {"role": "assistant", "content": "\n".join(lines)}]

    def parameters(self) -> dict[str, Any]:
        return {**super().parameters(), "give_up": self._give_up}


def tries(numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all sums of the numbers with signs that are above 0, the added numbers first."""
    found = []
    for signs in product((1, -1), repeat=len(numbers)):
        terms = [sign * number for sign, number in zip(signs, numbers, strict=True)]
        if sum(terms) > 0:
            found.append(tuple(sorted(terms, key=lambda term: term < 0)))
    return list(dict.fromkeys(found))


def written(terms: Sequence[int]) -> str:
    """Return an expression, such as `15 + 6 - 8`."""
    first, *rest = terms
    return str(first) + "".join(f" {'-' if term < 0 else '+'} {abs(term)}" for term in rest)


register_task(NAME, GymSearchTask)
