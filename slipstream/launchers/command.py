"""Runs a command that trains: it prints the settings, makes a dry run, or trains.

`slipstream.cli` and the launchers for command lines of VERL and FastRL use it, because they may not
import each other. Training is `run.train.train`, and `--dry-run` is `preflight.dry_run`. Both are
imported once the settings have been checked.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.config.launch import (
    add_dry_run_flag,
    add_source_flags,
    config_from,
    exit_status,
    parser,
    print_settings,
    read_overrides,
)
from slipstream.config.mode import resolve_mode
from slipstream.config.schema import Config
from slipstream.heap import without_garbage_collector
from slipstream.metrics.timeline import mark_command_start


def add_train_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags that `start` and `config_from` read."""
    add_source_flags(command)
    add_dry_run_flag(command)


def start(config: Config, args: argparse.Namespace) -> int:
    """Print the settings (`--cfg`), make a dry run (`--dry-run`), or train. Returns the status."""
    if args.cfg:
        print_settings(config)
        return 0
    mode = resolve_mode(config)
    if args.dry_run:
        with without_garbage_collector():
            from slipstream.preflight.dry_run import dry_run

        return dry_run(config, mode)
    with without_garbage_collector():
        from slipstream.run.train import train

    return train(config, mode)


def launch(
    argv: Sequence[str] | None,
    *,
    prog: str,
    system: str,
    example: str,
    read: Callable[[argparse.Namespace, Sequence[str]], Config],
) -> int:
    """Run a command line of another system: Hydra's flags, and overrides with its keys.

    `read` returns the configuration for parsed flags and overrides. Returns the exit status.
    """
    mark_command_start()
    command = parser(
        prog,
        f"Train with a command line of {system}. Keys without effect are accepted with a notice. "
        "Features that Slipstream does not have are errors with a remedy.",
        f"example:\n  {prog} {example}\n",
        f"{prog} [--config-path DIR --config-name NAME] [--cfg job] [--dry-run] [key=value ...]",
    )
    add_train_flags(command)
    args, rest = command.parse_known_args(argv)
    overrides = read_overrides(command, rest)
    return exit_status(lambda: start(read(args, overrides), args), debug=args.debug)


def launch_rl(
    argv: Sequence[str] | None, *, prog: str, system: str, defaults: Mapping[str, Any]
) -> int:
    """Run a command line of an RL trainer of `system` (default: `sys.argv`).

    `defaults` holds important defaults of that system that differ from ours. A notice lists those
    that the command line does not set. Returns the exit status.
    """
    return launch(
        argv,
        prog=prog,
        system=system,
        example="data.task=countdown trainer.total_training_steps=10 \\\n"
        "      actor_rollout_ref.model.init.num_layers=2",
        read=lambda args, overrides: config_from(
            args, overrides, verl=True, defaults=(system, defaults)
        ),
    )
