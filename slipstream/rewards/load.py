"""Creates reward managers by name, for a user's function or the built-in ones.

Called by the loops.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError, did_you_mean, name_of, reason_of
from slipstream.rewards.batched import BatchRewardManager
from slipstream.rewards.custom import get_custom_reward_fn
from slipstream.rewards.functions import default_compute_score
from slipstream.rewards.limited import LimitedRewardManager
from slipstream.rewards.manager import DAPORewardManager, Decode, NaiveRewardManager
from slipstream.rewards.prime import PrimeRewardManager
from slipstream.rewards.protocol import OnFailure, RewardManager
from slipstream.rewards.remote import RemoteRewardManager
from slipstream.rewards.runner import DeadlineRunner
from slipstream.rewards.sandbox.protocol import Sandbox
from slipstream.rewards.terms import TermsRewardManager, read_terms

_MANAGERS: dict[str, Callable[..., RewardManager]] = {
    "naive": NaiveRewardManager,
    "batch": BatchRewardManager,
    "dapo": DAPORewardManager,
    "prime": PrimeRewardManager,
    "gdpo": NaiveRewardManager,  # VERL's name for it: rewards of several parts
    "limited": LimitedRewardManager,
    "rate_limited": LimitedRewardManager,
    "remote": RemoteRewardManager,
}


def register_reward_manager(name: str | Enum, factory: Callable[..., RewardManager]) -> None:
    """Register a manager. The factory takes the arguments of `NaiveRewardManager`, plus options."""
    key = name_of(name, "reward manager")
    if key in _MANAGERS:
        raise ConfigError(f"reward manager {key!r} already exists; choose another name")
    _MANAGERS[key] = factory


def load_reward_manager(
    name: str | Enum = "naive",
    *,
    decode: Decode,
    timeout_s: float = 30.0,
    on_failure: OnFailure = "zero",
    num_workers: int | None = None,
    sandbox: Sandbox | None = None,
    custom_path: str | Path | None = None,
    custom_name: str = "compute_score",
    custom_kwargs: Mapping[str, Any] | None = None,
    function: Callable[..., Any] | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
    terms: Mapping[str, Any] | None = None,
) -> RewardManager:
    """Return the reward manager `name` for the user's reward function or the built-in ones.

    `sandbox` runs programs for the built-in functions; None runs them on this machine, isolated.
    `custom_path`, `custom_name` and `custom_kwargs` are the settings `custom_reward_function.*`.
    `function` is a Python function that takes precedence over them. `reward_kwargs` are the
    manager's own options. `terms` are added to its score (see `rewards.terms`). Raises ConfigError
    for unknown names and options.
    """
    if custom_path is None and custom_kwargs:
        raise ConfigError(
            "custom_reward_function.reward_kwargs is set, but custom_reward_function.path is not: "
            "the built-in reward functions take no keywords; set the path or unset reward_kwargs"
        )
    if function is not None:
        compute_score = function
    elif custom_path is None:
        compute_score = _built_in(sandbox)
    else:
        compute_score = get_custom_reward_fn(custom_path, custom_name, custom_kwargs)
    # Loaded after the function, whose file may register a manager.
    name = name_of(name, "reward manager")
    factory = _MANAGERS.get(name)
    if factory is None:
        raise ConfigError(
            f"reward_model.reward_manager {name!r} is unknown{did_you_mean(name, _MANAGERS)}; use "
            f"{', '.join(sorted(_MANAGERS))}"
        )
    options: dict[str, Any] = {
        "decode": decode,
        "timeout_s": timeout_s,
        "on_failure": on_failure,
        "num_workers": num_workers,
    }
    clash = sorted(set(options) & set(reward_kwargs or {}))
    if clash:
        raise ConfigError(
            f"reward_model.reward_kwargs must not contain {', '.join(clash)}: set "
            "reward_model.* of the same name instead"
        )
    options.update(reward_kwargs or {})
    try:
        inspect.signature(factory).bind(compute_score, **options)
    except TypeError as error:
        raise ConfigError(
            f"reward_model.reward_kwargs {sorted(reward_kwargs or {})} do not fit the manager "
            f"{name!r}: {error}"
        ) from error
    try:
        manager = factory(compute_score, **options)
    except SlipstreamError:
        raise
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        if not reward_kwargs:
            raise
        raise ConfigError(
            f"reward_model.reward_kwargs {sorted(reward_kwargs)} have a value of the wrong type "
            f"for the manager {name!r}: {reason_of(error)}; set numbers and texts as "
            "docs/rewards.md lists them"
        ) from error
    if not terms:
        return manager
    weight, parsed = read_terms(terms)
    sample_terms = (term for term in parsed if term.custom and not term.group)
    return TermsRewardManager(
        manager,
        weight,
        parsed,
        {
            term.name: NaiveRewardManager(
                term.function,
                decode=decode,
                timeout_s=timeout_s,
                on_failure=on_failure,
                num_workers=num_workers,
            )
            for term in sample_terms
        },
        decode=decode,
        runner=DeadlineRunner(timeout_s=timeout_s, num_workers=num_workers),
        on_failure=on_failure,
    )


def _built_in(sandbox: Sandbox | None) -> Callable[..., Any]:
    if sandbox is None:
        return default_compute_score
    return functools.partial(default_compute_score, sandbox=sandbox)
