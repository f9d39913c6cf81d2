"""The part of a launch line that every command reads alike: where settings come from, and errors.

Knows flags, Hydra's among them, and exit codes; not what a command does. Shared by `slipstream.cli`
and by the launchers that take VERL's and FastRL's command lines, which may not import each other.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.config.load import load_config, to_yaml
from slipstream.config.mode import Mode, resolve_mode
from slipstream.config.schema import Config
from slipstream.config.sources import recipe_names
from slipstream.config.tree import options, show, to_dict
from slipstream.errors import ConfigError, SlipstreamError

FOREIGN_RECIPES = ("ppo_trainer", "fastrl_trainer")
"""Config names of VERL and FastRL for what is the recipe `default` here."""

EXIT_CODES = """\
exit codes:
  0  done                     5  an inference engine failed
  1  another error            6  a reward function failed
  2  settings or usage        7  training cannot go on
  3  data or tokenizer        8  a stage ran past its deadline
  4  checkpoint or run folder 130  interrupted (Ctrl-C)
"""

INTERRUPTED = 130


def parser(prog: str, description: str, epilog: str, usage: str) -> argparse.ArgumentParser:
    """An argument parser that shows `epilog` (examples) and the exit codes as they are laid out."""
    return argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=f"{epilog}\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_source_flags(command: argparse.ArgumentParser, *, show_flag: bool = True) -> None:
    """The flags that say where settings come from, and `--debug`."""
    group = command.add_argument_group(
        "settings", "key=value changes an option; `slipstream config` lists them"
    )
    group.add_argument("--recipe", metavar="NAME", help=f"one of {', '.join(recipe_names())}")
    group.add_argument("--config", metavar="FILE", type=Path, help="a YAML file of your own")
    group.add_argument(
        "--config-path", "-cp", metavar="DIR", type=Path, help="folder of --config-name"
    )
    group.add_argument(
        "--config-name", "-cn", metavar="NAME", help="file in --config-path, else a recipe"
    )
    if show_flag:
        group.add_argument(
            "--cfg", "-c", choices=["job"], help="print the settings as YAML and do nothing else"
        )
        group.add_argument(
            "--resolve", action="store_true", help="with --cfg: always the case, taken for Hydra"
        )
    add_debug_flag(command)


def add_dry_run_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="print the settings, what batches they make and how much memory that takes, try one "
        "tiny step, and leave nothing behind",
    )


def add_debug_flag(command: argparse.ArgumentParser) -> None:
    command.add_argument("--debug", action="store_true", help="show a traceback with an error")


def positive(text: str) -> int:
    """A flag's value as a whole number of at least 1."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def read_overrides(command: argparse.ArgumentParser, rest: Sequence[str]) -> list[str]:
    """What is left of a line after its flags: overrides. An unknown flag ends the program (2)."""
    unknown = [text for text in rest if text.startswith("-")]
    if unknown:
        command.error(f"unknown argument {unknown[0]}; settings are written key=value")
    return list(rest)


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _source(args: argparse.Namespace) -> tuple[str | None, Path | None]:
    """Recipe and file that the flags name; at most one of them."""
    flags = {"--recipe": args.recipe, "--config": args.config, "--config-name": args.config_name}
    given = [flag for flag, value in flags.items() if value is not None]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} each name the settings to start from; give one")
    if args.config_path is not None:
        if args.config_name is None:
            raise ConfigError("--config-path needs the file's name; add --config-name NAME")
        folder: Path = args.config_path
        return None, folder / f"{args.config_name.removesuffix('.yaml')}.yaml"
    if args.config_name in FOREIGN_RECIPES:
        note(f"--config-name {args.config_name} is taken as --recipe default")
        return "default", None
    return args.recipe or args.config_name, args.config


def config_from(
    args: argparse.Namespace,
    overrides: Sequence[str],
    *,
    file: Path | None = None,
    complete: bool = True,
) -> Config:
    """The configuration that parsed flags and overrides ask for.

    `file` is used where the flags name no source. Notices go to standard error.

    Raises:
        ConfigError: see `load_config`.
    """
    recipe, named = _source(args)
    if recipe is None and named is None:
        named = file
    return load_config(overrides, recipe=recipe, file=named, notify=note, complete=complete)


def program() -> str:
    """How this installation's `slipstream` is called from here: by its name where that finds it."""
    beside = Path(sys.executable).with_name("slipstream")
    if shutil.which("slipstream") is not None or not beside.exists():
        return "slipstream"
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def print_settings(config: Config) -> None:
    """The resolved tree on standard output, to be read back; in ASCII where that has no more."""
    text = to_yaml(config)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        import yaml

        text = yaml.safe_dump(yaml.safe_load(text), sort_keys=False)
    print(text, end="")


def exit_status(call: Callable[[], int], *, debug: bool) -> int:
    """Run a command and turn its errors into one line on standard error and an exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # A name that the terminal's encoding lacks is escaped, as on standard error, and ends no
        # command.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = call()
        sys.stdout.flush()
        return status
    except SlipstreamError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has what it wants; the interpreter must not flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def launch_training(
    argv: Sequence[str] | None,
    *,
    prog: str,
    system: str,
    system_defaults: Mapping[str, Any],
    train: Callable[[Config, Mode], int],
    dry_run: Callable[[Config, Mode], int],
) -> int:
    """Run the launch line of another system: Hydra's flags, and overrides of its keys.

    `system_defaults` are defaults of that system that matter and differ from ours: where the line
    leaves one open, a notice says what it is here.
    """
    command = parser(
        prog,
        f"Train from a {system} launch line. Keys that mean nothing here are accepted with a "
        "notice; features that are not here are refused with a remedy.",
        f"example:\n  {prog} data.task=countdown trainer.total_training_steps=10 \\\n"
        "      actor_rollout_ref.model.init.num_layers=2\n",
        f"{prog} [--config-path DIR --config-name NAME] [--cfg job] [--dry-run] [key=value ...]",
    )
    add_source_flags(command)
    add_dry_run_flag(command)
    args, rest = command.parse_known_args(argv)
    overrides = read_overrides(command, rest)

    def run() -> int:
        config = config_from(args, overrides)
        _note_defaults(config, overrides, system, system_defaults)
        if args.cfg:
            print_settings(config)
            return 0
        work = dry_run if args.dry_run else train
        return work(config, resolve_mode(config))

    return exit_status(run, debug=args.debug)


def _note_defaults(
    config: Config, overrides: Sequence[str], system: str, system_defaults: Mapping[str, Any]
) -> None:
    given = {text.lstrip("+").partition("=")[0] for text in overrides}
    left_open: list[str] = []
    for key, theirs in system_defaults.items():
        ours: Any = to_dict(config)
        for part in key.split("."):
            ours = ours[part]
        if key not in given and ours == options()[key].default and ours != theirs:
            left_open.append(f"{key}={show(ours)} (there {show(theirs)})")
    if left_open:
        note(f"defaults that differ from {system}'s: {', '.join(left_open)}")
