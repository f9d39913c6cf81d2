"""Loads a user's reward function from a Python file.

Knows the file and the call signature, not what the function computes. Called by
`load_reward_manager`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.errors import ConfigError, did_you_mean
from slipstream.rewards.signatures import (
    COMPLETIONS,
    SOLUTIONS,
    DataProtoSignature,
    VerlBatchSignature,
    VerlSignature,
    takes,
    wants_data,
)

_TRLS = (COMPLETIONS, "prompts", "completion_ids")

_PREFIX = "slipstream_custom_reward_"
"""Of the names of modules that files become."""


def get_custom_reward_fn(
    path: str | Path, name: str = "compute_score", reward_kwargs: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The function `name` of the file `path`, with `reward_kwargs` bound.

    It has VERL's signature or TRL's (`rewards.signatures`), and may be `async def`. Raises
    `ConfigError` for a missing file or name, a file that does not import, and a signature that
    does not take these arguments.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(
            f"custom_reward_function.path {str(path)!r} is not a file: give the path of a Python "
            "file"
        )
    module = _import_file(file)
    function = getattr(module, name, None)
    if not callable(function):
        own = _defined(module)
        hint = did_you_mean(name, own) or "."
        raise ConfigError(
            f"custom_reward_function.name {name!r} is not a function of {str(path)!r}{hint} It "
            f"defines: {', '.join(own) or 'no functions'}"
        )
    kwargs = dict(reward_kwargs or {})
    _check_signature(function, kwargs, name, file)
    return functools.partial(function, **kwargs) if kwargs else function


def is_custom(function: Callable[..., Any]) -> bool:
    """Whether a function, or what keywords were bound to, is of a user's file."""
    inner = function.func if isinstance(function, functools.partial) else function
    return str(getattr(inner, "__module__", "")).startswith(_PREFIX)


def call_custom(path: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """Call the function `name` of a user's file; for a process that has not loaded it."""
    return _loaded(path, name)(*args, **kwargs)


@functools.cache
def _loaded(path: str, name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(_import_file(Path(path)), name)
    return function


def _import_file(file: Path) -> ModuleType:
    # The name depends on the full path, so that two files of one name do not replace each other.
    digest = hashlib.blake2b(str(file.resolve()).encode(), digest_size=6).hexdigest()
    module_name = f"{_PREFIX}{file.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ConfigError(
            f"custom_reward_function.path {str(file)!r} is not a Python file: its name must end "
            "in .py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # user code may raise anything; the reason is passed on
        del sys.modules[module_name]
        raise ConfigError(
            f"custom_reward_function.path {str(file)!r} does not import: "
            f"{type(error).__name__}: {error}"
        ) from error
    return module


def _defined(module: ModuleType) -> list[str]:
    return sorted(
        key
        for key, value in vars(module).items()
        if callable(value)
        and not key.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
    )


def _check_signature(
    function: Callable[..., Any], kwargs: dict[str, Any], name: str, file: Path
) -> None:
    trl = takes(function, COMPLETIONS)
    batch = takes(function, SOLUTIONS)
    verls = VerlBatchSignature.ARGUMENTS if batch else VerlSignature.ARGUMENTS
    if wants_data(function):
        verls = DataProtoSignature.ARGUMENTS
    given = _TRLS if trl else verls
    clash = sorted(set(kwargs) & set(given))
    if clash:
        raise ConfigError(
            f"custom_reward_function.reward_kwargs must not contain {', '.join(clash)}: these come "
            "from the data"
        )
    signature = inspect.signature(function)
    if trl:
        _check_known(signature, kwargs, name, file)
        return
    try:
        signature.bind(**dict.fromkeys(given), **kwargs)
    except TypeError as error:
        extra = f" and the reward_kwargs {', '.join(kwargs)}" if kwargs else ""
        raise ConfigError(
            f"{name}{signature} in {str(file)!r} cannot be called with {', '.join(given)}"
            f"{extra}: {error}"
        ) from error


def _check_known(
    signature: inspect.Signature, kwargs: Mapping[str, Any], name: str, file: Path
) -> None:
    """Of TRL's functions: which columns a row has is known only when it comes."""
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = sorted(set(kwargs) - set(parameters))
    if unknown:
        raise ConfigError(
            f"{name}{signature} in {str(file)!r} does not take the reward_kwargs "
            f"{', '.join(unknown)}{did_you_mean(unknown[0], parameters)}"
        )
