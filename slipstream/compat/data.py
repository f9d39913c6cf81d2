"""VERL's factories of data sets and samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.build.dataset import data_section, data_seed, make_dataset
from slipstream.compat.rewards import config_of
from slipstream.data.samplers import load_sampler


def create_rl_dataset(
    data_paths: str | Path | Sequence[str | Path],
    data_config: Mapping[str, Any],
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Any:
    """The data set of `data_paths`: of the class that `custom_cls` in the section `data` names, or
    with its generator (`datagen`) where `is_train`, else an `RLHFDataset`.

    `processor` must be None: models here read text. Raises ConfigError and DataError.
    """
    if processor is not None:
        raise ValueError("models here read text; leave the processor out")
    paths = [data_paths] if isinstance(data_paths, str | Path) else data_paths
    files = [str(path) for path in paths]
    config = config_of({"data": {**data_config, "train_files": files}})
    return make_dataset(config, tokenizer, files, max_samples, train=is_train)


def create_rl_sampler(
    data_config: Mapping[str, Any], dataset: Any
) -> torch.utils.data.Sampler[int]:
    """The order that the section `data` asks for: of the class that `sampler` names, shuffled after
    its seed, or one after the other. Raises ConfigError."""
    config = config_of({"data": dict(data_config)})
    wanted = config.data.sampler
    if wanted.class_name is not None:
        return load_sampler(
            dataset, data_section(config), path=wanted.class_path, name=wanted.class_name
        )
    if not config.data.shuffle:
        return torch.utils.data.SequentialSampler(dataset)
    generator = torch.Generator().manual_seed(data_seed(config))
    return torch.utils.data.RandomSampler(dataset, generator=generator)
