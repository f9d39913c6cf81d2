"""Reads settings from recipes, YAML files and override strings in Hydra's notation.

It turns each source into a list of assignments of dotted keys, in the order in which they apply.
Called by `load`, which interprets the assignments. hydra and omegaconf are imported inside
functions, because importing them would slow down `slipstream --help`.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.config import aliases
from slipstream.config.bases import GROUPS, bases_folder
from slipstream.config.tree import options
from slipstream.errors import ConfigError
from slipstream.reading import reading, reason, shown, shown_path

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

RECIPES = Path(__file__).parent / "recipes"

_JOINED = r"\d+(?:\.\d*)?(?:_\d+(?:\.\d*)?)+"
"""Pattern of numbers joined by underscores, such as the interval 0.5_5.

YAML and Hydra ignore the underscore and read 0.55.
"""


_KEY_IN_TEXT = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
_MOST_PLACES = 3
"""Keys of one message whose places are shown."""

_LONGEST_KEY = 1000
"""No option has a name of more characters, and comparing a longer one with all options is slow."""
_SHOWN_OF_OVERRIDE = 400
_MOST_NODES = 100_000
_MOST_BYTES = 10_000_000
_SEARCH_PATH = "hydra.searchpath"
_YAML = "give a YAML file with one mapping of options, such as `trainer: {seed: 2}`"
_PLAIN_VALUE = "set the option to a number, a text, a list or a mapping, such as trainer.seed=2"


@dataclass(frozen=True, slots=True)
class Assignment:
    """Set `key` to `value`, or delete it.

    `origin` names the source in error messages. `line` is the line of a file that sets the key, 0
    if it is unknown, and None if the source is no file.

    `in_file` is true if the source is a file or a mapping, and false for the command line.
    `interpolated` is true if `value` was an interpolation.
    """

    key: str
    value: Any
    origin: str
    delete: bool = False
    line: int | None = None
    in_file: bool = False
    interpolated: bool = False


class Places:
    """Where a YAML file sets which keys, for error messages."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = "" if file is None else shown_path(file)
        self._lines: dict[str, int] = {}

    def note(self, assignment: Assignment, *keys: str) -> None:
        """Record that an assignment sets `keys`. A later source that is no file forgets them."""
        for key in keys:
            if assignment.line is None or not self._file:
                self._lines.pop(key, None)
            else:
                self._lines[key] = assignment.line

    def added(self, text: str, *keys: str) -> str:
        """Return a message with the places of the keys that it names, and of `keys`."""
        if not self._file or self._file in text:
            return text
        named = [*keys, *(key.rstrip(".") for key in _KEY_IN_TEXT.findall(text))]
        found = [key for key in dict.fromkeys(named) if key in self._lines][:_MOST_PLACES]
        if not found:
            return text
        places = ", ".join(
            f"{shown_path(key)} in line {self._lines[key]}" if self._lines[key] else shown_path(key)
            for key in found
        )
        return f"{text} ({self._file} sets {places})"


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
    try:
        return bool(key) and any((directory / key).is_dir() for directory in directories)
    except OSError:  # such as a key that is too long for a file name
        return False


