"""Reads settings from recipes, YAML files and override strings in Hydra's notation.

It turns each source into a list of assignments of dotted keys, in the order in which they apply.
Called by `load`, which interprets the assignments. hydra and omegaconf are imported inside
functions, because importing them would slow down `slipstream --help`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config.tree import options
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

RECIPES = Path(__file__).parent / "recipes"

_JOINED = r"\d+(?:\.\d*)?(?:_\d+(?:\.\d*)?)+"
"""Pattern of numbers joined by underscores, such as the interval 0.5_5.

YAML and Hydra ignore the underscore and read 0.55.
"""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Set `key` to `value`, or delete it. `origin` names the source in error messages."""

    key: str
    value: Any
    origin: str
    delete: bool = False


def recipe_names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """Return the file of a built-in recipe. Raises ConfigError if there is no such recipe."""
    path = RECIPES / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"recipe {name!r} does not exist; known recipes: {', '.join(recipe_names())}; "
            "to use your own file, pass --config FILE"
        )
    return path


def _is_group(key: str, directories: Sequence[Path]) -> bool:
    """Return whether `key` is a config group: a folder of alternative files in `directories`."""
    return any((directory / key).is_dir() for directory in directories)


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse override strings with Hydra's grammar.

    Raises ConfigError if a string is not an override. The message contains the string.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[Override] = []
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(
                f"{text!r} is not an override; write key=value, such as trainer.seed=2"
            )
        try:
            parsed.append(parser.parse_override(_quoted(text)))
        except HydraException as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"override {text!r} cannot be read: {reason}; put a value with special characters "
                """in quotes inside quotes, for example "key='a=b, c'" """.rstrip()
            ) from error
    return parsed


def _quoted(text: str) -> str:
    """Return an override with quotes around joined numbers, if the option accepts text.

    Such numbers can be the whole value, an item of a list, or the value of an option in a mapping.
    """
    key, _, value = text.partition("=")
    key_of = key.lstrip("+").replace("/", ".")
    if {"'", '"'} & set(value):
        return text
    if value.lstrip().startswith("{"):

        def quote(found: re.Match[str]) -> str:
            name, between, numbers = found.groups()
            return f"{name}{between}'{numbers}'" if _accepts_text(f"{key_of}.{name}") else found[0]

        return f"{key}=" + re.sub(rf"(\w+)(\s*:\s*)({_JOINED})(?=\s*[,}}])", quote, value)
    if not _accepts_text(key_of):
        return text
    return f"{key}=" + re.sub(rf"((?:^|[\[,])\s*)({_JOINED})(?=\s*(?:$|[,\]]))", r"\1'\2'", value)


def _accepts_text(key: str) -> bool:
    option = options().get(key)
    return option is not None and option.takes_text


def override_assignments(parsed: Sequence[Override]) -> Iterator[Assignment]:
    """Yield the assignments of parsed overrides, one for each key that they set.

    Raises ConfigError if an override is a sweep over several values.
    """
    for override in parsed:
        key = override.key_or_group.replace("/", ".")
        text = override.input_line or key
        if override.is_sweep_override():
            raise ConfigError(
                f"override {text!r} is a sweep over several values, but a run needs one value; "
                f"to set a list, write {key}=[a,b]"
            )
        if override.is_delete():
            yield Assignment(key, None, text, delete=True)
        else:
            yield from flatten(key, override.value(), text)


def flatten(key: str, value: Any, origin: str) -> Iterator[Assignment]:
    """Yield one assignment per leaf of `value`. A free-form mapping is a single assignment."""
    option = options().get(key)
    if isinstance(value, Mapping) and not (option is not None and option.free_form):
        for name, item in value.items():
            yield from flatten(f"{key}.{name}" if key else str(name), item, origin)
        return
    yield Assignment(key, value, origin)


def file_assignments(
    path: Path, parsed: Sequence[Override]
) -> tuple[list[Assignment], list[Override]]:
    """Return the assignments of a YAML file, and the overrides that still must be applied.

    Hydra composes the file if it has a `defaults` list. Overrides that select a file of a config
    group next to `path` are part of the composition; the others are returned.

    Raises ConfigError if the file is missing, is not a YAML mapping, or cannot be composed.
    """
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist; check --config or --config-path")
    groups = [o for o in parsed if _is_group(o.key_or_group, (path.parent, RECIPES))]
    rest = [o for o in parsed if o not in groups]
    try:
        content = OmegaConf.load(path)
    except (OmegaConfBaseException, OSError, UnicodeDecodeError, _yaml_error()) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"config file {path} must contain a mapping of options, not a list")
    if "defaults" in content or groups:
        content = _compose(path, groups)
    _check_joined(path)
    plain = OmegaConf.to_container(content, resolve=False)
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    return list(flatten("", plain, path.name)), rest


def _yaml_error() -> type[Exception]:
    import yaml

    error: type[Exception] = yaml.YAMLError
    return error


def _check_joined(path: Path) -> None:
    """Raise ConfigError for joined numbers without quotes as the value of a text option.

    YAML reads them as one number. Checks `path`, and files in its folder that its `defaults` name.
    """
    import yaml

    def check(node: Any, key: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                # The content of `<<` is merged into the mapping that contains it.
                merged = name.value == "<<"
                check(value, key if merged else f"{key}.{name.value}" if key else str(name.value))
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                check(value, key)
        elif _accepts_text(key) and node.tag in numbers and re.fullmatch(_JOINED, node.value):
            raise ConfigError(
                f"config file {path}: {key}: YAML reads {node.value} as one number and ignores the "
                f'underscore; write "{node.value}" with quotes'
            )

    numbers = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float")}
    text = path.read_text(encoding="utf-8")
    check(yaml.compose(text), "")
    for choice in (yaml.safe_load(text) or {}).get("defaults") or []:
        names = [f"{g}/{n}" for g, n in choice.items()] if isinstance(choice, dict) else [choice]
        for name in names:
            other = path.parent / f"{str(name).removesuffix('.yaml')}.yaml"
            if other != path and other.is_file():
                _check_joined(other)


def _compose(path: Path, groups: Sequence[Override]) -> Any:
    """Return the composition of one file by Hydra. Its `defaults` can name built-in recipes."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    recipes = str(RECIPES).replace("'", r"\'")
    overrides = [f"hydra.searchpath=['file://{recipes}']", *(o.input_line or "" for o in groups)]
    try:
        with warnings.catch_warnings():
            # Without `_self_` in `defaults`, the settings of the file override its defaults.
            warnings.filterwarnings("ignore", message=".*missing `_self_`.*")
            with initialize_config_dir(version_base="1.3", config_dir=str(path.parent.resolve())):
                return compose(path.stem, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"config file {path} cannot be composed: {error}") from error
