"""Creates reward managers by name, for a user's function or the built-in ones.

Called by the loops.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, SlipstreamError, did_you_mean, name_of, reason_of
from slipstream.rewards.batched import BatchRewardManager
from slipstream.rewards.custom import get_custom_reward_fn
from slipstream.rewards.functions import check_options, default_compute_score
from slipstream.rewards.limited import LimitedRewardManager
from slipstream.rewards.manager import DAPORewardManager, NaiveRewardManager
from slipstream.rewards.prime import PrimeRewardManager
from slipstream.rewards.protocol import PRIME, Decode, OnFailure, RewardManager
from slipstream.rewards.remote import RemoteRewardManager
from slipstream.rewards.runner import DeadlineRunner, is_async
from slipstream.rewards.sandbox.protocol import Sandbox
from slipstream.rewards.terms import TermsRewardManager, read_terms

_MANAGERS: dict[str, Callable[..., RewardManager]] = {
    "naive": NaiveRewardManager,
    "batch": BatchRewardManager,
    "dapo": DAPORewardManager,
    "prime": PrimeRewardManager,
    "gdpo": NaiveRewardManager,  # verl's name for it: rewards of several parts
    "limited": LimitedRewardManager,
    "rate_limited": LimitedRewardManager,
    "remote": RemoteRewardManager,
}


_SIGNALS = re.compile(
    r"^\s*(?:from|import) (?:math_verify|timeout_decorator)\b|\bSIGALRM\b|signal\.alarm|setitimer",
    re.MULTILINE,
)
"""Signs of time limits by signals, such as those of math-verify."""
_NO_LIMIT = re.compile(r"timeout(?:_seconds)?\s*=\s*(?:None|0)\b")
"""How a call of math-verify switches its limit off."""
_log = logging.getLogger(__name__)


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
    compute_score_kwargs: Mapping[str, Any] | None = None,
    reward_kwargs: Mapping[str, Any] | None = None,
    terms: Mapping[str, Any] | None = None,
    total_steps: int | None = None,
) -> RewardManager:
    """Return the reward manager `name` for the user's reward function or the built-in ones.

    `sandbox` runs programs for the built-in functions; None runs them on this machine, isolated.
    `custom_path`, `custom_name` and `custom_kwargs` are the settings `custom_reward_function.*`.
    `function` is a Python function that takes precedence over them. `compute_score_kwargs` are
    options of the built-in functions. `reward_kwargs` are the manager's own options. `terms` are
    added to its score (see `rewards.terms`). `total_steps` is the number of steps of the run, None
    if unknown; TRL's functions may ask for it. Raises ConfigError for unknown names and options.
    """
    name = name_of(name, "reward manager")
    if custom_path is None and custom_kwargs:
        raise ConfigError(
            "custom_reward_function.reward_kwargs is set, but custom_reward_function.path is not: "
            "set the path, or reward_model.compute_score_kwargs for the built-in functions"
        )
    own = function is not None or custom_path is not None or name == "remote"
    if compute_score_kwargs and own:
        raise ConfigError(
            "reward_model.compute_score_kwargs are options of the built-in reward functions, but "
            "another function scores; remove them, or set custom_reward_function.reward_kwargs"
        )
    if function is not None:
        compute_score = function
    elif custom_path is None:
        compute_score = _built_in(sandbox, compute_score_kwargs or {})
    else:
        compute_score = get_custom_reward_fn(custom_path, custom_name, custom_kwargs)
        if name in ("naive", "batch", "dapo") and not is_async(compute_score):
            _warn_of_signals(custom_path)
    # Loaded after the function, whose file may register a manager.
    factory = _MANAGERS.get(name)
    if factory is None:
        raise ConfigError(
            f"reward_model.reward_manager {name!r} is unknown{did_you_mean(name, _MANAGERS)}; use "
            f"{', '.join(sorted(_MANAGERS))}"
        )
    standard: dict[str, Any] = {
        "decode": decode,
        "timeout_s": timeout_s,
        "on_failure": on_failure,
        "num_workers": num_workers,
    }
    clash = sorted(set(standard) & set(reward_kwargs or {}))
    if clash:
        raise ConfigError(
            f"reward_model.reward_kwargs must not contain {', '.join(clash)}: set "
            "reward_model.* of the same name instead"
        )
    options = {**standard, **(reward_kwargs or {})}
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
    if isinstance(manager, NaiveRewardManager):
        manager.expect_steps(total_steps)
        manager.none_fails = not terms
    return _with_terms(name, manager, terms, total_steps, **standard) if terms else manager


def _with_terms(
    name: str,
    manager: RewardManager,
    terms: Mapping[str, Any],
    total_steps: int | None,
    *,
    decode: Decode,
    timeout_s: float,
    on_failure: OnFailure,
    num_workers: int | None,
) -> RewardManager:
    """Return a manager that adds terms to the score of the manager `name`."""
    weight, parsed = read_terms(terms)
    scorers = {}
    for term in parsed:
        if term.custom and not term.group:
            scorer = _term_manager(name, term.function)(
                term.function,
                decode=decode,
                timeout_s=timeout_s,
                on_failure=on_failure,
                num_workers=num_workers,
            )
            scorer.expect_steps(total_steps)
            scorer.none_fails = False
            scorers[term.name] = scorer
    return TermsRewardManager(
        manager,
        weight,
        parsed,
        scorers,
        decode=decode,
        runner=DeadlineRunner(timeout_s=timeout_s, num_workers=num_workers),
        on_failure=on_failure,
        total_steps=total_steps,
    )


def _term_manager(name: str, function: Callable[..., Any]) -> type[NaiveRewardManager]:
    """Return the manager of a term's own function: the run's manager may need processes."""
    in_processes = name == "prime" and not is_async(function)
    return PrimeRewardManager if in_processes else NaiveRewardManager


def _warn_of_signals(path: str | Path) -> None:
    """Log a warning if the code in a user's file needs the main thread.

    It would fail in each call. If the function turns errors into a score, all scores are alike and
    there is no other message.
    """
    source = Path(path).expanduser().read_text(encoding="utf-8", errors="replace")
    if (used := _SIGNALS.search(source)) is not None and not _NO_LIMIT.search(source):
        _log.warning(
            "%s uses %s, which works only in the main thread of a process, and reward functions "
            "run in threads; if its calls fail or all scores are 0, set %s",
            path,
            used.group(0).split()[-1],
            PRIME,
        )


def _built_in(sandbox: Sandbox | None, options: Mapping[str, Any]) -> Callable[..., Any]:
    check_options(options)
    bound = dict(options) if sandbox is None else {**options, "sandbox": sandbox}
    return functools.partial(default_compute_score, **bound) if bound else default_compute_score
