"""Runs a training: `slipstream train` calls `train` with a configuration and gets a run folder.

<default_local_dir>/
  config.yaml            the resolved configuration
  metrics.jsonl          metrics of RL, one line per step; SFT has sft/metrics.jsonl
  rollouts/N.jsonl       the samples of step N; those of validations are in validation/
  global_step_N/         checkpoints of RL; SFT has sft/global_step_N/
  run.png                plots of reward, accuracy and lengths
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
from slipstream.build.limits import check_budgets, check_demonstrations, check_weights
from slipstream.build.policy import device_of, initial_policy, model_config, thread_count
from slipstream.build.process import import_external, set_threads
from slipstream.build.team import open_team
from slipstream.build.thread_count import FEW, threads_for
from slipstream.checkpoint.interrupt import GracefulInterrupt
from slipstream.checkpoint.layout import policy_folder
from slipstream.config.engines import engine_entry
from slipstream.config.launch import INTERRUPTED, program
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.deadlines import Deadlines, close_parts, end_process, frozen_interpreter_ends
from slipstream.errors import ConfigError, DataError, StageTimeoutError
from slipstream.kernels.compiling import cached_files
from slipstream.metrics.loggers import METRICS_FILE, check_loggers
from slipstream.metrics.machine import this_machine
from slipstream.metrics.picture import plot_run
from slipstream.metrics.progress import Progress, SteadyConsole
from slipstream.metrics.resident import return_freed_memory
from slipstream.metrics.timeline import EVENTS_FILE, Timeline, take_command_start
from slipstream.models.config import ModelConfig
from slipstream.models.hf_policy import HFPolicyConfig
from slipstream.models.numerics import dtype_from_name, rows_are_exact
from slipstream.models.policy import PolicyConfig
from slipstream.report.page import REPORT_FILE, write_report
from slipstream.run.context import Run, check_resumable, open_run, with_template_date
from slipstream.run.eval_export import evaluate, export
from slipstream.run.event_loop import run_async
from slipstream.run.folder import (
    PICTURE,
    claim_folder,
    locked,
    recorded_template_date,
    write_settings,
)
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
"""At least this many seconds may pass without any Python code running. Importing a large library
takes seconds, too."""

FORCED_EXIT_SECONDS = 5.0
"""After a second Ctrl-C, the process ends after this many seconds, even if a computation cannot be
cancelled."""


def train(config: Config, mode: Mode, parts: GivenParts | None = None) -> int:
    """Run SFT, RL, or both in sequence, and return the exit status.

    `parts` replace objects that the configuration names.
    """
    with opened(config, parts=parts) as run:
        announce(run, mode)
        finished = run_async(_train, run, mode)
    if config.trainer.val_only:
        return 0
    _conclude(run.folder, finished=finished)
    return 0 if finished else INTERRUPTED


def trial(config: Config, mode: Mode) -> bool:
    """Like `train`, but without the plots, the report and the messages at the end."""
    with opened(config) as run:
        announce(run, mode)
        return run_async(_train, run, mode)


@contextlib.contextmanager
def opened(
    config: Config, compute: ComputeThread | None = None, *, parts: GivenParts | None = None
) -> Iterator[Run]:
    """Open a run: lock its folder, watch deadlines and Ctrl-C, and show progress.

    `compute` is created if it is None, and closed at the end. If a thread never returns, the
    process ends. Raises CheckpointError if the folder belongs to another run, and ConfigError for
    loggers that cannot work.
    """
    set_threads(config)
    import_external(config)
    folder = Path(config.trainer.default_local_dir)
    check_loggers(config.trainer.logger, folder, config.trainer.project_name)
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
            config = with_recorded_date(config, folder)
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
                        if run.config != config:
                            write_settings(folder, run.config)
                        _tell_of_compiling(run)
                        _settle_threads(run)
                    # Otherwise a full garbage collection would scan all modules, which takes
                    # 0.1 s in the middle of a rollout.
                    gc.freeze()
                    yield run
            finally:
                gc.unfreeze()
                close_parts(deadlines, compute)
    finally:
        forced.cancel()


def with_recorded_date(config: Config, folder: Path) -> Config:
    """The configuration with the chat template's date of the run that is resumed, if it has one."""
    if config.data.chat_template_date is not None:
        return config
    return with_template_date(config, recorded_template_date(folder, config))


