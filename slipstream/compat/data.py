"""verl's factory functions for data sets and samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.build.dataset import data_section, data_seed, make_dataset
from slipstream.compat.rewards import config_of, plain_mapping
from slipstream.config.schema import Config
from slipstream.data.samplers import load_sampler


def create_rl_dataset(
    data_paths: str | Path | Sequence[str | Path],
    data_config: Mapping[str, Any],
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int = -1,
) -> Any:
    """Return the data set of `data_paths`.

    `data_config` is the section `data`. If it names a class (`custom_cls`), the data set is of that
    class. If it names a generator (`datagen`) and `is_train`, the generator is used. Otherwise it
    is an `RLHFDataset`. `processor` must be None, since models here read text only. Raises
    ConfigError and DataError.
    """
    if processor is not None:
        raise ValueError("processor is not supported: models here read text; leave it out")
    paths = [data_paths] if isinstance(data_paths, str | Path) else data_paths
    files = [str(path) for path in paths]
    config = _config_of_data({**plain_mapping(data_config), "train_files": files})
    return make_dataset(config, tokenizer, files, max_samples, train=is_train)


def create_rl_sampler(
    data_config: Mapping[str, Any], dataset: Any
) -> torch.utils.data.Sampler[int]:
    """Return the sampler that the section `data` asks for.

    It is an instance of the class that `sampler` names, else a random sampler with the section's
    seed if `shuffle`, else a sequential sampler. Raises ConfigError.
    """
    config = _config_of_data(plain_mapping(data_config))
    custom = config.data.sampler
    if custom.class_name is not None:
        return load_sampler(
            dataset, data_section(config), path=custom.class_path, name=custom.class_name
        )
    if not config.data.shuffle:
        return torch.utils.data.SequentialSampler(dataset)
    generator = torch.Generator().manual_seed(data_seed(config))
    return torch.utils.data.RandomSampler(dataset, generator=generator)


def _config_of_data(data: Mapping[str, Any]) -> Config:
    return config_of({"data": data}, sections=("data",))
