"""Takes the launch lines of VERL's SFT trainers, for `sft_trainer` and `fsdp_sft_trainer`.

They also run under `torchrun`: its first process starts the others itself, and the other processes
of torchrun end at once. `config.verl_sft` translates the keys. Training is `run.train.train`, as in
`slipstream sft`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.config.interpolate import resolve_in_sources
from slipstream.config.launch import (
    add_dry_run_flag,
    add_source_flags,
    exit_status,
    note,
    parser,
    print_settings,
    read_overrides,
    source_of,
)
from slipstream.config.load import load_config
from slipstream.config.mode import Mode, resolve_mode
from slipstream.config.schema import Config
from slipstream.config.sources import (
    file_assignments,
    override_assignments,
    parse_overrides,
    recipe_file,
)
from slipstream.config.verl_sft import SftLine, is_sft_default, translate
from slipstream.data.rows import count_rows

_TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
"""Variables that torchrun sets. The processes of the run get others."""


def _config(args: Any, overrides: Sequence[str], prog: str, defaults: Mapping[str, Any]) -> Config:
    """Return the configuration of a line. Raises ConfigError with all problems."""
    recipe, named = source_of(args)
    source = recipe_file(recipe or "default") if named is None else named
    from_file, parsed = file_assignments(source, parse_overrides(overrides))
    in_file = [replace(one, in_file=True) for one in from_file]
    assignments = [*in_file, *override_assignments(parsed, verl=True)]
    line = translate(resolve_in_sources(assignments), is_sft_default)
    line.values["trainer.mode"] = "sft"
    line.values.update(_processes(line, prog))
    line.values.update(_steps(line))
    for text in line.notices.lines():
        note(text)
    # The data of the line are those of SFT, whatever RL would need.
    return load_config(
        values=line.values,
        notify=note,
        verl=True,
        rules=lambda config: line.problems,
        defaults=("VERL", defaults),
    )


def _processes(line: SftLine, prog: str) -> dict[str, Any]:
    """Return the number of processes that torchrun asks for, and remove its variables."""
    if "LOCAL_RANK" not in os.environ:
        return {}
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for name in _TORCHRUN:
        os.environ.pop(name, None)
    if world > local:
        line.problems.append(
            f"torchrun --nnodes={world // local} is not supported; start Ray on all machines "
            f"(docs/several_gpus.md), and run `{prog} trainer.nnodes={world // local} "
            f"trainer.n_gpus_per_node={local} ...` on one of them"
        )
    if world == 1:
        line.values.pop("trainer.n_gpus_per_node", None)
        return {"trainer.nnodes": 1}
    return {"trainer.nnodes": 1, "trainer.n_gpus_per_node": local}


def _steps(line: SftLine) -> dict[str, Any]:
    """Return the numbers of steps that follow from the number of rows."""
    values, epochs = line.values, line.epochs
    batch, files = values["sft.train_batch_size"], values.get("sft.train_files")
    if files is None:
        line.problems.append("data.train_files is not set; set data.train_files=FILE")
    if files is None or not isinstance(batch, int) or batch < 1:
        return {}
    if not isinstance(epochs, int) or isinstance(epochs, bool) or epochs < 1:
        line.problems.append(f"trainer.total_epochs={epochs}: set it to a number of at least 1")
        return {}
    given = values.get("sft.total_training_steps")
    if given is not None and not line.save_each_epoch:
        return {}
    rows = count_rows(files)
    most = values.get("sft.train_max_samples", -1)
    rows = min(rows, most) if isinstance(most, int) and most > 0 else rows
    each = rows // batch
    if each == 0:
        line.problems.append(
            f"data.train_batch_size={batch} is above the {rows} rows of data.train_files; set "
            f"data.train_batch_size={rows} or less"
        )
        return {}
    steps = {"sft.total_training_steps": each * epochs} if given is None else {}
    return steps | ({"sft.save_freq": each} if line.save_each_epoch else {})


def launch_sft(
    argv: Sequence[str] | None,
    *,
    prog: str,
    defaults: Mapping[str, Any],
    train: Callable[[Config, Mode], int],
    dry_run: Callable[[Config, Mode], int],
) -> int:
    """Run one launch line (default: `sys.argv`) and return the exit code.

    `defaults` are those of VERL that differ from ours and that a notice lists.
    """
    if int(os.environ.get("RANK", "0")) > 0:
        return 0  # the first process of torchrun starts all processes of the run
    command = parser(
        prog,
        "Train with a command line of VERL's SFT. Keys without effect are accepted with a notice. "
        "Features that Slipstream does not have are errors with a remedy.",
        f"example:\n  {prog} data.train_files=train.parquet data.train_batch_size=32 \\\n"
        "      model.path=models/Qwen2.5-0.5B trainer.total_epochs=1\n",
        f"{prog} [--config-path DIR --config-name NAME] [--cfg job] [--dry-run] [key=value ...]",
    )
    add_source_flags(command)
    add_dry_run_flag(command)
    args, rest = command.parse_known_args(argv)
    overrides = read_overrides(command, rest)

    def run() -> int:
        config = _config(args, overrides, prog, defaults)
        if args.cfg:
            print_settings(config)
            return 0
        work = dry_run if args.dry_run else train
        return work(config, resolve_mode(config))

    return exit_status(run, debug=args.debug)
