"""verl's classes of reward managers, and their registry.

`reward_model.reward_manager=NAME` selects a class that user code registers, like a built-in
manager. Such a class is written for verl: its constructor takes a tokenizer and a function. Each
batch that its objects score has one response here.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import torch

from slipstream.compat.rewards import RewardsOfBatch, VerlRewardManager, compute_reward
from slipstream.config.tree import to_dict
from slipstream.data.response_text import response_decoder
from slipstream.errors import ConfigError, name_of
from slipstream.rewards.data_proto import DataProto
from slipstream.rewards.load import load_reward_manager, register_reward_manager
from slipstream.rewards.manager import NaiveRewardManager as PerResponseManager
from slipstream.rewards.protocol import RewardManager
from slipstream.user_code import created

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "RawRewardFn",
    "RewardManagerBase",
    "get_reward_manager_cls",
    "register",
]

RawRewardFn = Callable[..., Any]

_Class = TypeVar("_Class", bound=type)


class AbstractRewardManager(RewardsOfBatch, ABC):
    """Base class of managers that are called with a batch (verl 0.6 and 0.7)."""

    @abstractmethod
    def __init__(
        self,
        tokenizer: Any,
        num_examine: int,
        compute_score: RawRewardFn | None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None: ...

    @abstractmethod
    def __call__(self, data: DataProto, return_dict: bool = False) -> Any:
        """Return rewards (B, R), or with `return_dict` a mapping with `reward_tensor` and
        `reward_extra_info`, which has a list (B,) per name."""


AbstractRewardManager.register(VerlRewardManager)


class RewardManagerBase(ABC):
    """Base class of managers that score one response at a time (verl's reward loop).

    `config` is the whole configuration, as OmegaConf.
    """

    _class_initialized = False

    def __init__(self, config: Any, tokenizer: Any, compute_score: RawRewardFn | None) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        self.init_class(config, tokenizer)

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any) -> None:
        """Initialize what all managers of the class share. Called by each constructor."""
        cls._class_initialized = True

    @property
    def loop(self) -> Any:
        """The event loop that runs `run_single`.

        A loop that a subclass sets is not used: managers are created in another thread than the one
        that runs them.
        """
        return asyncio.get_running_loop()

    @loop.setter
    def loop(self, loop: Any) -> None:
        del loop

    @abstractmethod
    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Return `reward_score`, a number, and `reward_extra_info`, a mapping, for one row."""


class _BuiltIn(VerlRewardManager):
    """A built-in manager with verl's constructor."""

    name = "naive"

    def __init__(
        self,
        tokenizer: Any,
        num_examine: int = 0,
        compute_score: RawRewardFn | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        """Without `compute_score`, the built-in functions score. `num_examine` is accepted and
        unused.

        Raises ConfigError for unknown options, and if `reward_fn_key` is not `data_source`: set
        `data.reward_fn_key` to read the source from another column.
        """
        if reward_fn_key != "data_source":
            raise ConfigError(
                f"reward_fn_key={reward_fn_key!r}: batches store the data source as "
                f"data_source; set data.reward_fn_key={reward_fn_key}, which fills that field"
            )
        self.tokenizer, self.num_examine = tokenizer, num_examine
        self.compute_score, self.reward_fn_key = compute_score, reward_fn_key
        super().__init__(
            load_reward_manager(
                self.name,
                decode=response_decoder(tokenizer),
                function=compute_score,
                reward_kwargs=reward_kwargs,
            )
        )


class NaiveRewardManager(_BuiltIn):
    """Scores each response on its own."""


class BatchRewardManager(_BuiltIn):
    """Calls the function with several responses."""

    name = "batch"


class DAPORewardManager(_BuiltIn):
    """Scores each response, with a penalty for long ones (`overlong_buffer_cfg`)."""

    name = "dapo"


class PrimeRewardManager(_BuiltIn):
    """Calls the function in worker processes."""

    name = "prime"


_CLASSES: dict[str, type] = {
    kind.name: kind
    for kind in (NaiveRewardManager, BatchRewardManager, DAPORewardManager, PrimeRewardManager)
}
_BUILT_IN_NAMES = frozenset(_CLASSES)


def register(name: str | Enum) -> Callable[[_Class], _Class]:
    """Return a decorator that registers a class for `reward_model.reward_manager=<name>`.

    The class has verl's interface: that of `AbstractRewardManager`, or that of `RewardManagerBase`
    (a method `run_single`). It is called in a module that
    `actor_rollout_ref.model.external_lib` names, or in the file of the reward function. Raises
    ConfigError if another class or a built-in manager has the name.
    """
    key = name_of(name, "reward manager")

    def decorate(manager: _Class) -> _Class:
        known = _CLASSES.get(key)
        if known is None:
            register_reward_manager(key, partial(_adapted, key))
        elif key in _BUILT_IN_NAMES or _identity(known) != _identity(manager):
            raise ConfigError(
                f"reward manager {key!r} is already registered by {_identity(known)}; use "
                "another name"
            )
        _CLASSES[key] = manager
        return manager

    return decorate


def get_reward_manager_cls(name: str | Enum) -> type:
    """Return the class of a manager. Raises ConfigError for an unknown name."""
    found = _CLASSES.get(name_of(name, "reward manager"))
    if found is None:
        raise ConfigError(
            f"no class of reward managers is registered as {name!r}; use {', '.join(_CLASSES)}"
        )
    return found


def _identity(manager: type) -> str:
    return f"{manager.__module__}.{manager.__qualname__}"


def _adapted(
    name: str,
    compute_score: Callable[..., Any],
    *,
    decode: Any,
    timeout_s: float,
    on_failure: Any,
    num_workers: int | None,
    **reward_kwargs: Any,
) -> RewardManager:
    """Return a manager that calls an instance of the class that is registered as `name`."""
    manager = _CLASSES[name]
    single = hasattr(manager, "run_single")
    tokenizer, config = getattr(decode, "tokenizer", None), getattr(decode, "config", None)
    given = {"tokenizer": tokenizer, "compute_score": compute_score}
    if single:
        given["config"] = None if config is None else _omega(to_dict(config))
    else:
        # Batches store the source, which `data.reward_fn_key` selects, as `data_source`.
        given |= {"num_examine": 0, "reward_fn_key": "data_source"}
    instance: Any = created(
        manager,
        given,
        reward_kwargs,
        what=f"reward_model.reward_manager={name}: {_identity(manager)}",
        own_key="reward_model.reward_kwargs",
    )
    return PerResponseManager(
        _single(instance) if single else _batched(instance),
        decode=decode,
        timeout_s=timeout_s,
        on_failure=on_failure,
        num_workers=num_workers,
    )


def _omega(values: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.create(dict(values))


def _batched(instance: Any) -> Callable[..., Any]:
    def score(data: DataProto) -> Any:
        return compute_reward(data, instance)

    return score


def _single(instance: Any) -> Callable[..., Any]:
    async def score(data: DataProto) -> Any:
        result = await instance.run_single(data)
        extra = result.get("reward_extra_info") or {}
        return {
            "reward_tensor": torch.tensor([float(result["reward_score"])]),
            "reward_extra_info": {key: [value] for key, value in extra.items()},
        }

    return score
