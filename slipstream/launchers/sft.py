"""Takes the launch lines of VERL's SFT trainers, for `sft_trainer` and `fsdp_sft_trainer`.

They also run under `torchrun`: its first process starts the others itself, and the other processes
of torchrun end at once. `config.verl_sft` translates the keys.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.config.interpolate import resolve_in_sources
from slipstream.config.launch import note, source_of
from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.config.sources import (
    file_assignments,
    override_assignments,
    parse_overrides,
    recipe_file,
)
from slipstream.config.tree import is_count, show
from slipstream.config.verl_sft import SftLine, translate
from slipstream.launchers.command import launch

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


def _config(
    args: Namespace, overrides: Sequence[str], prog: str, defaults: Mapping[str, Any]
) -> Config:
    """Return the configuration of a line. Raises ConfigError with all problems."""
    recipe, named = source_of(args)
    source = recipe_file(recipe or "default") if named is None else named
    from_file, parsed = file_assignments(source, parse_overrides(overrides))
    in_file = [replace(one, in_file=True) for one in from_file]
    assignments = [*in_file, *override_assignments(parsed, verl=True)]
    line = translate(resolve_in_sources(assignments))
    line.values["trainer.mode"] = "sft"
    line.values.update(_processes(line, prog))
    line.values.update(_steps(line))
    for text in line.notices.lines():
        note(text)
    return load_config(
        values=line.values,
        notify=note,
        verl=True,
        rules=lambda config: line.problems,
        defaults=("VERL", defaults),
    )


def _under_torchrun() -> bool:
    # Some clusters set RANK, too, for the number of the machine.
    return "LOCAL_RANK" in os.environ


def _processes(line: SftLine, prog: str) -> dict[str, Any]:
    """Return the number of processes that torchrun asks for, and remove its variables."""
    if not _under_torchrun():
        return {}
    given = {name: os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    for name in _TORCHRUN:
        os.environ.pop(name, None)
    for name, text in given.items():
        if not (text.isdecimal() and int(text)):
            line.problems.append(
                f"the environment variable {name}={text} is not a number of processes; start the "
                "command with torchrun, or unset LOCAL_RANK"
            )
            return {}
    world, local = map(int, given.values())
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
    from slipstream.data.rows import count_rows  # imports pyarrow, which --help does not need

    values, epochs = line.values, line.epochs
    batch, files = values["sft.train_batch_size"], values.get("sft.train_files")
    given = values.get("sft.total_training_steps")
    counted = given is None or line.save_each_epoch
    if not files:
        line.problems.append("data.train_files is not set; set data.train_files=FILE")
    if batch is None and counted:
        line.problems.append("data.train_batch_size=null: set it to a number of at least 1")
    if not is_count(epochs):
        line.problems.append(
            f"trainer.total_epochs={show(epochs)}: set it to a number of at least 1"
        )
    if not counted or not files or not is_count(batch) or not is_count(epochs):
        return {}
    rows = count_rows(files)
    most = values.get("sft.train_max_samples", -1)
    rows = min(rows, most) if is_count(most) else rows
    each = rows // batch
    if rows == 0:
        line.problems.append("data.train_files has no rows; set data.train_files=FILE")
        return {}
    if each == 0:
        line.problems.append(
            f"data.train_batch_size={batch} is above the {rows} rows of data.train_files; set "
            f"data.train_batch_size={rows} or less"
        )
        return {}
    steps = {"sft.total_training_steps": each * epochs} if given is None else {}
    return steps | ({"sft.save_freq": each} if line.save_each_epoch else {})


def launch_sft(argv: Sequence[str] | None, *, prog: str, defaults: Mapping[str, Any]) -> int:
    """Run one launch line (default: `sys.argv`) and return the exit code.

    `defaults` are those of VERL that differ from ours and that a notice lists.
    """
    if _under_torchrun() and int(os.environ.get("RANK", "0")) > 0:
        return 0  # the first process of torchrun starts all processes of the run
    return launch(
        argv,
        prog=prog,
        system="VERL's SFT",
        example="data.train_files=train.parquet data.train_batch_size=32 \\\n"
        "      model.path=models/Qwen2.5-0.5B trainer.total_epochs=1",
        read=lambda args, overrides: _config(args, overrides, prog, defaults),
    )
