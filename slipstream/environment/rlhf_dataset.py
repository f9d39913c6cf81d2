"""VERL's data sets for RL as classes to use, or to inherit from: files in its row schema, and files
to which a generator of one's own adds rows while training goes on.

Knows files and tokenizers, not order or rewards. `data.custom_cls` names a class of one's own,
which `loops.build_dataset` makes; `dataset_source` draws from it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from slipstream.environment.datasets import LoadedPrompts, PromptReader, none_left
from slipstream.environment.items import as_item
from slipstream.environment.rows import Row, read_rows, subset
from slipstream.errors import ConfigError, DataError
from slipstream.types import Prompt
from slipstream.user_code import load_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_PROMPT_LENGTH = 1024
"""VERL's, where no configuration says another."""


class RLHFDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of parquet, JSONL or JSON files as VERL's items (`items.as_item`).

    `config` is the section `data` as a mapping (keys: `prompt_key`, `reward_fn_key`,
    `max_prompt_length`, `truncation`, `filter_overlong_prompts`, `apply_chat_template_kwargs`,
    `shuffle`, `seed`). Rows whose template fails are left out, counted and named. A subclass may
    have rows of its own: without `data_files` it sets `self.dataframe`, or defines `__len__`, and
    defines `__getitem__`.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """Raises `DataError` for files that cannot be read and where no row is left."""
        self.config: Mapping[str, Any] = {} if config is None else config
        self.tokenizer = tokenizer
        self.tokenizer_kwargs: dict[str, Any] = {}
        self.processor = processor
        self.max_samples = max_samples
        self.prompt_key = str(self.config.get("prompt_key", "prompt"))
        self.max_prompt_length = int(self.config.get("max_prompt_length", _MAX_PROMPT_LENGTH))
        self._prompts: list[Prompt] = []
        if data_files is None:
            if not hasattr(self, "dataframe"):
                self.dataframe: list[Any] = []
            return
        self.dataframe = []
        seed = self.config.get("seed") if self.config.get("shuffle", True) else None
        loaded = self._append(subset(read_rows(data_files), max_samples=max_samples, seed=seed))
        if not loaded.prompts:
            raise none_left(loaded, self.max_prompt_length)

    def __len__(self) -> int:
        return len(self.dataframe)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Item `index` with all columns of its row but the prompt."""
        if index >= len(self._prompts):
            raise IndexError(f"row {index} of {len(self._prompts)}")
        row = {k: v for k, v in self.dataframe[index].items() if k != self.prompt_key}
        assert self.tokenizer is not None, "a prompt has been read with it"
        pad = self.tokenizer.pad_token_id
        return as_item(
            self._prompts[index], row, length=self.max_prompt_length, pad=0 if pad is None else pad
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def _append(self, rows: Sequence[Row]) -> LoadedPrompts:
        """Add rows that can be rendered and are short enough; warn of the others."""
        if self.tokenizer is None:
            raise DataError(f"{type(self).__name__} reads prompts and has no tokenizer; give one")
        loaded = PromptReader(
            tokenizer=self.tokenizer,
            max_prompt_length=self.max_prompt_length,
            prompt_key=self.prompt_key,
            reward_fn_key=str(self.config.get("reward_fn_key", "data_source")),
            truncation=self.config.get("truncation", "error"),
            filter_overlong=bool(self.config.get("filter_overlong_prompts", True)),
            processor=self.processor,
            template_kwargs=dict(self.config.get("apply_chat_template_kwargs") or {}),
        ).read(rows)
        loaded.warn(self.max_prompt_length)
        self.dataframe.extend(row.values for row in loaded.rows)
        self._prompts.extend(loaded.prompts)
        return loaded


class AbstractDataGenerator(ABC):
    """Makes rows for a `DynamicGenDataset`; `config` is its `data` section.

    One that remembers something has `state_dict` and `load_state_dict`, of JSON's types, so that a
    resumed run goes on exactly.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: Mapping[str, Any] = {} if config is None else config

    @abstractmethod
    def generate(self, dataset: DynamicGenDataset) -> Iterable[Mapping[str, Any]]:
        """New rows in VERL's row schema; none is fine. `dataset.last_batch` is the batch (VERL's
        `DataProto`) that was trained on last, None before the first."""


