"""Loads a user's reward function from a Python file.

Knows the file and the call signature, not what the function computes. Called by
`load_reward_manager`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, did_you_mean, reason_of
from slipstream.rewards.signatures import (
    RETURN_DICT,
    SOLUTIONS,
    TRL_ARGUMENTS,
    DataProtoSignature,
    VerlBatchSignature,
    VerlSignature,
    is_trl,
    takes,
    wants_data,
)
from slipstream.rewards.trl import ENVIRONMENTS
from slipstream.user_code import import_module, load_named

_PATH_KEY = "custom_reward_function.path"
_PREFIX = "slipstream_custom_reward_"
"""Prefix of the module names under which user files are imported."""


def get_custom_reward_fn(
    path: str | Path, name: str = "compute_score", reward_kwargs: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Return the function `name` of the file `path`, with `reward_kwargs` bound.

    It has verl's or TRL's signature (see `rewards.signatures`), and may be `async def`. Raises
    ConfigError if file or name is missing, if the file cannot be imported, or if the signature
    does not accept these arguments.
    """
    function = load_named(
        path,
        name,
        path_key=_PATH_KEY,
        name_key="custom_reward_function.name",
        what="functions",
        prefix=_PREFIX,
    )
    kwargs = dict(reward_kwargs or {})
    _check_signature(function, kwargs, name, path)
    return functools.partial(function, **kwargs) if kwargs else function


def is_custom(function: Callable[..., Any]) -> bool:
    """Return whether a function, possibly with bound keywords, comes from a user's file."""
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__module__", "")).startswith(_PREFIX)


def located(function: Callable[..., Any]) -> tuple[str, str]:
    """Return file and name of a user's function, or of an object that the user's file made.

    Raises ConfigError if the file has no such name, as for a function inside another one.
    """
    module = sys.modules[str(function.__module__)]
    name = next((key for key, value in vars(module).items() if value is function), None)
    if name is None:
        raise ConfigError(
            f"{function!r} is not at the top level of {module.__file__}; assign it to a name there"
        )
    return str(module.__file__), name


def call_custom(path: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the function `name` of a user's file, which is imported in this process if needed."""
    return _loaded(path, name)(*args, **kwargs)


@functools.cache
def _loaded(path: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(path, key=_PATH_KEY, prefix=_PREFIX), name)
    return function


def _check_signature(
    function: Callable[..., Any], kwargs: dict[str, Any], name: str, file: str | Path
) -> None:
    trl = is_trl(function)
    batch = takes(function, SOLUTIONS)
    verl_arguments = VerlBatchSignature.ARGUMENTS if batch else VerlSignature.ARGUMENTS
    if wants_data(function):
        verl_arguments = DataProtoSignature.ARGUMENTS
    given = TRL_ARGUMENTS if trl else verl_arguments
    clash = sorted(set(kwargs) & set(given))
    if clash:
        raise ConfigError(
            f"custom_reward_function.reward_kwargs must not contain {', '.join(clash)}: their "
            "values come from the data"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"custom_reward_function.name {name!r} in {str(file)!r} has no readable parameters "
            f"({reason_of(error)}): define a function that calls it"
        ) from error
    if trl:
        _check_known(signature, kwargs, name, file)
        return
    if wants_data(function) and takes(function, RETURN_DICT):
        given = (*given, RETURN_DICT)
    try:
        signature.bind(**dict.fromkeys(given), **kwargs)
    except TypeError as error:
        extra = f" and the reward_kwargs {', '.join(kwargs)}" if kwargs else ""
        raise ConfigError(
            f"{name}{signature} in {str(file)!r} cannot be called with {', '.join(given)}"
            f"{extra}: {error}. TRL's signature is recognized by one of the parameters "
            f"{', '.join(TRL_ARGUMENTS)}"
        ) from error


def _check_known(
    signature: inspect.Signature, kwargs: Mapping[str, Any], name: str, file: str | Path
) -> None:
    """Check a TRL function. Which columns a row has is known only when it is scored."""
    parameters = signature.parameters
    needed = parameters.get(ENVIRONMENTS)
    if needed is not None and needed.default is needed.empty and ENVIRONMENTS not in kwargs:
        raise ConfigError(
            f"{name}{signature} in {str(file)!r} needs {ENVIRONMENTS}, which TRL's trainer passes "
            "with an environment_factory; there are none here: give the parameter a default"
        )
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = sorted(set(kwargs) - set(parameters))
    if unknown:
        raise ConfigError(
            f"{name}{signature} in {str(file)!r} does not take the reward_kwargs "
            f"{', '.join(unknown)}{did_you_mean(unknown[0], parameters)}"
        )
