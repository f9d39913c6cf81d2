"""Problems of reasoning-gym: all of its generators, one or a weighted mixture, without end.

Needs the extra `gym`. Knows the library's data sets, not rewards: `rewards.scorers.reasoning_gym`
grades answers. Called through the task registry as `data.task=reasoning_gym`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from slipstream.data.keyed import KeyedDraws
from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA_SOURCE = "reasoning_gym"
"""First part of a problem's data source; its generator's name follows after a slash."""

_BLOCK = 500
"""Problems of one data set of the library: some generators make all of theirs at once."""

_ATTEMPTS = 20
"""Problems that are drawn for one place until one is short enough."""


class ReasoningGymTask:
    """Endless problems; the one at `index` is a function of seed, split, index and settings.

    `datasets` maps generators to a weight, or to a mapping of `weight` (1) and their own `config`;
    or it is the name of one. `system_prompt` is a name that the library has (`default`,
    `DeepSeekZero` ...), a text of one's own, or None. Of problems with more than
    `max_prompt_length` tokens the next one is taken. Raises `ConfigError` for unknown generators,
    settings they refuse, and where the library is not installed.
    """

    name = "reasoning_gym"

    def __init__(
        self,
        seed: int = 0,
        *,
        datasets: str | Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        max_prompt_length: int = 512,
        system_prompt: str | None = "default",
    ) -> None:
        library = import_gym()
        self._library = library
        wanted = {datasets: 1.0} if isinstance(datasets, str) else dict(datasets)
        if not wanted:
            raise ConfigError("data.task_kwargs.datasets names no generator")
        self._seed, self._tokenizer, self._limit = seed, tokenizer, max_prompt_length
        self._weights: dict[str, float] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        for name, given in wanted.items():
            self._weights[name], self._configs[name] = _read(name, given, library.factory.DATASETS)
        prompts = library.utils.SYSTEM_PROMPTS
        self._system = prompts.get(system_prompt, system_prompt)
        self._dataset = lru_cache(maxsize=256)(self._make_dataset)
        for name in self._weights:
            self._dataset(name, "train", 0, 0)  # refuses settings now

    def prompt(self, split: Literal["train", "held_out"], index: int) -> Prompt:
        entry, messages, ids = self._problem(split, index)
        return Prompt(
            uid=f"{self.name}/{split}/{index}",
            ids=ids,
            messages=messages,
            data_source=f"{DATA_SOURCE}/{entry['metadata']['source_dataset']}",
            ground_truth=entry["answer"],
            extra_info={"index": index, "split": split, "reasoning_gym": entry},
            ability="reasoning",
        )

    def demonstration(
        self, split: Literal["train", "held_out"], index: int, *, variant: int = 0
    ) -> list[Message]:
        """The problem and its answer in the form that is graded, without a chain of thought. Raises
        `DataError` where the generator tells no answer."""
        entry, messages, _ = self._problem(split, index)
        if entry["answer"] is None:
            raise DataError(
                f"reasoning-gym's {entry['metadata']['source_dataset']} grades answers and tells "
                "none, so that there is nothing to imitate; leave it out, or set "
                "sft.total_training_steps=0"
            )
        answer = f"<answer>{entry['answer']}</answer>"
        return [*messages, {"role": "assistant", "content": answer}]

    def parameters(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "weights": self._weights,
            "configs": {name: repr(config) for name, config in self._configs.items()},
            "system_prompt": self._system,
            "max_prompt_length": self._limit,
            "version": self._library.__version__,
        }

    def max_prompt_tokens(self) -> int:
        """Longer ones are passed over."""
        return self._limit

    def _problem(self, split: str, index: int) -> tuple[dict[str, Any], list[Message], list[int]]:
        shortest = 0
        for attempt in range(_ATTEMPTS):
            entry = self._entry(split, index, attempt)
            messages: list[Message] = [{"role": "user", "content": entry["question"]}]
            if self._system is not None:
                messages.insert(0, {"role": "system", "content": self._system})
            ids = self._tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
            if len(ids) <= self._limit:
                return entry, messages, [int(i) for i in ids]
            shortest = min(shortest or len(ids), len(ids))
        raise DataError(
            f"{_ATTEMPTS} problems of {', '.join(self._weights)} in a row are longer than "
            f"data.max_prompt_length={self._limit} tokens, the shortest of them {shortest}; raise "
            "it, or make problems smaller by data.task_kwargs.datasets.NAME.config"
        )

    def _entry(self, split: str, index: int, attempt: int) -> dict[str, Any]:
        draws = KeyedDraws("reasoning-gym-mixture", self._seed, split, index, attempt)
        place = draws.unit() * sum(self._weights.values())
        chosen = next(iter(self._weights))
        for name, weight in self._weights.items():
            chosen = name
            place -= weight
            if place < 0.0:
                break
        dataset = self._dataset(chosen, split, index // _BLOCK, attempt)
        entry: dict[str, Any] = dataset[index % _BLOCK]
        entry["metadata"].setdefault("source_dataset", chosen)
        return entry

    def _make_dataset(self, name: str, split: str, block: int, attempt: int) -> Any:
        seed = KeyedDraws("reasoning-gym", self._seed, split, name, block, attempt).below(1 << 31)
        try:
            return self._library.create_dataset(name, seed=seed, size=_BLOCK, **self._configs[name])
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"data.task_kwargs.datasets.{name}.config={self._configs[name]} is refused by "
                f"reasoning-gym: {error}"
            ) from error


def import_gym() -> Any:
    """The library. Raises ConfigError where it is not installed."""
    try:
        import reasoning_gym
        import reasoning_gym.factory
        import reasoning_gym.utils
    except ImportError as error:
        raise ConfigError(
            "data.task=reasoning_gym needs the library reasoning-gym; install it with: pip install "
            "'slipstream-rl[gym]'"
        ) from error
    return reasoning_gym


def _read(name: str, given: Any, known: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Weight and settings of one generator."""
    key = f"data.task_kwargs.datasets.{name}"
    if name not in known or name == "composite":
        raise ConfigError(
            f"{key}: reasoning-gym has no generator of that name{did_you_mean(name, known)}"
        )
    settings = dict(given) if isinstance(given, Mapping) else {"weight": given}
    weight, config = settings.pop("weight", 1.0), dict(settings.pop("config", None) or {})
    if settings:
        raise ConfigError(
            f"{key} has no option {', '.join(settings)}; give a weight, or a mapping of weight and "
            "config"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise ConfigError(f"{key}.weight={weight!r} must be a number above 0")
    for own in ("seed", "size"):
        if own in config:
            raise ConfigError(
                f"{key}.config.{own} is given by the run (data.seed; problems have no end); remove "
                "it"
            )
    return float(weight), config