def parse_overrides(overrides: Sequence[str]) -> list[Override]:
    """Parse override strings with Hydra's grammar.

    Raises ConfigError if a string is not an override. The message contains the string.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    parsed: list[Override] = []
    for text in overrides:
        name = shown(text, _SHOWN_OF_OVERRIDE)
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"{name} is not an override; write key=value, such as trainer.seed=2")
        if len(text.partition("=")[0]) > _LONGEST_KEY:
            raise ConfigError(f"override {name}: there is no option with such a long name")
        with reading(f"override {name} cannot be read", ConfigError, _PLAIN_VALUE):
            try:
                parsed.append(parser.parse_override(_quoted(text)))
            except HydraException as error:
                why = reason(error).removeprefix(f"{type(error).__name__}: ")
                raise ConfigError(
                    f"override {name} cannot be read: {why}; put a value with special characters "
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


def override_assignments(parsed: Sequence[Override], *, verl: bool = False) -> Iterator[Assignment]:
    """Yield the assignments of parsed overrides, one for each key that they set.

    With `verl`, an override may select a file of VERL's config groups, which sets nothing here.
    Raises ConfigError if an override is a sweep over several values.
    """
    for override in parsed:
        key = override.key_or_group.replace("/", ".")
        if not key:
            raise ConfigError(
                f"override {shown(override.input_line)} names no option; write key=value, such as "
                "trainer.seed=2"
            )
        text = override.input_line or key
        if override.is_sweep_override():
            raise ConfigError(
                f"override {text!r} is a sweep over several values, but a run needs one value; "
                f"to set a list, write {key}=[a,b]"
            )
        if override.package is not None and verl and override.key_or_group in GROUPS:
            yield Assignment(f"{key}@{override.package}", override.value(), text)
            continue
        if override.package is not None:
            raise ConfigError(
                f"override {shown(text, _SHOWN_OF_OVERRIDE)} names the package "
                f"{shown(override.package)}, which only a config group has; write {key}=VALUE"
            )
        if override.is_delete():
            yield Assignment(key, None, text, delete=True)
        else:
            name = shown(text, _SHOWN_OF_OVERRIDE)
            with reading(f"override {name} cannot be read", ConfigError, _PLAIN_VALUE):
                assignments = list(flatten(key, override.value(), text))
            yield from assignments


def flatten(key: str, value: Any, origin: str) -> Iterator[Assignment]:
    """Yield one assignment per leaf of `value`. A free-form mapping is a single assignment.

    So is an empty mapping, unless `key` is a section.
    """
    option = options().get(key)
    free_form = option is not None and option.free_form
    if isinstance(value, Mapping) and not free_form and (value or _has_keys_below(key)):
        for name, item in value.items():
            yield from flatten(f"{key}.{name}" if key else str(name), item, origin)
        return
    yield Assignment(key, value, origin)


def _has_keys_below(key: str) -> bool:
    """Return whether an option, or a key that is accepted for VERL, is inside `key`."""
    return not key or any(other.startswith(f"{key}.") for other in (*options(), *aliases.KEYS))


def file_assignments(
    path: Path, parsed: Sequence[Override]
) -> tuple[list[Assignment], list[Override]]:
    """Return the assignments of a YAML file, and the overrides that still must be applied.

    Hydra composes the file if it has a `defaults` list. Overrides that select a file of a config
    group next to `path` are part of the composition; the others are returned.

    Raises ConfigError if the file is missing, is not a YAML mapping, or cannot be composed.
    """
    name = shown_path(path)
    if not _is_file(path):
        raise ConfigError(f"config file {name} does not exist; check --config or --config-path")
    with reading(path, ConfigError, _YAML, noun="config file "):
        return _read_file(path, parsed)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # such as a name that is too long
        return False


def _read_file(path: Path, parsed: Sequence[Override]) -> tuple[list[Assignment], list[Override]]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    groups = [o for o in parsed if _is_group(o.key_or_group, (path.parent, RECIPES))]
    paths = [o for o in parsed if o.key_or_group == _SEARCH_PATH]
    rest = [o for o in parsed if o not in (*groups, *paths)]
    try:
        _check_size(path)
        content = OmegaConf.load(path)
    except (OmegaConfBaseException, OSError, UnicodeDecodeError, _yaml_error()) as error:
        raise ConfigError(f"config file {path} cannot be read: {error}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"config file {path} must contain a mapping of options, not a list")
    if "defaults" in content or groups:
        own = OmegaConf.select(content, _SEARCH_PATH) or []
        content = _compose(path, groups, [*own, *_listed(paths)])
    _check_joined(path)
    plain = OmegaConf.to_container(content, resolve=False)
    assert isinstance(plain, dict)
    plain.pop("hydra", None)
    lines = _lines(path)
    assignments = flatten("", plain, path.name)
    return [replace(one, line=lines.get(one.key, 0)) for one in assignments], rest


def _check_size(path: Path) -> None:
    """Raise ConfigError if the file holds more values than settings ever have.

    A YAML alias repeats a whole part of the file, so that a few lines can stand for values without
    end. They are counted before they are built.
    """
    import yaml

    if path.stat().st_size > _MOST_BYTES:
        raise ConfigError(
            f"config file {shown_path(path)} has more than {_MOST_BYTES:,} bytes; give a file with "
            "settings"
        )
    counted: dict[int, int] = {}

    def count(node: Any) -> int:
        if id(node) not in counted:
            # A part that contains itself has no end.
            counted[id(node)] = _MOST_NODES + 1
            parts = (
                [part for item in node.value for part in item]
                if isinstance(node, yaml.MappingNode)
                else node.value
                if isinstance(node, yaml.SequenceNode)
                else ()
            )
            counted[id(node)] = 1 + sum(count(part) for part in parts)
        return counted[id(node)]

    root = yaml.compose(path.read_text(encoding="utf-8"))
    if root is not None and count(root) > _MOST_NODES:
        raise ConfigError(
            f"config file {shown_path(path)} stands for more than {_MOST_NODES:,} values; remove "
            "the aliases (*name) that repeat parts of it"
        )


def _lines(path: Path) -> dict[str, int]:
    """Return the line, from 1, of each dotted key of a YAML file."""
    import yaml

    found: dict[str, int] = {}
    left: list[tuple[str, Any]] = [("", yaml.compose(path.read_text(encoding="utf-8")))]
    while left:
        prefix, node = left.pop()
        if not isinstance(node, yaml.MappingNode):
            continue
        for name, value in node.value:
            merged = name.value == "<<"
            key = prefix if merged else f"{prefix}.{name.value}" if prefix else str(name.value)
            found.setdefault(key, name.start_mark.line + 1)
            left.append((key, value))
    return found


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


def _listed(overrides: Sequence[Override]) -> list[str]:
    """Return the folders that overrides of Hydra's search path name."""
    values = [override.value() for override in overrides]
    return [str(one) for value in values for one in (value if isinstance(value, list) else [value])]


def _compose(path: Path, groups: Sequence[Override], search_path: Sequence[str]) -> Any:
    """Return the composition of one file by Hydra.

    Its `defaults` can name files in `search_path`, built-in recipes, and files of VERL.
    """
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with bases_folder() as bases, warnings.catch_warnings():
            # Without `_self_` in `defaults`, the settings of the file override its defaults.
            warnings.filterwarnings("ignore", message=".*missing `_self_`.*")
            # A folder of VERL, whose names are known without it.
            warnings.filterwarnings("ignore", message=".*searchpath.*is not available")
            folders = (*search_path, f"file://{RECIPES}", f"file://{bases}")
            quoted = ",".join("'" + folder.replace("'", r"\'") + "'" for folder in folders)
            overrides = [f"{_SEARCH_PATH}=[{quoted}]", *(o.input_line or "" for o in groups)]
            with initialize_config_dir(version_base="1.3", config_dir=str(path.parent.resolve())):
                return compose(path.stem, overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"config file {path} cannot be composed: {error}") from error
