"""What `slipstream train` calls: from a configuration to a run folder.

<default_local_dir>/
  config.yaml            the resolved configuration
  metrics.jsonl          RL, a line per step;  sft/metrics.jsonl for SFT
  rollouts/N.jsonl       the samples of step N;  validation/ those of validations
  global_step_N/         checkpoints of RL;  sft/global_step_N of SFT
  run.png                reward, accuracy, lengths
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from slipstream.build.data import GivenParts
from slipstream.build.engine import rollout_dtype
from slipstream.build.limits import check_budgets, check_demonstrations
from slipstream.build.policy import device_of, initial_policy, model_config, thread_count
from slipstream.build.process import import_external, set_threads
from slipstream.build.team import open_team
from slipstream.build.thread_count import FEW, threads_for
from slipstream.checkpoint.interrupt import GracefulInterrupt
from slipstream.checkpoint.layout import policy_folder
from slipstream.config.launch import INTERRUPTED, program
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.deadlines import Deadlines, close_parts, end_process, frozen_interpreter_ends
from slipstream.errors import ConfigError, DataError, StageTimeoutError
from slipstream.kernels.compiling import kept_files
from slipstream.metrics.loggers import METRICS_FILE, check_loggers
from slipstream.metrics.machine import this_machine
from slipstream.metrics.picture import plot_run
from slipstream.metrics.progress import Progress, SteadyConsole
from slipstream.metrics.timeline import EVENTS_FILE, Timeline, command_began
from slipstream.models.config import ModelConfig
from slipstream.models.hf_policy import HFPolicyConfig
from slipstream.models.numerics import dtype_from_name, rows_are_exact
from slipstream.models.policy import PolicyConfig
from slipstream.report.page import REPORT_FILE, write_report
from slipstream.run.context import Run, check_resumable, open_run
from slipstream.run.eval_export import evaluate, export
from slipstream.run.event_loop import run_async
from slipstream.run.folder import PICTURE, claim_folder, locked
from slipstream.run.phases import (
    check_rl,
    result_of_sft,
    rl_phase,
    sft_phase,
    start_of_rl,
    validate_policy,
)
from slipstream.run.snapshot import computed_with
from slipstream.training.compute_thread import ComputeThread

__all__ = [
    "PICTURE",
    "Run",
    "claim_folder",
    "evaluate",
    "export",
    "open_run",
    "opened",
    "rl_phase",
    "sft_phase",
    "train",
]

FROZEN_SECONDS = 60.0
"""For so long at least Python may stand still: importing a large library takes seconds, too."""

FORCED_EXIT_SECONDS = 5.0
"""Seconds that a second Ctrl-C gives to a computation that cannot be cancelled."""


def train(config: Config, mode: Mode, parts: GivenParts | None = None) -> int:
    """Run SFT, RL, or one after the other; `parts` come before what the configuration names.
    Returns the exit status."""
    with opened(config, parts=parts) as run:
        announce(run, mode)
        finished = run_async(_train, run, mode)
    if config.trainer.val_only:
        return 0
    _conclude(run.folder, finished=finished)
    return 0 if finished else INTERRUPTED


def trial(config: Config, mode: Mode) -> bool:
    """As `train`, without the picture, the page and what is said at the end."""
    with opened(config) as run:
        announce(run, mode)
        return run_async(_train, run, mode)


@contextlib.contextmanager
def opened(
    config: Config, compute: ComputeThread | None = None, *, parts: GivenParts | None = None
) -> Iterator[Run]:
    """A run that holds its folder, watches deadlines and Ctrl-C, and shows its progress.

    `compute`, made where there is none, is closed at the end. The process ends where a thread never
    returns. Raises CheckpointError where the folder is another run's, ConfigError for loggers that
    could not work.
    """
    set_threads(config)
    import_external(config)
    folder = Path(config.trainer.default_local_dir)
    check_loggers(config.trainer.logger, folder)
    compute = compute or ComputeThread()
    forced = threading.Timer(FORCED_EXIT_SECONDS, end_process, ["interrupted", INTERRUPTED])
    forced.daemon = True

    def on_stuck(message: str) -> None:
        if forced.is_alive():
            end_process("interrupted", INTERRUPTED)
        end_process(f"error: {message}", StageTimeoutError.exit_code)

    deadlines = Deadlines(timeout_s=config.trainer.stage_timeout_s, on_stuck=on_stuck)
    interrupt = GracefulInterrupt(on_second=forced.start)
    progress = Progress(console=SteadyConsole(file=sys.stdout))
    frozen_after = max(FROZEN_SECONDS, config.trainer.stage_timeout_s + deadlines.grace_s)
    try:
        with locked(folder), frozen_interpreter_ends(frozen_after), progress, interrupt:
            claim_folder(folder, config, progress.note)
            try:
                with (
                    _timeline(config, interrupt) as timeline,
                    open_team(config, deadlines, compute, timeline) as team,
                ):
                    with timeline.span("setup"):
                        run = open_run(
                            *(config, folder, progress, interrupt, compute, deadlines),
                            *(parts, timeline, team),
                        )
                        _tell_of_compiling(run)
                        _settle_threads(run)
                    # A full collection would look through all modules again: a tenth of a second,
                    # in the middle of a rollout.
                    gc.freeze()
                    yield run
            finally:
                gc.unfreeze()
                close_parts(deadlines, compute)
    finally:
        forced.cancel()


@contextlib.contextmanager
def _timeline(config: Config, interrupt: GracefulInterrupt) -> Iterator[Timeline]:
    """The record of what this process does when, from its very beginning to the body's end."""
    timeline = Timeline(Path(config.trainer.default_local_dir) / EVENTS_FILE)
    machine = this_machine()
    timeline.start(
        command_began(),
        cwd=str(Path.cwd()),
        argv=[Path(sys.argv[0]).name, *sys.argv[1:]],
        environment={
            "cpu": machine.cpu,
            "cores": machine.cores,
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "system": machine.system,
            "device": device_name(device_of(config)),
            "threads": torch.get_num_threads(),
            **machine.versions,
            **computed_with(),
        },
    )
    status = "finished"
    try:
        yield timeline
        if interrupt.requested:
            status = "interrupted"
    except BaseException as error:
        status = f"{type(error).__name__}: {error}"
        raise
    finally:
        timeline.stop(status)


