"""verl's `RayPPOTrainer`: run Slipstream with data sets and reward functions as Python objects.

Translates verl's interface. The training itself is `run.train.train`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.build.data import GivenParts
from slipstream.compat.rewards import VerlRewardManager, config_of
from slipstream.config.mode import resolve_mode
from slipstream.data.rlhf_dataset import collate_fn as stack_items
from slipstream.errors import ConfigError
from slipstream.run.train import train

_log = logging.getLogger(__name__)


class RayPPOTrainer:
    """Trains a policy on a data set with a reward function. `fit()` runs the training.

    - `config`: verl's configuration from OmegaConf or Hydra, or any mapping of options (see
      `compat.rewards.config_of`).
    - `train_dataset`: a map-style data set whose items have prompts (see `data.items`). None: the
      files in `data.train_files`.
    - `reward_fn`: maps a `DataProto` to a tensor (B,) or (B, R), or has another signature listed in
      `rewards.signatures`. None: the function that the configuration selects.
    - `tokenizer`: None is the model's tokenizer, or if `config` names none the data set's.
    - `collate_fn`: is called with one item at a time.

    `trainer.nnodes` and `trainer.n_gpus_per_node` decide where processes run. Roles, resource pools
    and worker groups are accepted and unused.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        role_worker_mapping: Any = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        val_reward_fn: Callable[..., Any] | None = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        """Check all settings. Raises ConfigError before anything is computed."""
        overrides = [] if device_name is None else [f"trainer.device={device_name}"]
        self.config = config_of(config, complete=True, overrides=overrides)
        if processor is not None:
            raise ConfigError(
                "RayPPOTrainer(processor=...) is not supported: models here read text; leave the "
                "processor out"
            )
        if train_dataset is not None and self.config.data.task is not None:
            raise ConfigError(
                f"data.task={self.config.data.task} generates the prompts, but a train_dataset is "
                "given too; set data.task=null"
            )
        unused = {
            "role_worker_mapping": role_worker_mapping,
            "resource_pool_manager": resource_pool_manager,
            "ray_worker_group_cls": ray_worker_group_cls,
        }
        for name in (name for name, value in unused.items() if value is not None):
            _log.warning(
                "RayPPOTrainer(%s=...) has no effect: trainer.nnodes and trainer.n_gpus_per_node "
                "decide where processes run",
                name,
            )
        if tokenizer is None and not _names_tokenizer(self.config):
            tokenizer = getattr(train_dataset, "tokenizer", None)
        self._parts = GivenParts(
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            train_sampler=train_sampler,
            collate_fn=None if collate_fn is stack_items else collate_fn,
            reward_fn=_unwrapped(reward_fn),
            val_reward_fn=_unwrapped(val_reward_fn),
            tokenizer=tokenizer,
        )
        self._mode = resolve_mode(self.config, given_data=train_dataset is not None)

    @property
    def folder(self) -> Path:
        """The run folder with metrics, rollouts and checkpoints."""
        return Path(self.config.trainer.default_local_dir)

    def init_workers(self) -> None:
        """Do nothing. verl programs call this before `fit`."""

    def fit(self) -> None:
        """Train, resuming from a checkpoint of the run folder as `trainer.resume_mode` says.

        Errors of the parts propagate. Raises KeyboardInterrupt if the run was stopped before its
        end; then its state is saved.
        """
        if train(self.config, self._mode, self._parts) != 0:
            raise KeyboardInterrupt


def _unwrapped(reward_fn: Callable[..., Any] | None) -> Any:
    """Return the manager inside a `VerlRewardManager`, which scores responses as they finish."""
    if not isinstance(reward_fn, VerlRewardManager):
        return reward_fn
    # A subclass with its own `__call__` is a function of batches.
    own = type(reward_fn).__call__ is not VerlRewardManager.__call__
    return reward_fn if own else reward_fn.manager


def _names_tokenizer(config: Any) -> bool:
    model = config.actor_rollout_ref.model
    return any((config.data.tokenizer, model.tokenizer_path, model.path))
