"""Shared parts of all commands: flags for the source of settings, error output and exit codes.

`slipstream.cli`, `slipstream.launchers` and `slipstream.bench` use it. It does not know what a
command does.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from slipstream.config.bases import BASES
from slipstream.config.load import load_config, to_yaml
from slipstream.config.mode import resolve_mode
from slipstream.config.notices import Warned
from slipstream.config.schema import Config
from slipstream.config.sources import Places, recipe_names
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.reading import reason, shown, shown_path

EXIT_CODES = """\
exit codes:
  0  done                     5  an inference engine failed
  1  another error            6  a reward function failed
  2  settings or usage        7  training cannot go on
  3  data or tokenizer        8  a stage ran past its deadline
  4  checkpoint or run folder 130  interrupted (Ctrl-C)
"""

INTERRUPTED = 130

_PLACES: ContextVar[Places] = ContextVar("_PLACES", default=Places())  # noqa: B039
"""The lines that set the options of the running command."""


def parser(prog: str, description: str, epilog: str, usage: str) -> argparse.ArgumentParser:
    """Return an argument parser whose help ends with `epilog` (examples) and the exit codes.

    The help keeps the line breaks of `epilog`.
    """
    return argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=f"{epilog}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_source_flags(command: argparse.ArgumentParser, *, show_flag: bool = True) -> None:
    """Add the flags that select the source of settings, and `--debug`."""
    group = command.add_argument_group(
        "settings", "set an option with key=value; `slipstream config` lists all options"
    )
    group.add_argument(
        "--recipe", metavar="NAME", help=f"built-in settings: one of {', '.join(recipe_names())}"
    )
    group.add_argument("--config", metavar="FILE", type=Path, help="your own settings in YAML")
    group.add_argument(
        "--config-path",
        "-cp",
        "--config-dir",
        "-cd",
        metavar="DIR",
        type=Path,
        help="folder with the --config-name file",
    )
    group.add_argument(
        "--config-name",
        "-cn",
        metavar="NAME",
        help="settings file in --config-path; without --config-path, a recipe",
    )
    if show_flag:
        group.add_argument(
            "--cfg", "-c", choices=["job"], help="print the settings as YAML and exit"
        )
        group.add_argument(
            "--resolve",
            action="store_true",
            help="accepted for Hydra; --cfg always resolves interpolations",
        )
    add_debug_flag(command)


def add_dry_run_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="check the settings; print them with batch sizes and a memory estimate; run one tiny "
        "step, and delete its files",
    )


def add_debug_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument("--debug", action="store_true", help="show a traceback with an error")


def positive(text: str) -> int:
    """Convert a flag's value to an integer of at least 1.

    Raises ArgumentTypeError for other values.
    """
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not an integer of at least 1")
    return int(text)


def port(text: str) -> int:
    """Convert a flag's value to a port. Raises ArgumentTypeError for other values."""
    if not re.fullmatch(r"[0-9]{1,5}", text) or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a port from 1 to 65535")
    return int(text)


def read_overrides(command: argparse.ArgumentParser, rest: Sequence[str]) -> list[str]:
    """Return the arguments that are not flags, as overrides. Exit with status 2 if there are
    unknown flags."""
    unknown = [text for text in rest if text.startswith("-")]
    if unknown:
        command.error(f"unknown argument {unknown[0]}; write settings as key=value")
    return list(rest)


def note(text: str) -> None:
    print(f"{'WARNING' if isinstance(text, Warned) else 'note'}: {text}", file=sys.stderr)


def source_of(args: argparse.Namespace) -> tuple[str | None, Path | None]:
    """Return the recipe and the file that the flags name; at least one of them is None."""
    flags = {"--recipe": args.recipe, "--config": args.config, "--config-name": args.config_name}
    present = [flag for flag, value in flags.items() if value is not None]
    if len(present) > 1:
        raise ConfigError(
            f"{' and '.join(present)} cannot be combined, because each selects the settings to "
            "start from; pass only one of them"
        )
    name = None if args.config_name is None else args.config_name.removesuffix(".yaml")
    if args.config_path is not None:
        if args.config_name is None:
            raise ConfigError(
                f"--config-path {args.config_path} needs a file name; add --config-name NAME"
            )
        file: Path = args.config_path / f"{name}.yaml"
        if name not in BASES or file.is_file():
            return None, file
    if name in BASES:
        note(f"--config-name {args.config_name} selects --recipe default")
        return "default", None
    return args.recipe or args.config_name, args.config


def config_from(
    args: argparse.Namespace,
    overrides: Sequence[str],
    *,
    file: Path | None = None,
    complete: bool = True,
    verl: bool = False,
    defaults: tuple[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Return the configuration for parsed flags and overrides.

    If the flags name no source, `file` is the source. Notices are printed to standard error. With
    `verl`, the settings are written for VERL or FastRL, and must ask for a training. `defaults` is
    as in `load_config`. Raises ConfigError like it.
    """
    recipe, named = source_of(args)
    if recipe is None and named is None:
        named = file
    places = Places(named)
    config = load_config(
        overrides,
        recipe=recipe,
        file=named,
        notify=note,
        complete=complete,
        verl=verl,
        rules=_mode_problems if verl else None,
        defaults=defaults,
        places=places,
    )
    _PLACES.set(places)
    return config


def _mode_problems(config: Config) -> Iterator[str]:
    try:
        resolve_mode(config)
    except ConfigError as error:
        yield str(error)


def program() -> str:
    """Return a command that starts this installation's `slipstream` from the current folder.

    It is "slipstream" if that is on PATH, else the path of the program.
    """
    installed = Path(sys.executable).with_name("slipstream")
    if shutil.which("slipstream") is not None or not installed.exists():
        return "slipstream"
    current = Path.cwd()
    return str(installed.relative_to(current) if installed.is_relative_to(current) else installed)


def print_settings(config: Config) -> None:
    """Print the resolved tree as YAML that `--config` can read.

    Uses only ASCII if the encoding of standard output lacks other characters.
    """
    text = to_yaml(config)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        import yaml

        text = yaml.safe_dump(yaml.safe_load(text), sort_keys=False)
    print(text, end="")


def exit_status(call: Callable[[], int], *, debug: bool) -> int:
    """Run a command and return its exit status.

    Prints an error of Slipstream as one line on standard error, with a traceback if `debug`.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # Characters that the terminal's encoding lacks are escaped, as on standard error. Else
        # printing such a name would end the command with an error.
        sys.stdout.reconfigure(errors="backslashreplace")
    _PLACES.set(Places())
    try:
        status = call()
        sys.stdout.flush()
        return status
    except SlipstreamError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {_PLACES.get().added(str(error))}", file=sys.stderr)
        return error.exit_code
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        # No command ends so. A user's code did, and its caller must not take that for success.
        if debug:
            traceback.print_exc()
        print(
            "error: code that this command imported or called ended it with sys.exit() before it "
            "was done; remove that call (--debug shows where)",
            file=sys.stderr,
        )
        return SlipstreamError.exit_code
    except BrokenPipeError:
        # The reader (such as `| head`) has closed the pipe. Python flushes standard output at exit,
        # which would raise the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        # A file that the command line or a setting names cannot be read or written. Other errors of
        # the operating system have no file name; they are mistakes of the program.
        if not isinstance(error.filename, str) or debug:
            raise
        print(
            f"error: {shown_path(error.filename)}: {reason(error)}; check the path and "
            "its permissions (--debug shows where)",
            file=sys.stderr,
        )
        return SlipstreamError.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
