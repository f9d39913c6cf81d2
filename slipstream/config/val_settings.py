"""Sampling settings of validation: `rollout.val_kwargs`, and its overrides per data source.

Called by `validate` and by the modules that build a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from slipstream.config.rules import WithoutEffect
from slipstream.config.schema import Config
from slipstream.config.schema_actor import ValKwargsSection
from slipstream.config.tree import from_dict, show, to_dict
from slipstream.errors import did_you_mean

KEY = "actor_rollout_ref.rollout.val_kwargs"

_NAMES = tuple(f.name for f in fields(ValKwargsSection) if f.name != "by_source")


def val_settings(config: Config, source: str) -> ValKwargsSection:
    """Return the settings of one data source. `config` must be valid."""
    settings, problems = _of_source(config, source)
    assert not problems, "checked by the configuration"
    return settings


def check_val_settings(config: Config) -> Iterator[str]:
    """Yield a message for each problem of the common settings and of each source's settings."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    yield from _rules(val, KEY)
    for source in val.by_source:
        settings, problems = _of_source(config, source)
        yield from problems
        if not problems:
            yield from _rules(settings, f"{KEY}.by_source.{source}")


def _of_source(config: Config, source: str) -> tuple[ValKwargsSection, list[str]]:
    """Return the settings of one source, and messages about invalid ones."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    overrides = val.by_source.get(source)
    if overrides is None:
        return val, []
    key = f"{KEY}.by_source.{source}"
    if not isinstance(overrides, Mapping):
        return val, [f"{key}={show(overrides)} must be a mapping, such as {{n: 8}}"]
    unknown = [
        f"{key}.{name} is not a setting of validation{did_you_mean(name, _NAMES)} (known: "
        f"{', '.join(_NAMES)})"
        for name in overrides
        if name not in _NAMES
    ]
    if unknown:
        return val, unknown
    tree = to_dict(config)
    tree["actor_rollout_ref"]["rollout"]["val_kwargs"].update(overrides)
    typed, mismatches = from_dict(tree)
    settings = replace(typed.actor_rollout_ref.rollout.val_kwargs, by_source=val.by_source)
    return settings, [message.replace(KEY, key, 1) for message in mismatches]


def _rules(val: ValKwargsSection, key: str) -> Iterator[str]:
    if val.do_sample and val.temperature == 0:
        yield (
            f"{key}.do_sample=true needs a temperature above 0; set {key}.temperature=1 or "
            f"{key}.do_sample=false"
        )
    if not val.do_sample and val.temperature > 0:
        yield WithoutEffect(
            f"{key}.temperature={val.temperature:g} has no effect with {key}.do_sample=false; set "
            f"{key}.do_sample=true or {key}.temperature=0"
        )
    if not val.do_sample and val.n > 1:
        yield WithoutEffect(
            f"{key}.n={val.n} with {key}.do_sample=false generates equal responses, so one is "
            "enough; set "
            f"{key}.do_sample=true and {key}.temperature=1, or {key}.n=1"
        )
    if val.top_p == 0:
        yield f"{key}.top_p=0 excludes all tokens; set {key}.top_p=1"
