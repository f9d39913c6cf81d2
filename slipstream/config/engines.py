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
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slipstream.errors import ConfigError, did_you_mean
from slipstream.types import EngineCapabilities, PolicyKind

if TYPE_CHECKING:
    from slipstream.config.schema import Config

ENGINE_KEY = "actor_rollout_ref.rollout.name"
"""The option that selects an engine."""

Factory = str | Callable[..., Any]
"""A function, or its dotted path `package.module:function`."""

Has = Callable[[EngineCapabilities], object]
"""Asks for a capability: `lambda engine: engine.drafts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """A registered engine. See `register_engine`."""

    name: str
    capabilities: EngineCapabilities
    factory: Factory | None
    check: Factory | None = None

    def make(self, setup: Any) -> Any:
        """The engine for a `build.engine.EngineSetup`. Raises ConfigError if it has no factory."""
        if self.factory is None:
            raise ConfigError(f"{ENGINE_KEY}={self.name}: a run cannot make this engine")
        return _function(self.factory)(setup)

    def check_settings(self, config: Config, policy: Any) -> None:
        """Refuse settings with which the engine could not serve `policy`. Raises ConfigError."""
        if self.check is not None:
            _function(self.check)(config, policy)


def _function(found: Factory) -> Callable[..., Any]:
    if not isinstance(found, str):
        return found
    module, _, name = found.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


_ENGINES: dict[str, EngineEntry] = {}


def register_engine(
    name: str,
    capabilities: EngineCapabilities,
    factory: Factory | None,
    *,
    check: Factory | None = None,
) -> None:
    """Add an engine that `actor_rollout_ref.rollout.name` can select.

    `factory(setup)` returns an `inference.protocol.InferenceEngine` with these `capabilities`;
    `setup` is a `build.engine.EngineSetup`. None: no run can make the engine. `check(config,
    policy_config)` raises ConfigError for settings with which the engine could not serve the
    policy; it is called before anything is made.

    Raises ConfigError if another engine has this name.
    """
    entry = EngineEntry(name=name, capabilities=capabilities, factory=factory, check=check)
    if _ENGINES.setdefault(name, entry) != entry:
        raise ConfigError(f"engine {name!r} exists already; register yours under another name")


def engine_names() -> tuple[str, ...]:
    """The names of all engines, in the order of their registration."""
    return tuple(_ENGINES)


def engine_entry(name: str) -> EngineEntry:
    """The engine `name`. Raises ConfigError for an unknown name."""
    entry = _ENGINES.get(name)
    if entry is None:
        raise ConfigError(unknown_engine(name))
    return entry


def unknown_engine(name: str) -> str:
    """The message for a name that no engine has."""
    known = engine_names()
    return (
        f"{ENGINE_KEY}={name} is not known{did_you_mean(name, known)} (known: {', '.join(known)}); "
        "the module that actor_rollout_ref.model.external_lib names can register others"
    )


def selected_engine(config: Config) -> EngineEntry | None:
    """The engine of a run. None if it is not registered yet: the rules between options then wait
    until `build.process.import_external` has imported its module."""
    return _ENGINES.get(config.actor_rollout_ref.rollout.name)


def engine_lacks(config: Config, has: Has) -> bool:
    """Whether the selected engine lacks a capability; False if it is not registered yet."""
    entry = selected_engine(config)
    return entry is not None and not has(entry.capabilities)


def generates_with(kind: PolicyKind) -> Has:
    """Asks for an engine that generates with policies of this kind."""
    return lambda engine: kind in engine.policies


def engines_with(has: Has) -> str:
    """What to set for a capability, for messages: `actor_rollout_ref.rollout.name=NAME`, with all
    engines that have it and that a run can select."""
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
FAKE = EngineCapabilities(for_tests=True)

register_engine(
    "embedded",
    EMBEDDED,
    "slipstream.build.engine:make_embedded",
    check="slipstream.build.engine:check_embedded",
)
register_engine("hf", HF, "slipstream.build.engine:make_hf")
register_engine("fake", FAKE, None)
