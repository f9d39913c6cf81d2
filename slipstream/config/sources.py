"""Where settings come from: recipes, YAML files and override strings, in Hydra's notation.

Turns each source into a list of assignments of dotted keys, in the order in which they apply. Knows
Hydra and files, and of the schema only which keys are free-form mappings. Called by `load`, which
alone decides what the assignments mean. hydra and omegaconf are imported inside the functions, so
that `slipstream --help` does not pay for them.
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
"""Numbers joined by underscores, as an interval is: YAML and Hydra take 0.5_5 for 0.55."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """`key` gets `value`; or, with `delete`, goes away. `origin` is for error messages."""

    key: str
    value: Any
    origin: str
    delete: bool = False


def recipe_names() -> list[str]:
    """The built-in recipes."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


def recipe_file(name: str) -> Path:
    """The file of a built-in recipe.

    Raises:
        ConfigError: there is none of that name.
    """
    path = RECIPES / f"{name.removesuffix('.yaml')}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"recipe {name!r} does not exist; known recipes: {', '.join(recipe_names())}; "
            "a file of your own is given with --config FILE"
        )
    return path


def _is_group(key: str, directories: Sequence[Path]) -> bool:
    """Whether `key` names a folder of alternatives beside the file, rather than an option."""
    return any((directory / key).is_dir() for directory in directories)


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse override strings with Hydra's grammar.

    Raises:
        ConfigError: a string is no override; the message shows it.
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
    """An override with joined numbers in quotes where the option takes text: a whole value, an item
    of a list, or the value of an option in a mapping."""
    key, _, value = text.partition("=")
    key_of = key.lstrip("+").replace("/", ".")
    if {"'", '"'} & set(value):
        return text
    if value.lstrip().startswith("{"):

        def one(found: re.Match[str]) -> str:
            name, between, numbers = found.groups()
            return f"{name}{between}'{numbers}'" if _takes_text(f"{key_of}.{name}") else found[0]

        return f"{key}=" + re.sub(rf"(\w+)(\s*:\s*)({_JOINED})(?=\s*[,}}])", one, value)
    if not _takes_text(key_of):
        return text
    return f"{key}=" + re.sub(rf"((?:^|[\[,])\s*)({_JOINED})(?=\s*(?:$|[,\]]))", r"\1'\2'", value)


def _takes_text(key: str) -> bool:
    option = options().get(key)
    return option is not None and option.takes_text


def override_assignments(parsed: Sequence[Override]) -> Iterator[Assignment]:
    """The assignments of parsed overrides, one for each key that they set.

    Raises:
        ConfigError: an override is a sweep, which a single run cannot take.
    """
    for override in parsed:
        key = override.key_or_group.replace("/", ".")
        text = override.input_line or key
        if override.is_sweep_override():
            raise ConfigError(
                f"override {text!r} is a sweep over several values and a run takes one; "
                f"write a list as {key}=[a,b]"
            )
        if override.is_delete():
            yield Assignment(key, None, text, delete=True)
        else:
            yield from flatten(key, override.value(), text)


def flatten(key: str, value: Any, origin: str) -> Iterator[Assignment]:
    """One assignment per leaf of `value`; free-form mappings stay whole."""
    option = options().get(key)
    if isinstance(value, Mapping) and not (option is not None and option.free_form):
        for name, item in value.items():
            yield from flatten(f"{key}.{name}" if key else str(name), item, origin)
        return
    yield Assignment(key, value, origin)


def file_assignments(
    path: Path, parsed: Sequence[Override]
) -> tuple[list[Assignment], list[Override]]:
    """The assignments of a YAML file, composed by Hydra where it has a `defaults` list.

    Overrides that pick a file of a config group beside `path` take part in the composition; the
    others are handed back.

    Raises:
        ConfigError: the file is missing, is no YAML mapping, or cannot be composed.
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
        raise ConfigError(f"config file {path} must hold a mapping of options, not a list")
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
    """Refuse joined numbers without quotes where text is taken, in a file and those beside it that
    its `defaults` name: YAML reads them as one number."""
    import yaml

    def look(node: Any, key: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                # What is merged belongs to the mapping that it is merged into.
                merged = name.value == "<<"
                look(value, key if merged else f"{key}.{name.value}" if key else str(name.value))
        elif isinstance(node, yaml.SequenceNode):
            for value in node.value:
                look(value, key)
        elif _takes_text(key) and node.tag in numbers and re.fullmatch(_JOINED, node.value):
            raise ConfigError(
                f"config file {path}: {key}: {node.value} is read as one number without the "
                f'underscore; write "{node.value}", in quotes'
            )

    numbers = {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float")}
    text = path.read_text(encoding="utf-8")
    look(yaml.compose(text), "")
    for choice in (yaml.safe_load(text) or {}).get("defaults") or []:
        names = [f"{g}/{n}" for g, n in choice.items()] if isinstance(choice, dict) else [choice]
        for name in names:
            other = path.parent / f"{str(name).removesuffix('.yaml')}.yaml"
            if other != path and other.is_file():
                _check_joined(other)


def _compose(path: Path, groups: Sequence[Override]) -> Any:
    """Hydra's composition of one file; built-in recipes can be named in its `defaults`."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    recipes = str(RECIPES).replace("'", r"\'")
    overrides = [f"hydra.searchpath=['file://{recipes}']", *(o.input_line or "" for o in groups)]
    try:
        with warnings.catch_warnings():
            # A file without `_self_` in its defaults is fine: its own settings win.
            warnings.filterwarnings("ignore", message=".*missing `_self_`.*")
            with initialize_config_dir(version_base="1.3", config_dir=str(path.parent.resolve())):
                return compose(path.stem, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"config file {path} cannot be composed: {error}") from error