def device_name(device: torch.device) -> str:
    """`cpu`, or what the GPU is called."""
    return device.type if device.type != "cuda" else torch.cuda.get_device_name(device)


def _tell_of_compiling(run: Run) -> None:
    """Or the first step looks as if it hung."""
    if device_of(run.config).type == "cpu" and not any(kept_files()):
        run.progress.note(
            "nothing is compiled yet for this processor: kernels are, when first used, which takes "
            "a minute or two, once"
        )


def _settle_threads(run: Run) -> None:
    """Where cores are many and nobody has said how many threads: as many as are fast."""
    config, cores = run.config, torch.get_num_threads()
    if thread_count(config) is not None or cores <= FEW:
        return
    if device_of(config).type != "cpu":
        return
    policy = model_config(config, run.tokenizer, initial_policy(config))

    if not isinstance(policy, ModelConfig):
        return

    def settle() -> int:
        threads = threads_for(
            run.folder,
            policy,
            dtype=rollout_dtype(config),
            cores=cores,
            notify=run.progress.note,
        )
        torch.set_num_threads(threads)
        return threads

    # For both threads: each remembers what it has been told.
    torch.set_num_threads(run.compute.run(settle))


def announce(run: Run, mode: Mode) -> None:
    """Say once what will be computed, and how."""
    device = device_of(run.config)
    actor = run.config.actor_rollout_ref.actor
    data, rollout = run.config.data, run.config.actor_rollout_ref.rollout
    train_dtype = _short(dtype_from_name(actor.dtype, device))
    engine_dtype = _short(rollout_dtype(run.config))
    exact = (
        rollout.name == "embedded"
        and train_dtype == engine_dtype
        and rows_are_exact(rollout_dtype(run.config), device)
    )
    threads = torch.get_num_threads()
    note = run.progress.note
    note(
        f"{mode.replace('sft', 'SFT').replace('rl', 'RL').replace('+', ', then ')} on "
        f"{device.type} in {train_dtype}"
        + (f" (rollouts in {engine_dtype})" if train_dtype != engine_dtype else "")
        + f", {threads} thread{'s' if threads > 1 else ''}; engine {rollout.name}"
        + (", exact: rollout and trainer compute the same bits" if exact else "")
    )
    if mode != "sft":
        mini = actor.ppo_mini_batch_size or data.train_batch_size
        epochs = f", {actor.ppo_epochs} times over" if actor.ppo_epochs > 1 else ""
        note(
            f"an RL step: {data.train_batch_size} prompts x {rollout.n} responses of at most "
            f"{data.max_response_length} tokens; {mini} prompts per optimizer step{epochs}"
        )
    note(f"run folder: {run.folder}")


