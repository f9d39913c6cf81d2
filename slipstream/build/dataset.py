"""Builds data sets that are classes (a user's or verl's), generators of rows, and samplers.

`build.data` uses it if prompts are not simply read from files in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.build.episodes import check_rows, has_episodes, tool_schemas
from slipstream.config.schema import Config
from slipstream.config.tree import to_dict
from slipstream.data.dataset_source import DatasetSource
from slipstream.data.datasets import PromptReader
from slipstream.data.items import as_prompt
from slipstream.data.rlhf_dataset import DynamicGenDataset, RLHFDataset
from slipstream.data.samplers import load_sampler
from slipstream.errors import ConfigError, DataError
from slipstream.types import Prompt
from slipstream.user_code import called, created, load_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def data_seed(config: Config) -> int:
    """The seed for the order of data: `data.seed`, or `trainer.seed` if that is null."""
    return config.trainer.seed if config.data.seed is None else config.data.seed


def is_class(config: Config) -> bool:
    """True if training prompts come from a class or sampler, not from files in order."""
    data = config.data
    return any((data.custom_cls.name, data.sampler.class_name, data.datagen.name))


def prompt_reader(config: Config, tokenizer: PreTrainedTokenizerBase) -> PromptReader:
    """The reader that turns rows and items into prompts."""
    data = config.data
    return PromptReader(
        tokenizer=tokenizer,
        max_prompt_length=data.max_prompt_length,
        prompt_key=data.prompt_key,
        reward_fn_key=data.reward_fn_key,
        truncation=data.truncation,
        filter_overlong=data.filter_overlong_prompts,
        tools=tool_schemas(config),
        template_kwargs=dict(data.apply_chat_template_kwargs),
    )


def data_section(config: Config) -> Mapping[str, Any]:
    """The section `data` for classes written for verl: readable by attribute and with `get`."""
    from omegaconf import OmegaConf

    section = OmegaConf.create({**to_dict(config)["data"], "seed": data_seed(config)})
    OmegaConf.set_readonly(section, True)
    return section


def make_dataset(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    files: Sequence[str] | None,
    max_samples: int,
    *,
    train: bool,
) -> Any:
    """Create the data set for `files`: the class in `data.custom_cls`, or verl's `RLHFDataset`."""
    own, section = config.data.custom_cls, data_section(config)
    arguments: dict[str, Any] = {
        "data_files": None if files is None else list(files),
        "tokenizer": tokenizer,
        "processor": None,
        "config": section,
        "max_samples": max_samples,
    }
    if own.path is None or own.name is None:
        return (DynamicGenDataset if train and config.data.datagen.name else RLHFDataset)(
            **arguments
        )
    found = load_named(
        own.path,
        own.name,
        path_key="data.custom_cls.path",
        name_key="data.custom_cls.name",
        what="classes",
    )
    if not isinstance(found, type) or not hasattr(found, "__getitem__"):
        raise ConfigError(
            f"data.custom_cls.name={own.name} must be a class with __getitem__ and __len__, such "
            "as one that inherits from slipstream.data.rlhf_dataset.RLHFDataset"
        )
    return created(
        found,
        arguments,
        own.kwargs,
        what=f"data.custom_cls.name={own.name}",
        own_key="data.custom_cls.kwargs",
    )


def make_source(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Any,
    sampler: Any = None,
    collate: Callable[[list[Any]], Mapping[str, Any]] | None = None,
) -> DatasetSource:
    """A source of training prompts from a data set, in the order of `data.sampler` or `sampler`."""
    wanted = config.data.sampler
    if sampler is None and wanted.class_name is not None:
        sampler = load_sampler(
            dataset, data_section(config), path=wanted.class_path, name=wanted.class_name
        )
    return DatasetSource(
        dataset,
        prompt_reader(config, tokenizer),
        seed=data_seed(config),
        shuffle=config.data.shuffle,
        sampler=sampler,
        collate=collate,
    )


def all_prompts(
    config: Config, tokenizer: PreTrainedTokenizerBase, dataset: Any, *, count: int = -1
) -> list[Prompt]:
    """The first `count` prompts of a data set (-1: all). Raises DataError if there is none, and for
    items with equal uids."""
    reader, name = prompt_reader(config, tokenizer), type(dataset).__name__
    length = called(len, f"{name}.__len__", dataset)
    total = length if count == -1 else min(count, length)

    def prompt(index: int) -> Prompt:
        item = called(dataset.__getitem__, f"{name}.__getitem__({index})", index)
        return as_prompt(item, reader=reader, name=name, index=index)

    loaded = reader.keep((i, f"{name}[{i}]", partial(prompt, i)) for i in range(total))
    loaded.warn(reader.max_prompt_length, tools=has_episodes(config))
    prompts = loaded.prompts
    check_rows(config, prompts)
    if not prompts:
        raise DataError(f"{name} has no usable rows to validate on; see data.val_files")
    if len({prompt.uid for prompt in prompts}) < len(prompts):
        raise DataError(f"items of {name} share a uid; every item needs its own, or none")
    return prompts
