"""verl's RL data set classes, to use or to subclass.

`RLHFDataset` reads files in verl's row schema. `DynamicGenDataset` adds rows from a user's
generator during training. Knows files and tokenizers, not order or rewards. `data.custom_cls` names
a user's class; `build.dataset` creates it, and `dataset_source` draws from it.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slipstream.checkpoint.saved import Saved
from slipstream.data.datasets import LoadedPrompts, PromptReader, none_left
from slipstream.data.items import as_item
from slipstream.data.rows import DataRow, read_rows, subset
from slipstream.errors import ConfigError, DataError
from slipstream.rewards.data_columns import objects
from slipstream.rewards.signatures import takes
from slipstream.types import Prompt
from slipstream.user_code import called, load_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_MAX_PROMPT_LENGTH = 1024
"""verl's default, used if the configuration does not set it."""


class LoadedRow(dict[str, Any]):
    """The columns of a row, and its origin."""

    def __init__(self, origin: DataRow) -> None:
        super().__init__(origin.values)
        self.origin = origin


class RLHFDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """The rows of parquet, JSONL or JSON files as verl's items (`items.as_item`).

    `config` is the section `data` as a mapping (keys: `prompt_key`, `reward_fn_key`,
    `max_prompt_length`, `truncation`, `filter_overlong_prompts`, `apply_chat_template_kwargs`,
    `image_key`, `video_key`, `shuffle`, `seed`). Each is also an attribute with verl's name, to
    which a subclass may assign another value before rows are read. Rows whose chat template fails
    are left out, counted and listed. A row with an image or a video is refused. `num_workers`,
    `cache_dir`, `use_shm`, `return_raw_chat` and verl's other attributes have verl's values and no
    effect.

    `self.dataframe` is the list of rows. An item is made from its row on access. A subclass may
    change the list, or override verl's `_read_files_and_tokenize`, `maybe_filter_out_long_prompts`
    and `_build_messages`. A subclass without `data_files` defines `__getitem__`, and either sets
    `self.dataframe`, defines `__len__`, or has an environment `self.env` whose length is used.
    """

    def __init__(
        self,
        data_files: str | Path | Sequence[str | Path] | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        config: Mapping[str, Any] | None = None,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        """`processor` must be None: models read only text here.

        Raises DataError for files that cannot be read, if no row is left, and for a processor.
        """
        if processor is not None:
            raise DataError(
                f"{type(self).__name__}(processor=...): models read only text here; "
                "omit the processor"
            )
        self.config: Mapping[str, Any] = {} if config is None else config
        listed = [data_files] if isinstance(data_files, str | Path) else data_files
        self.data_files = None if listed is None else list(listed)
        self.original_data_files = copy.deepcopy(self.data_files)
        self.tokenizer: Any = tokenizer
        self.tokenizer_kwargs: dict[str, Any] = {}
        self.processor = None
        self.max_samples = max_samples
        get = self.config.get
        self.prompt_key = str(get("prompt_key", "prompt"))
        self.image_key = str(get("image_key", "images"))
        self.video_key = str(get("video_key", "videos"))
        self.max_prompt_length = int(get("max_prompt_length", _MAX_PROMPT_LENGTH))
        self.truncation = get("truncation", "error")
        self.filter_overlong_prompts = bool(get("filter_overlong_prompts", True))
        self.apply_chat_template_kwargs = dict(get("apply_chat_template_kwargs") or {})
        self.shuffle, self.seed = bool(get("shuffle", True)), get("seed")
        self._set_unused_attributes()
        self._identity = ""
        if data_files is not None:
            self._read_files_and_tokenize()
            content = repr(list(self.dataframe)).encode()
            self._identity = hashlib.blake2b(content, digest_size=8).hexdigest()
        elif not hasattr(self, "dataframe"):
            self.dataframe: Any = []

    def _set_unused_attributes(self) -> None:
        get, cores = self.config.get, os.cpu_count() or 1
        workers = get("filter_overlong_prompts_workers", max(1, cores // 4))
        self.num_workers = None if workers is None else min(int(workers), cores)
        self.cache_dir = os.path.expanduser(get("cache_dir") or "~/.cache/verl/rlhf")
        self.use_shm = bool(get("use_shm", False))
        self.return_raw_chat = bool(get("return_raw_chat", False))
        self.return_full_prompt = bool(get("return_full_prompt", False))
        self.return_multi_modal_inputs = bool(get("return_multi_modal_inputs", True))
        self.need_tools_kwargs = bool(get("need_tools_kwargs", False))
        self.filter_prompts = bool(get("filter_prompts", True))
        self.chat_template_func = get("chat_template_func")
        self.tool_schemas = None
        self.serialize_dataset = False

    def __len__(self) -> int:
        env: Any = getattr(self, "env", None)
        return len(env if len(self.dataframe) == 0 and hasattr(env, "__len__") else self.dataframe)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return item `index` with all columns of its row except the prompt."""
        row = self.dataframe[index]
        prompt, columns = self._rendered(row, index)
        self._reader().truncate(prompt, self._where(row, index))
        pad = self.tokenizer.pad_token_id
        return as_item(
            prompt, columns, length=self.max_prompt_length, pad=0 if pad is None else pad
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[i] for i in range(len(self)))

    def identity(self) -> str:
        """Return a hash of the rows, checked when a run is resumed; "" without files."""
        return self._identity

    def _read_files_and_tokenize(self) -> None:
        seed = self.seed if self.shuffle else None
        assert self.data_files is not None
        rows = subset(read_rows(self.data_files), max_samples=self.max_samples, seed=seed)
        self.dataframe = self.maybe_filter_out_long_prompts([LoadedRow(row) for row in rows])

    def maybe_filter_out_long_prompts(self, dataframe: Sequence[Any]) -> list[Any]:
        """Return the rows that can be rendered and, if so configured, are not too long.

        Logs a warning that counts and lists the other rows. Raises DataError if no row is left.
        """
        loaded = self._kept(dataframe)
        loaded.warn(self.max_prompt_length)
        if not loaded.rows:
            raise none_left(loaded, self.max_prompt_length)
        return loaded.rows

    def _build_messages(self, example: dict[str, Any], key: str | None = None) -> Any:
        """Remove the prompt from a row's columns and return it: messages, or text.

        `key` is the prompt's column, by default `self.prompt_key`.
        """
        return example.pop(self.prompt_key if key is None else key, None)

    def resume_dataset_state(self) -> None:
        """Read the files again, as verl does for a resumed run."""
        if self.original_data_files is not None:
            self.data_files = copy.deepcopy(self.original_data_files)
            self._read_files_and_tokenize()

    def split(self, num_splits: int) -> list[RLHFDataset]:
        """Return consecutive parts of equal length. Rows that remain are left out, with a warning.

        Raises ValueError if `num_splits` is below 1 or above the number of rows.
        """
        if not isinstance(num_splits, int) or not 1 <= num_splits <= len(self.dataframe):
            raise ValueError(
                f"num_splits={num_splits!r} must be from 1 to the {len(self.dataframe)} rows"
            )
        size, rest = divmod(len(self.dataframe), num_splits)
        if rest:
            log.warning("%d of %d rows are left out of the splits", rest, len(self.dataframe))
        parts = []
        for number in range(num_splits):
            part = copy.copy(self)
            part.dataframe = self.dataframe[number * size : (number + 1) * size]
            parts.append(part)
        return parts

    def _kept(self, rows: Sequence[Any]) -> LoadedPrompts:
        return self._reader().keep(
            (row, self._where(row, index), partial(self._prompt, row, index))
            for index, row in enumerate(rows)
        )

    def _prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
        return self._rendered(row, index)[0]

    def _rendered(self, row: Mapping[str, Any], index: int) -> tuple[Prompt, dict[str, Any]]:
        """Return the whole prompt of a row, and its other columns."""
        columns = dict(row)
        # Some versions of verl pass the column's name.
        key = {"key": self.prompt_key} if takes(self._build_messages, "key") else {}
        messages = self._build_messages(columns, **key)
        values = {k: v for k, v in columns.items() if k != self.prompt_key}
        if messages is not None:
            values[self.prompt_key] = messages
        for own, name in ((self.image_key, "images"), (self.video_key, "videos")):
            if own != name and values.get(own):
                values[name] = values[own]
        name = type(self).__name__
        origin = row.origin if isinstance(row, LoadedRow) else DataRow(Path(name), index, {}, name)
        where = self._where(row, index)
        prompt = self._reader().prompt(
            DataRow(origin.file, origin.number, values, origin.source, where)
        )
        return prompt, {k: v for k, v in values.items() if k != self.prompt_key}

    def _where(self, row: Any, index: int) -> str:
        return row.origin.where if isinstance(row, LoadedRow) else f"{type(self).__name__}[{index}]"

    def _reader(self) -> PromptReader:
        if self.tokenizer is None:
            raise DataError(
                f"{type(self).__name__} reads prompts but has no tokenizer; pass a tokenizer"
            )
        return PromptReader(
            tokenizer=self.tokenizer,
            max_prompt_length=self.max_prompt_length,
            prompt_key=self.prompt_key,
            reward_fn_key=str(self.config.get("reward_fn_key", "data_source")),
            truncation=self.truncation,
            filter_overlong=self.filter_overlong_prompts,
            template_kwargs=dict(self.apply_chat_template_kwargs),
        )


class AbstractDataGenerator(ABC):
    """Generates rows for a `DynamicGenDataset`; `config` is the section `data`.

    A generator with a state defines `state_dict` and `load_state_dict` with JSON types, so that a
    resumed run continues exactly.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config: Mapping[str, Any] = {} if config is None else config

    @abstractmethod
    def generate(self, dataset: DynamicGenDataset) -> Iterable[Mapping[str, Any]]:
        """Return new rows in verl's row schema; the result may be empty.

        `dataset.last_batch` is the last batch that was trained on (verl's `DataProto`), None before
        the first one.
        """


class DynamicGenDataset(RLHFDataset):
    """Rows of files, plus rows that a generator adds before training and after each batch.

    New rows are drawn from the next epoch on. They are stored in checkpoints, so they must consist
    of JSON types.
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
        """`generator` None is the class that `datagen.path` and `datagen.name` of `config` name."""
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        self.data_generator: Any = generator or _generator(self.config)
        self.last_batch: Any = None
        self._generated: list[LoadedRow] = []
        self._made = 0
        self._grow()

    def on_batch_end(self, batch: Any) -> None:
        """Pass the batch to the generator, and add the rows that it returns."""
        self.last_batch = batch
        self._grow()

    def state_dict(self) -> dict[str, Any]:
        """Return generated rows with their numbers, and the generator's state, as JSON types."""
        generator = self.data_generator
        return {
            "generated": [[row.origin.number, dict(row)] for row in self._generated],
            "made": self._made,
            "generator": generator.state_dict() if hasattr(generator, "state_dict") else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the generated rows by those of `state`."""
        saved = Saved(state, error=DataError).fields("generated", "made", "generator")
        made = saved["made"].count()
        generated = [pair.elements(2) for pair in saved["generated"].elements()]
        numbers = [number.count(made - 1) for number, _ in generated]
        if sorted(set(numbers)) != numbers:
            saved["generated"].refuse("a list of rows in the order of their numbers")
        rows = [{name: value.value for name, value in row.items()} for _, row in generated]
        old = set(map(id, self._generated))
        self.dataframe = [row for row in self.dataframe if id(row) not in old]
        if state["generator"] is not None:
            self.data_generator.load_state_dict(state["generator"])
        elif not hasattr(self.data_generator, "state_dict"):
            log.warning(
                "%s has no state_dict: its state from before the resume is lost; its rows are "
                "restored",
                type(self.data_generator).__name__,
            )
        self._generated, self._made = [], made
        self._add([self._row(number, row) for number, row in zip(numbers, rows, strict=True)])

    def _grow(self) -> None:
        name = f"{type(self.data_generator).__name__}.generate"
        generated = called(self.data_generator.generate, name, self)
        if generated is None or isinstance(generated, str | Mapping):
            raise DataError(
                f"{name} must return a list of rows (empty for none), got "
                f"{type(generated).__name__}"
            )
        values: list[Any] = called(list, name, generated)
        rows = [self._row(number, value) for number, value in enumerate(values, self._made)]
        self._made += len(rows)
        self._add(rows)

    def _row(self, number: int, values: Any) -> LoadedRow:
        name = type(self.data_generator).__name__
        where = f"row {number} that {name} generated"
        if not isinstance(values, Mapping):
            raise DataError(f"{where} must be a mapping, got {type(values).__name__}")
        try:
            plain = json.loads(json.dumps(dict(values)))
        except (TypeError, ValueError) as error:
            raise DataError(f"{where} does not consist of JSON types: {error}") from error
        return LoadedRow(DataRow(Path(name), number, plain, name, where=where))

    def _add(self, rows: Sequence[LoadedRow]) -> None:
        loaded = self._kept(rows)
        loaded.warn(self.max_prompt_length)
        self.dataframe = [*self.dataframe, *loaded.rows]
        self._generated.extend(loaded.rows)


def _generator(config: Mapping[str, Any]) -> AbstractDataGenerator:
    named = config.get("datagen") or {}
    path, name = named.get("path"), named.get("name")
    if path is None or name is None:
        raise ConfigError("set data.datagen.path and data.datagen.name to a generator class")
    found = load_named(
        path, name, path_key="data.datagen.path", name_key="data.datagen.name", what="classes"
    )
    if not isinstance(found, type) or not hasattr(found, "generate"):
        raise ConfigError(
            f"data.datagen.name={name} must be a class with a method generate(dataset), as in "
            "AbstractDataGenerator"
        )
    generator: AbstractDataGenerator = called(found, f"{name}(...)", config)
    return generator


def collate_fn(data_list: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine items to a batch: tensors are stacked to (B, ...), other values become arrays (B,).

    Raises ValueError if the items have different fields.
    """
    fields: dict[str, list[Any]] = {}
    for item in data_list:
        for key, value in item.items():
            fields.setdefault(key, []).append(value)
    for key, values in fields.items():
        if len(values) != len(data_list):
            raise ValueError(f"{len(values)} of {len(data_list)} items have a field {key!r}")
    return {
        key: torch.stack(values) if isinstance(values[0], torch.Tensor) else objects(values)
        for key, values in fields.items()
    }
