"""The registry of inference engines: their names, what they can do, and how they are made.

This module is the only place that knows engines by name. Everything else asks for capabilities
(`EngineCapabilities`). To add an engine, call `register_engine` in the module that
`actor_rollout_ref.model.external_lib` names; a run then selects it with
`actor_rollout_ref.rollout.name=NAME`.

The registry is in `config` because the rules between options (`validate`) ask it, and `config` may
import neither torch nor `inference`. So a factory is either a function that the caller has imported
already, or a dotted path that is imported when the engine is made.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, did_you_mean, name_of
from slipstream.types import EngineCapabilities, PolicyKind

if TYPE_CHECKING:
    from slipstream.config.schema import Config

ENGINE_KEY = "actor_rollout_ref.rollout.name"
"""The option that selects an engine."""

VLLM_PYTHON = "SLIPSTREAM_VLLM_PYTHON"
"""The environment variable with the Python interpreter of an environment that has vLLM."""

SERVED = {"vllm": VLLM_PYTHON, "sglang": "SLIPSTREAM_SGLANG_PYTHON"}
"""Engine whose servers a run can start -> the environment variable with the Python interpreter of
an environment that has them."""

Factory = str | Callable[..., Any]
"""A function, or its dotted path `package.module:function`."""

Has = Callable[[EngineCapabilities], object]
"""A test for a capability, such as `lambda engine: engine.drafts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """A registered engine, with the arguments of `register_engine`."""

    name: str
    capabilities: EngineCapabilities
    factory: Factory | None
    check: Factory | None = None

    def make(self, setup: Any) -> Any:
        """Make the engine for a `build.engine.EngineSetup`.

        Raises ConfigError if the engine has no factory.
        """
        if self.factory is None:
            raise ConfigError(
                f"{ENGINE_KEY}={self.name} cannot be used in a run; set {ENGINE_KEY}=embedded"
            )
        return _function(self.factory)(setup)

    def check_settings(self, config: Config, policy: Any) -> None:
        """Raise ConfigError if the engine cannot serve `policy` with the settings of `config`."""
        if self.check is not None:
            _function(self.check)(config, policy)


def _function(factory: Factory) -> Callable[..., Any]:
    if not isinstance(factory, str):
        return factory
    module, _, name = factory.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


_ENGINES: dict[str, EngineEntry] = {}


def register_engine(
    name: str | Enum,
    capabilities: EngineCapabilities,
    factory: Factory | None,
    *,
    check: Factory | None = None,
) -> None:
    """Add an engine that `actor_rollout_ref.rollout.name` can select.

    `factory(setup)` returns an `inference.protocol.InferenceEngine` with these `capabilities`;
    `setup` is a `build.engine.EngineSetup`. If `factory` is None, runs cannot use the engine.
    `check(config, policy_config)` raises ConfigError if the engine cannot serve the policy with
    these settings; it is called before the run makes any model or engine.

    Raises ConfigError if another engine has this name.
    """
    name = name_of(name, "engine")
    entry = EngineEntry(name=name, capabilities=capabilities, factory=factory, check=check)
    if _ENGINES.setdefault(name, entry) != entry:
        raise ConfigError(
            f"an engine named {name!r} is already registered; register yours under another name"
        )


def is_here(name: str) -> bool:
    """Whether the run's Python has the servers of this engine, or the environment variable names
    one that has."""
    return SERVED[name] in os.environ or importlib.util.find_spec(name) is not None


def engine_names() -> tuple[str, ...]:
    """Return the names of all engines, in the order of their registration."""
    return tuple(_ENGINES)


def engine_entry(name: str | Enum) -> EngineEntry:
    """Return the engine `name`. Raises ConfigError if the name is unknown."""
    name = name_of(name, "engine")
    entry = _ENGINES.get(name)
    if entry is None:
        raise ConfigError(unknown_engine(name))
    return entry


def unknown_engine(name: str) -> str:
    """Return the message for a name that no engine has."""
    known = engine_names()
    return (
        f"{ENGINE_KEY}={name} is not known{did_you_mean(name, known)} (known: {', '.join(known)}); "
        "to use one of your own, set actor_rollout_ref.model.external_lib=MODULE to a module that "
        "registers it"
    )


def selected_engine(config: Config) -> EngineEntry | None:
    """Return the engine of a run; None if it is not registered yet.

    An engine of a user module is registered when `build.process.import_external` imports the
    module. Rules between options do not apply before that.
    """
    return _ENGINES.get(config.actor_rollout_ref.rollout.name)


def has_servers(name: object) -> bool:
    """Return whether the engine `name` has servers, or is not registered yet."""
    entry = _ENGINES.get(name) if isinstance(name, str) else None
    return entry is None or entry.capabilities.servers


def engine_lacks(config: Config, has: Has) -> bool:
    """Return whether the selected engine lacks a capability; False if it is not registered yet."""
    entry = selected_engine(config)
    return entry is not None and not has(entry.capabilities)


def generates_with(kind: PolicyKind) -> Has:
    """Return a test for engines that generate with policies of this kind."""
    return lambda engine: kind in engine.policies


def engines_with(has: Has) -> str:
    """Return what to set for a capability, for error messages: `actor_rollout_ref.rollout.name=A`.

    The text names all engines that have the capability and that a run can use, joined by "or".
    """
    names = [
        entry.name
        for entry in _ENGINES.values()
        if has(entry.capabilities) and not entry.capabilities.for_tests
    ]
    return " or ".join(f"{ENGINE_KEY}={name}" for name in names)


EMBEDDED = EngineCapabilities(
    policies=frozenset({PolicyKind.DECODER}),
    keyed_noise=True,
    exact=True,
    drafts=True,
    hidden_states=True,
    several_processes=True,
    one_thread_tail=True,
    kv_budget=True,
    width_multiple=16,
)
HF = EngineCapabilities(
    policies=frozenset({PolicyKind.DECODER, PolicyKind.TRANSFORMERS}), keyed_noise=True
)
VLLM = EngineCapabilities(policies=frozenset({PolicyKind.DECODER}), drafts=True, servers=True)
SGLANG = EngineCapabilities(policies=frozenset({PolicyKind.DECODER}), servers=True)
FAKE = EngineCapabilities(for_tests=True)

register_engine(
    "embedded",
    EMBEDDED,
    "slipstream.build.engine:make_embedded",
    check="slipstream.build.engine:check_embedded",
)
register_engine("hf", HF, "slipstream.build.engine:make_hf")
for _name, _capabilities in (("vllm", VLLM), ("sglang", SGLANG)):
    register_engine(
        _name,
        _capabilities,
        f"slipstream.build.servers:make_{_name}",
        check=f"slipstream.build.servers:check_{_name}",
    )
register_engine("fake", FAKE, None)
