"""The built-in agentic task: answer a question by looking up names in a table that only a tool
knows.

    user       who is ana 's friend 's boss ?
    policy     look up ana : <tool_call>{"name": "look_up", "arguments": {"name": " ana"}}...
    tool       ana : boss dan , friend ben , teacher nobody
    policy     so friend ben , who is ben 's boss ? look up ben : <tool_call>... " ben"
    tool       ben : teacher ana , boss cleo , friend dan
    policy     so boss cleo , who is cleo ? answer cleo

After each look-up the policy writes the name that it found and what is left of the question.

A question needs one to five look-ups. A relation can be missing (`nobody`); then the answer is
`nobody`. Each problem has a table of its own. Demonstrations waste look-ups on names that do not
matter, and some give up early. So imitation is slow and often wrong, and reinforcement learning can
learn to look up what is needed, and to answer right.

Everything is a pure function of the task's parameters, its seed, the split and an index. The tool
is in `environment.tasks.lookup`. Knows nothing of models or rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from slipstream.data.chat_template import prompt_ids
from slipstream.data.keyed import KeyedDraws
from slipstream.data.lookup_tokenizer import build_lookup_tokenizer
from slipstream.errors import ConfigError
from slipstream.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held_out"]
DATA_SOURCE = "lookup"
NOBODY = "nobody"
RELATIONS = ("friend", "boss", "teacher", "neighbor")
NAMES = (
    *("ana", "ben", "cleo", "dan", "eva", "fred", "gina", "hugo", "ida", "jack", "kim", "leo"),
    *("mia", "noah", "olga", "paul", "rosa", "sam", "tina", "uma", "vera", "will", "yara", "zoe"),
)
MOST_STEPS = 5

MOST_WASTED = 4
"""The largest number of look-ups that a demonstration wastes."""

_WORDS = (
    *NAMES,
    *RELATIONS,
    NOBODY,
    *("who", "is", "'s", "?", ":", ",", ".", "answer", "look", "up", "also", "so"),
    *("no", "such", "name", "tools", "look_up", "Error"),
)
CALL_BEGIN, CALL_END = '{"name": "look_up", "arguments": {"name": "', '"}}'

SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up the relations of a person.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "The person's name."}},
            "required": ["name"],
        },
    },
}

_STEP_WEIGHTS = (5, 4, 3, 2, 2)
"""Relative frequencies of questions with one to five relations."""


def build_tokenizer() -> PreTrainedTokenizerBase:
    """Return the tokenizer of the task."""
    return build_lookup_tokenizer(_WORDS, (CALL_BEGIN, CALL_END))


@dataclass(frozen=True, slots=True)
class Problem:
    """A start, relations to follow, and the table: relations by name, in the order of display."""

    start: str
    relations: tuple[str, ...]
    table: Mapping[str, Mapping[str, str]]

    @property
    def text(self) -> str:
        """The question."""
        steps = "".join(f" 's {relation}" for relation in self.relations)
        return f"who is {self.start}{steps} ?"

    @property
    def path(self) -> tuple[str, ...]:
        """The names on the way, from `start` to the answer; it ends at the first `nobody`."""
        names = [self.start]
        for relation in self.relations:
            if names[-1] == NOBODY:
                break
            names.append(self.table[names[-1]][relation])
        return tuple(names)

    @property
    def answer(self) -> str:
        return self.path[-1]

    @property
    def needed(self) -> int:
        """The smallest number of look-ups that gives the answer."""
        return len(self.path) - 1


def look_up(table: Mapping[str, Mapping[str, str]], name: str) -> str:
    """Return the reply of the tool."""
    name = name.strip()
    if name not in table:
        return f"no such name : {name}"
    found = " , ".join(f"{relation} {other}" for relation, other in table[name].items())
    return f"{name} : {found}"


class LookupTask:
    """Problems, prompts and demonstrations.

    A table has `people` names. A relation is missing with probability `missing`. Before each needed
    look-up, a demonstration looks up other names, each with probability `waste`. After each needed
    one it gives up with probability `give_up`, and answers with the name that it has. A look-up has
    the reward -`cost`. `tokenizer` renders the prompts; None means the task's own. Raises
    ConfigError for impossible parameters.
    """

    name = DATA_SOURCE

    def __init__(
        self,
        seed: int = 0,
        *,
        people: int = 12,
        max_steps: int = MOST_STEPS,
        missing: float = 0.06,
        waste: float = 0.35,
        give_up: float = 0.12,
        cost: float = 0.03,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        if not 3 <= people <= len(NAMES):
            raise ConfigError(f"lookup: people {people} must be from 3 to {len(NAMES)}")
        if not 1 <= max_steps <= MOST_STEPS:
            raise ConfigError(f"lookup: max_steps {max_steps} must be from 1 to {MOST_STEPS}")
        shares = {"missing": missing, "waste": waste, "give_up": give_up, "cost": cost}
        for name, value in shares.items():
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"lookup: {name} {value} must be in [0, 1)")
        self.seed = seed
        self.people = people
        self.max_steps = max_steps
        self.missing = missing
        self.waste = waste
        self.give_up = give_up
        self.cost = cost
        self.tokenizer = build_tokenizer() if tokenizer is None else tokenizer

    def problem(self, split: Split, index: int) -> Problem:
        """Return problem `index` of `split`, which has a table of its own."""
        draws = KeyedDraws("lookup-problem", self.seed, split, index)
        people = draws.shuffled(NAMES)[: self.people]
        table = {name: self._record(name, people, draws) for name in people}
        weights = _STEP_WEIGHTS[: self.max_steps]
        left, steps = draws.below(sum(weights)), 0
        while left >= weights[steps]:
            left -= weights[steps]
            steps += 1
        relations = tuple(RELATIONS[draws.below(len(RELATIONS))] for _ in range(steps + 1))
        return Problem(people[0], relations, table)

    def _record(self, name: str, people: list[str], draws: KeyedDraws) -> dict[str, str]:
        others = [other for other in people if other != name]
        return {
            relation: NOBODY if draws.unit() < self.missing else others[draws.below(len(others))]
            for relation in RELATIONS
        }

    def prompt(self, split: Split, index: int) -> Prompt:
        """Return prompt `index` of `split`, rendered with the tokenizer's chat template."""
        problem = self.problem(split, index)
        messages: list[Message] = [{"role": "user", "content": problem.text}]
        return Prompt(
            uid=f"{DATA_SOURCE}/{self.seed}/{split}/{index}",
            ids=prompt_ids(self.tokenizer, messages),
            messages=messages,
            data_source=DATA_SOURCE,
            ground_truth=problem.answer,
            extra_info={
                "split": split,
                "index": index,
                "needed": problem.needed,
                "tools_kwargs": {"look_up": {"create_kwargs": self._tool_kwargs(problem)}},
            },
            ability="agent",
        )

    def _tool_kwargs(self, problem: Problem) -> dict[str, Any]:
        table = {name: dict(record) for name, record in problem.table.items()}
        return {"table": table, "cost": self.cost}

    def demonstration(self, split: Split, index: int, *, variant: int = 0) -> list[Message]:
        """Return a conversation with tool calls for problem `index`.

        Different values of `variant` give independent demonstrations of the same problem.
        """
        problem = self.problem(split, index)
        draws = KeyedDraws("lookup-demonstration", self.seed, split, index, variant)
        messages: list[Message] = [{"role": "user", "content": problem.text}]
        known, wasted = "", 0
        for step, (name, found) in enumerate(pairwise(problem.path)):
            while wasted < MOST_WASTED and draws.unit() < self.waste:
                wasted += 1
                people = list(problem.table)
                other = people[draws.below(len(people))]
                messages += self._call(problem, f"{known}look up also {other} :", other)
                known = ""
            messages += self._call(problem, f"{known}look up {name} :", name)
            left = problem.relations[step + 1 :] if found != NOBODY else ()
            rest = "".join(f" 's {relation}" for relation in left)
            known = f"so {problem.relations[step]} {found} , who is {found}{rest} ? "
            if found != problem.answer and draws.unit() < self.give_up:
                messages.append({"role": "assistant", "content": f"{known}answer {found}"})
                return messages
        messages.append({"role": "assistant", "content": f"{known}answer {problem.answer}"})
        return messages

    def _call(self, problem: Problem, text: str, name: str) -> list[Message]:
        # A space, as before every other name, so that a name is always the same token.
        call = {"name": "look_up", "arguments": {"name": f" {name}"}}
        number = f"call{0:05d}"
        return [
            {
                "role": "assistant",
                "content": f"{text} ",
                "tool_calls": [{"id": number, "type": "function", "function": call}],
            },
            {
                "role": "tool",
                "tool_call_id": number,
                "name": "look_up",
                "content": look_up(problem.table, name),
            },
        ]

    def max_prompt_tokens(self) -> int:
        """Return the maximum prompt length in tokens of the task's own vocabulary."""
        return 2 * self.max_steps + 8

    def parameters(self) -> dict[str, Any]:
        """Return the parameters that determine all prompts, apart from the tokenizer."""
        return {
            "seed": self.seed,
            "people": self.people,
            "max_steps": self.max_steps,
            "missing": self.missing,
            "waste": self.waste,
            "give_up": self.give_up,
            "cost": self.cost,
        }