@contextlib.contextmanager
def _timeline(config: Config, interrupt: GracefulInterrupt) -> Iterator[Timeline]:
    """The timeline of this process, from its start to the end of the body."""
    timeline = Timeline(Path(config.trainer.default_local_dir) / EVENTS_FILE)
    machine = this_machine()
    timeline.start(
        take_command_start(),
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
    """`cpu`, or the name of the GPU."""
    return device.type if device.type != "cuda" else torch.cuda.get_device_name(device)


def _tell_of_compiling(run: Run) -> None:
    """Tell the user about the first compilation, which otherwise looks like a hang."""
    if device_of(run.config).type == "cpu" and not any(cached_files()):
        run.progress.note(
            "kernels are compiled for this processor at their first use, once; this takes a minute "
            "or two"
        )


def _settle_threads(run: Run) -> None:
    """Choose the number of threads by a measurement, if there are many cores and no setting."""
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

    # On both threads: torch keeps this setting per thread.
    torch.set_num_threads(run.compute.run(settle))


def announce(run: Run, mode: Mode) -> None:
    """Print what the run will compute, and how."""
    device = device_of(run.config)
    actor = run.config.actor_rollout_ref.actor
    data, rollout = run.config.data, run.config.actor_rollout_ref.rollout
    train_dtype = _short(dtype_from_name(actor.dtype, device))
    engine_dtype = _short(rollout_dtype(run.config))
    exact = (
        engine_entry(rollout.name).capabilities.exact
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
        epochs = f", {actor.ppo_epochs} passes" if actor.ppo_epochs > 1 else ""
        note(
            f"an RL step: {data.train_batch_size} prompts x {rollout.n} responses of at most "
            f"{data.max_response_length} tokens; {mini} prompts per optimizer step{epochs}"
        )
    note(f"run folder: {run.folder}")


async def _train(run: Run, mode: Mode) -> bool:
    """Run the phases of `mode`. Returns False if the run was stopped before its end."""
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
                f"transformers computes the policy ({policy.family}), without dropout; log-probs "
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
            # RL starts with the same validation.
            again = "rl" in phases and run.config.trainer.val_before_train
            start = await sft_phase(run, validate_last=not again)
            if start is None:
                return False
    if "rl" not in phases:
        return True
    if run.interrupt.requested:
        return False
    if "sft" in phases:
        # RL allocates blocks of other sizes, so the freed memory of SFT would stay beside them.
        await run.compute.submit(return_freed_memory)
    return await rl_phase(run, start)


def check_phases(run: Run, mode: Mode, policy: PolicyConfig) -> None:
    """Raise the errors that would stop a phase at its start. For RL this happens before SFT, which
    may take hours."""
    check_budgets(run.config, policy, mode)
    check_weights(run.config, policy)
    if "sft" in mode:
        check_demonstrations(run.config, policy)
    if "rl" in mode:
        # On the compute thread: large torch operations on this thread would start a second OpenMP
        # team, which competes with the compute thread's team for the cores during the whole run.
        run.compute.run(lambda: check_rl(run, initial_policy(run.config)))


def check_validation(run: Run) -> None:
    """Check that there are validation prompts if the settings ask for validation.

    Prints a note if there are none. Raises ConfigError if validation is all that the run does.
    """
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
    """Draw the plots and the report, and print where the results are."""
    logs = [folder / "sft" / METRICS_FILE, folder / METRICS_FILE]
    logs = [path for path in logs if path.exists() and path.stat().st_size > 0]
    if not finished:
        print(f"stopped; the same command resumes from the last checkpoint in {folder}")
    if logs:
        try:
            print(f"picture      {plot_run(logs, folder / PICTURE)}")
        except (OSError, DataError) as error:
            # The run has finished. A full disk or a log without curves must not make it fail now.
            print(f"picture      none: {error}")
    for line in draw_report(folder):
        print(line)
    print(f"checkpoints  {folder}")
    if finished:
        print(f"evaluate     {program()} eval --checkpoint {folder}")


def draw_report(folder: Path) -> list[str]:
    """Write the report of the run, and return the lines to print about it."""
    try:
        write_report([folder], folder / REPORT_FILE)
    except Exception as error:
        # The run has finished. No error of the report may make it fail now.
        return [f"report       none: {type(error).__name__}: {error}"]
    return [f"report       {folder / REPORT_FILE}"]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