class DynamicGenDataset(RLHFDataset):
    """Rows of files, and those that a generator adds before training and after each batch.

    New rows are drawn from the next epoch on. They are part of a checkpoint, so they must be of
    JSON's types.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path],
        tokenizer: PreTrainedTokenizerBase,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
        *,
        generator: AbstractDataGenerator | None = None,
    ) -> None:
        """`generator`: by default what `config`'s `datagen.path` and `datagen.name` name."""
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        self.data_generator: Any = generator or _generator(self.config)
        self.last_batch: Any = None
        self._generated: list[Row] = []
        self._made = 0
        self._grow()

    def on_batch_end(self, batch: Any) -> None:
        """Let the generator look at the batch, and add what it makes of it."""
        self.last_batch = batch
        self._grow()

    def state_dict(self) -> dict[str, Any]:
        """The generated rows, each with its number among all that were made, as JSON types."""
        generator = self.data_generator
        return {
            "generated": [[row.number, row.values] for row in self._generated],
            "made": self._made,
            "generator": generator.state_dict() if hasattr(generator, "state_dict") else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the generated rows of `state` instead of those there are."""
        kept = len(self.dataframe) - len(self._generated)
        del self.dataframe[kept:], self._prompts[kept:]
        if state["generator"] is not None:
            self.data_generator.load_state_dict(state["generator"])
        self._generated, self._made = [], int(state["made"])
        self._add([self._row(number, values) for number, values in state["generated"]])

    def _grow(self) -> None:
        made = self.data_generator.generate(self)
        if made is None or isinstance(made, str | Mapping):
            raise DataError(
                f"{type(self.data_generator).__name__}.generate must return rows, an empty list "
                f"for none, got {type(made).__name__}"
            )
        rows = [self._row(number, values) for number, values in enumerate(made, self._made)]
        self._made += len(rows)
        self._add(rows)

    def _row(self, number: int, values: Any) -> Row:
        name = type(self.data_generator).__name__
        where = f"row {number} that {name} generated"
        if not isinstance(values, Mapping):
            raise DataError(f"{where} must be a mapping, got {type(values).__name__}")
        try:
            plain = json.loads(json.dumps(dict(values)))
        except (TypeError, ValueError) as error:
            raise DataError(f"{where} is not of JSON's types: {error}") from error
        return Row(Path(name), number, plain, name, where=where)

    def _add(self, rows: Sequence[Row]) -> None:
        if rows:
            self._generated.extend(self._append(rows).rows)


def _generator(config: Mapping[str, Any]) -> AbstractDataGenerator:
    named = config.get("datagen") or {}
    path, name = named.get("path"), named.get("name")
    if path is None or name is None:
        raise ConfigError("data.datagen needs a path and a name of a generator class")
    found = load_named(
        path, name, path_key="data.datagen.path", name_key="data.datagen.name", what="classes"
    )
    if not isinstance(found, type) or not hasattr(found, "generate"):
        raise ConfigError(
            f"data.datagen.name={name} must be a class with generate(dataset), as "
            "AbstractDataGenerator has it"
        )
    generator: AbstractDataGenerator = found(config)
    return generator


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Items as one batch: tensors of a field stacked (B, ...), everything else an array (B,) of
    objects. Raises ValueError where items differ in their fields."""
    fields: dict[str, list[Any]] = {}
    for item in data_list:
        for key, value in item.items():
            fields.setdefault(key, []).append(value)
    for key, values in fields.items():
        if len(values) != len(data_list):
            raise ValueError(f"{len(values)} of {len(data_list)} items have a field {key!r}")
    return {
        key: torch.stack(values) if isinstance(values[0], torch.Tensor) else _objects(values)
        for key, values in fields.items()
    }


def _objects(values: Sequence[Any]) -> np.ndarray[Any, Any]:
    array = np.empty(len(values), dtype=object)
    for i, value in enumerate(values):
        array[i] = value
    return array