async def _train(run: Run, mode: Mode) -> bool:
    """The phases of `mode`; False if the run was stopped before its end."""
    phases = mode.split("+")
    with run.span("setup"):
        start = initial_policy(run.config)
        check_resumable(run, phases)
        check_validation(run)
    if run.config.trainer.val_only:
        await _validate_only(run, start)
        return True
    with run.span("setup"):
        policy = model_config(run.config, run.tokenizer, start)
        if isinstance(policy, HFPolicyConfig):
            run.progress.note(
                f"transformers computes the policy, a {policy.family}, without dropout; log-probs "
                "of rollout and trainer are equal up to rounding"
            )
        check_phases(run, mode, policy)
        rl_checkpoint = run.resume_folder("rl") if "rl" in phases else None
        if "sft" not in phases and start is None:
            start = result_of_sft(run)
    if "sft" in phases:
        if rl_checkpoint is not None:
            start = start_of_rl(run, rl_checkpoint)
        else:
            # RL begins with the same validation.
            again = "rl" in phases and run.config.trainer.val_before_train
            start = await sft_phase(run, validate_last=not again)
            if start is None:
                return False
    if "rl" not in phases:
        return True
    return not run.interrupt.requested and await rl_phase(run, start)


def check_phases(run: Run, mode: Mode, policy: PolicyConfig) -> None:
    """Refuse what would keep a phase from beginning: of RL before hours of SFT, not after them."""
    check_budgets(run.config, policy, mode)
    if "sft" in mode:
        check_demonstrations(run.config, policy)
    if "rl" in mode:
        # Not here: large operations of torch would start a second team of threads on this one,
        # which fights with that of the compute thread for the cores for the rest of the run.
        run.compute.run(lambda: check_rl(run, initial_policy(run.config)))


def check_validation(run: Run) -> None:
    """Without prompts nothing is validated: refused where nothing else is to be done, and told
    where it was asked for. Raises ConfigError."""
    trainer = run.config.trainer
    if run.held_out:
        return
    if trainer.val_only:
        raise ConfigError(
            "trainer.val_only=true has nothing to validate on; set data.val_files=FILE or "
            "data.task=countdown"
        )
    if trainer.test_freq > 0:
        run.progress.note(
            f"trainer.test_freq={trainer.test_freq} has no effect: there is nothing to validate "
            "on; set data.val_files=FILE"
        )


async def _validate_only(run: Run, start: Path | None) -> None:
    checkpoint = run.resume_folder("sft")
    if checkpoint is not None:
        start = policy_folder(checkpoint)
    await validate_policy(run, start)


def _conclude(folder: Path, *, finished: bool) -> None:
    """Draw the picture and say where things are."""
    logs = [folder / "sft" / METRICS_FILE, folder / METRICS_FILE]
    logs = [path for path in logs if path.exists() and path.stat().st_size > 0]
    if not finished:
        print(f"stopped; the same command goes on from the last checkpoint in {folder}")
    if logs:
        try:
            print(f"picture      {plot_run(logs, folder / PICTURE)}")
        except (OSError, DataError) as error:
            # The run is done; a full disk must not make it look failed, nor a log without curves.
            print(f"picture      none: {error}")
    for line in draw_report(folder):
        print(line)
    print(f"checkpoints  {folder}")
    if finished:
        print(f"evaluate     {program()} eval --checkpoint {folder}")


def draw_report(folder: Path) -> list[str]:
    """Draw the run as a page, and what to say of it."""
    try:
        write_report([folder], folder / REPORT_FILE)
    except Exception as error:
        # Whatever it is: the run is done, and must not look failed.
        return [f"report       none: {type(error).__name__}: {error}"]
    return [f"report       {folder / REPORT_FILE}"]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
