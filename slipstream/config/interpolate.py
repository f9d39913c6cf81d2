"""Resolves interpolations in settings written for VERL, such as `${data.max_prompt_length}`.

They name keys of VERL, which may have another name here or none. So they are resolved among the
assignments of all sources, before these are translated. Interpolations that fail here stay as they
are; `load` resolves them in our tree, or reports them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from slipstream.config.aliases import refers_to_its_target
from slipstream.config.schema import Config
from slipstream.config.sources import Assignment
from slipstream.config.tree import to_dict


def resolve_in_sources(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Return the assignments with resolved values. An alias of our key that names it is kept."""
    if not any(_interpolates(one.value) for one in assignments):
        return list(assignments)
    from hydra.core.utils import setup_globals
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    setup_globals()  # resolvers of Hydra, such as ${now:%H-%M}
    tree: dict[str, Any] = to_dict(Config())
    for assignment in assignments:
        if not _interpolates(assignment.value) or _can_be_read(assignment.value):
            _place(tree, assignment)
    root = OmegaConf.create(tree)

    def resolved(assignment: Assignment) -> Assignment:
        if not _interpolates(assignment.value):
            return assignment
        marked = replace(assignment, interpolated=True)
        key, value = assignment.key, assignment.value
        if refers_to_its_target(key, value) or not _can_be_read(value):
            return marked
        node: Any = root
        try:
            for part in key.split("."):
                node = node[part]
        except (OmegaConfBaseException, KeyError, TypeError, ValueError):
            return marked
        plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        return replace(marked, value=escaped(plain))

    return [resolved(assignment) for assignment in assignments]


def _interpolates(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_interpolates, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_interpolates, value))
    return isinstance(value, str) and "${" in value


def _can_be_read(value: Any) -> bool:
    """Return whether the interpolations in `value` have no syntax error, as `a${` has."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        OmegaConf.create([value])
    except OmegaConfBaseException:
        return False
    return True


def _place(tree: dict[str, Any], assignment: Assignment) -> None:
    *path, name = assignment.key.split(".")
    node = tree
    for part in path:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    if assignment.delete:
        node.pop(name, None)
    else:
        node[name] = assignment.value


def escaped(value: Any) -> Any:
    """Escape `${` in the texts of a resolved tree, so that a reader does not take it for an
    interpolation."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [escaped(item) for item in value]
    return value.replace("${", r"\${") if isinstance(value, str) else value
