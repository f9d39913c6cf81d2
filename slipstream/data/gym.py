"""Problems of reasoning-gym: an endless supply from one generator, or a weighted mixture.

Needs the extra `gym`. Knows the library's data sets, not rewards; answers are graded by
`rewards.scorers.reasoning_gym`. Used through the task registry as `data.task=reasoning_gym`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from slipstream.data.chat_template import apply_chat_template
from slipstream.data.keyed import KeyedDraws
from slipstream.errors import ConfigError, DataError, did_you_mean
from slipstream.types import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DATA_SOURCE = "reasoning_gym"
"""First part of a problem's data source; a slash and the generator's name follow."""

_BLOCK = 500
"""Problems per data set of the library. Some generators create all problems of one at once."""

_ATTEMPTS = 20
"""Maximum number of problems drawn for one index until one is short enough."""


class ReasoningGymTask:
    """Endless problems; the one at `index` depends on seed, split, index and settings only.

    `datasets` is the name of a generator, or maps generators to a weight, or to a mapping with
    `weight` (default 1) and the generator's `config`. `system_prompt` is a name known to the
    library (`default`, `DeepSeekZero` ...), a text, or None. A problem with more than
    `max_prompt_length` tokens is replaced by another one. Raises ConfigError for unknown
    generators, for invalid settings, and if the library is not installed.
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
        generators = {datasets: 1.0} if isinstance(datasets, str) else dict(datasets)
        if not generators:
            raise ConfigError("data.task_kwargs.datasets names no generator")
        self._seed, self._tokenizer, self._limit = seed, tokenizer, max_prompt_length
        self._weights: dict[str, float] = {}
        self._configs: dict[str, dict[str, Any]] = {}
        for name, entry in generators.items():
            self._weights[name], self._configs[name] = _read(name, entry, library.factory.DATASETS)
        prompts = library.utils.SYSTEM_PROMPTS
        self._system = prompts.get(system_prompt, system_prompt)
        self._dataset = lru_cache(maxsize=256)(self._make_dataset)
        for name in self._weights:
            self._dataset(name, "train", 0, 0)  # raises now if settings are invalid

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
        """Return the problem, and its answer in the graded form, without a chain of thought.

        Raises DataError if the generator provides no answer.
        """
        entry, messages, _ = self._problem(split, index)
        if entry["answer"] is None:
            raise DataError(
                f"reasoning-gym's {entry['metadata']['source_dataset']} grades answers but "
                "provides none, so there is nothing to imitate; remove it, or set "
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
        """Return the maximum prompt length in tokens; longer problems are replaced."""
        return self._limit

    def _problem(self, split: str, index: int) -> tuple[dict[str, Any], list[Message], list[int]]:
        shortest = 0
        for attempt in range(_ATTEMPTS):
            entry = self._entry(split, index, attempt)
            messages: list[Message] = [{"role": "user", "content": entry["question"]}]
            if self._system is not None:
                messages.insert(0, {"role": "system", "content": self._system})
            ids = apply_chat_template(
                self._tokenizer,
                messages,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=False,
            )
            if len(ids) <= self._limit:
                return entry, messages, [int(i) for i in ids]
            shortest = min(shortest or len(ids), len(ids))
        raise DataError(
            f"{_ATTEMPTS} problems of {', '.join(self._weights)} in a row are longer than "
            f"data.max_prompt_length={self._limit} tokens, the shortest of them {shortest}; raise "
            "it, or make problems smaller with data.task_kwargs.datasets.NAME.config"
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
    """Import and return the library. Raises ConfigError if it is not installed."""
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


def _read(name: str, entry: Any, known: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return weight and settings of one generator. Raises ConfigError."""
    key = f"data.task_kwargs.datasets.{name}"
    if name not in known or name == "composite":
        raise ConfigError(
            f"{key}: reasoning-gym has no generator with that name{did_you_mean(name, known)}"
        )
    settings = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
    weight, config = settings.pop("weight", 1.0), dict(settings.pop("config", None) or {})
    if settings:
        raise ConfigError(
            f"{key} has no option {', '.join(settings)}; give a weight, or a mapping with weight "
            "and config"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise ConfigError(f"{key}.weight={weight!r} must be a number above 0")
    for own in ("seed", "size"):
        if own in config:
            raise ConfigError(
                f"{key}.config.{own} is set by the run (data.seed; the number of problems is "
                "unlimited); remove it"
            )
    return float(weight), config
