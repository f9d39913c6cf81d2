"""The state that the phases of a run share: configuration, folder, tokenizer, task, rewards,
display.

It knows where checkpoints are and which one to resume from, but not how to train. `run.train`
creates it, `run.phases` uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.build.data import (
    GivenParts,
    make_data_buffer,
    make_decode,
    make_reward_manager,
    make_task,
    make_tokenizer,
    use_template_date,
    validation_prompts,
)
from slipstream.build.episodes import changed_turns
from slipstream.build.policy import initial_policy
from slipstream.build.rollouts import eval_settings
from slipstream.checkpoint.interrupt import GracefulInterrupt
from slipstream.checkpoint.manager import CheckpointManager, verify
from slipstream.checkpoint.state import RunState, huggingface_folder, state_file
from slipstream.config.load import diff
from slipstream.config.schema import Config
from slipstream.config.tree import from_dict, to_dict
from slipstream.data.data_buffer import DataBuffer
from slipstream.data.registry import Task
from slipstream.data.template_date import reads_date, today
from slipstream.deadlines import Deadlines
from slipstream.errors import CheckpointError
from slipstream.inference.protocol import InferenceEngine
from slipstream.loops.evaluate import Evaluation, check_sources
from slipstream.loops.evaluate import evaluate as run_evaluation
from slipstream.metrics.loggers import TeeLogger, build_loggers
from slipstream.metrics.progress import Progress
from slipstream.metrics.timeline import Timeline
from slipstream.rewards.protocol import Decode, RewardManager
from slipstream.run.console import StepLines, accuracies, sample_texts, shown_samples
from slipstream.run.rollout_dump import dump_groups, table_row
from slipstream.run.snapshot import Snapshots
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slipstream.distributed.team import Team

CONSOLE = "console"
GENERATIONS = "val/generations"
"""The table of validation responses, under verl's name."""


@dataclass(slots=True)
class Run:
    """Objects that SFT and RL share, and the folder of the run."""

    config: Config
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    task: Task | None
    rewards: RewardManager
    held_out: list[Prompt]
    progress: Progress
    interrupt: GracefulInterrupt
    compute: ComputeThread
    """The thread for all tensor work: trainer and engine, in both phases."""
    parts: GivenParts = field(default_factory=GivenParts)
    val_rewards: RewardManager | None = None
    """Scores validation, if not `rewards`."""
    deadlines: Deadlines = field(default_factory=Deadlines)
    team: Team | None = None
    """The other processes of a distributed run, if any."""
    timeline: Timeline | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock seconds by phase, in this process."""
    _resume: dict[str, Path | None] = field(default_factory=dict)
    _data: DataBuffer | None = None

    def span(self, name: str, **facts: object) -> AbstractContextManager[None]:
        """Record the body as `name` in the run's timeline, if it has one."""
        return nullcontext() if self.timeline is None else self.timeline.span(name, **facts)

    @property
    def data(self) -> DataBuffer:
        """The training prompts. They are read at the first access, because that takes time."""
        if self._data is None:
            self._data = make_data_buffer(self.config, self.tokenizer, self.task, self.parts)
        return self._data

    @property
    def decode(self) -> Decode:
        """A function from the ids of a response to the text that reward functions get."""
        return make_decode(self.config, self.tokenizer)

    def root(self, phase: str) -> Path:
        """The folder with the checkpoints and the log of a phase."""
        return self.folder / "sft" if phase == "sft" else self.folder

    def snapshots(self, phase: str) -> Snapshots:
        keep = self.config.trainer.max_actor_ckpt_to_keep
        return Snapshots(
            manager=CheckpointManager(self.root(phase), keep=keep),
            phase=phase,
            config=to_dict(self.config),
            save_tokenizer=self.tokenizer.save_pretrained,
        )

    def resume_folder(self, phase: str) -> Path | None:
        """The verified checkpoint of `phase` to resume from, by `trainer.resume_mode`; None if
        none.

        `resume_from_path` counts only for the phase that wrote the checkpoint. The result is
        cached, because verifying reads the whole checkpoint.
        """
        if phase not in self._resume:
            self._resume[phase] = self._find_resume(phase)
        return self._resume[phase]

    def _find_resume(self, phase: str) -> Path | None:
        trainer, manager = self.config.trainer, self.snapshots(phase).manager
        path = manager.resolve(trainer.resume_mode, trainer.resume_from_path)
        if path is None:
            return None
        state = RunState.load(path)
        saved, problems = from_dict(state.config)
        if problems:
            self.progress.note(
                f"{state_file(path)}: the settings of the saved run cannot be read "
                f"({problems[0]}), so they are not compared with this run's"
            )
        if phase == "rl" and not problems:
            self._announce_schedule(saved)
        if trainer.resume_mode == "auto":
            return path
        if state.phase != phase:
            return None
        if not problems and (differences := diff(saved, self.config)):
            self.progress.note(f"{path} was made with other settings: {'; '.join(differences)}")
        return path

    def _announce_schedule(self, saved: Config) -> None:
        """Tell the user if a changed number of steps changes the learning-rate schedule. The
        resumed run then differs from a run that had this number of steps from its start."""
        optim = self.config.actor_rollout_ref.actor.optim
        tied = optim.lr_scheduler_type != "constant" or optim.lr_warmup_steps_ratio > 0
        lengths = [
            (c.trainer.total_training_steps, c.trainer.total_epochs) for c in (saved, self.config)
        ]
        if tied and optim.total_training_steps == -1 and lengths[0] != lengths[1]:
            self.progress.note(
                "the number of steps has changed since the run started, and from now on the "
                "learning-rate schedule uses the new number; set "
                "actor_rollout_ref.actor.optim.total_training_steps to keep the old schedule"
            )

    def sft_result(self, folder: Path) -> Path | None:
        """The policy at the end of the SFT in a run folder; None if there is none."""
        latest = CheckpointManager(folder / "sft", keep=None).latest()
        if latest is None:
            return None
        verify(latest)
        return huggingface_folder(latest)

    def logger(self, phase: str, total: int, resume_step: int | None) -> TeeLogger:
        """The loggers of one phase. The console logger prints through the progress display."""
        trainer = self.config.trainer
        tee = build_loggers(
            [name for name in trainer.logger if name != CONSOLE],
            self.root(phase),
            trainer.project_name,
            trainer.experiment_name,
            resume_step=resume_step,
            phase=phase,
            root=self.folder,
            config=to_dict(self.config),
            notify=self.progress.note,
        )
        lines = CONSOLE in trainer.logger
        self.progress.phase(phase.upper(), total, done=resume_step or 0, lines=not lines)
        tee.loggers.append(StepLines(self.progress, phase.upper(), total, lines=lines))
        return tee

    async def validate(self, engines: Sequence[InferenceEngine]) -> Evaluation:
        """Evaluate the policy on the held-out prompts, sampled with `rollout.val_kwargs`."""
        settings = eval_settings(self.config, self.tokenizer)
        batches = -(-len(self.held_out) // (settings.batch_size or len(self.held_out)))
        batches += len(settings.by_source)  # each of them starts a new batch
        with self.deadlines.last_resort(
            "validation: a thread of the inference engine does not return",
            settings.timeout_s * batches,
        ):
            rewards = self.val_rewards or self.rewards
            return await run_evaluation(engines, self.held_out, rewards, settings)

    @property
    def validation_folder(self) -> Path:
        """The folder with the recorded responses of validations."""
        return Path(self.config.trainer.validation_data_dir or self.folder / "validation")

    def record_validation(
        self, phase: str, step: int, evaluation: Evaluation, logger: TeeLogger | None = None
    ) -> None:
        """Record the responses of a validation, and show its result and a few of them on the
        console and in the tables of `logger`."""
        name = f"{step}.jsonl" if phase == "rl" else f"{phase}_{step}.jsonl"
        path = self.validation_folder / name
        dump_groups(path, evaluation.groups, self.tokenizer, step, self.decode)
        count = self.config.trainer.log_val_generations
        when = f"after {phase.upper()} step {step}" if step else f"before {phase.upper()}"
        for text in accuracies(evaluation.metrics):
            self.progress.note(f"{when}: {text}")
        shown = shown_samples(evaluation.groups, count)
        decode = partial(self.tokenizer.decode, skip_special_tokens=True)
        for text in sample_texts(shown, decode):
            self.progress.note(text)
        if logger is not None and shown:
            rows = [table_row(sample, self.tokenizer, step, self.decode) for _, sample in shown]
            logger.log_table(step, GENERATIONS, rows)


def open_run(
    config: Config,
    folder: Path,
    progress: Progress,
    interrupt: GracefulInterrupt,
    compute: ComputeThread,
    deadlines: Deadlines | None = None,
    parts: GivenParts | None = None,
    timeline: Timeline | None = None,
    team: Team | None = None,
) -> Run:
    """Create a run: tokenizer, task, rewards and held-out prompts.

    If the chat template writes a date and the configuration has none, the run's configuration gets
    today's date. `parts` replace objects that the configuration names.
    """
    parts = parts or GivenParts()
    tokenizer = parts.tokenizer or make_tokenizer(config, initial_policy(config))
    if config.data.chat_template_date is None and reads_date(tokenizer):
        config = with_template_date(config, today().isoformat())
        progress.note(
            f"the chat template writes a date: data.chat_template_date="
            f"{config.data.chat_template_date}, and a resumed run keeps it"
        )
    use_template_date(config, tokenizer)
    task = make_task(config, tokenizer)
    if (note := changed_turns(config, tokenizer)) is not None:
        progress.note(note)
    held_out = validation_prompts(config, tokenizer, task, parts=parts)
    if held_out:
        check_sources(held_out, eval_settings(config, tokenizer))
    return Run(
        config=config,
        folder=folder,
        tokenizer=tokenizer,
        task=task,
        rewards=make_reward_manager(config, tokenizer, function=parts.reward_fn, compute=compute),
        val_rewards=None
        if parts.val_reward_fn is None
        else make_reward_manager(config, tokenizer, function=parts.val_reward_fn),
        held_out=held_out,
        progress=progress,
        interrupt=interrupt,
        compute=compute,
        parts=parts,
        timeline=timeline,
        team=team,
        deadlines=deadlines or Deadlines(timeout_s=config.trainer.stage_timeout_s),
    )


def with_template_date(config: Config, day: str | None) -> Config:
    """The configuration with `data.chat_template_date`."""
    return replace(config, data=replace(config.data, chat_template_date=day))


def check_resumable(run: Run, phases: Sequence[str]) -> None:
    """Raise CheckpointError if `resume_from_path` is a checkpoint of a phase that this run
    lacks."""
    trainer = run.config.trainer
    if trainer.resume_mode != "resume_path":
        return
    manager = run.snapshots(phases[-1]).manager
    path = manager.resolve(trainer.resume_mode, trainer.resume_from_path)
    assert path is not None, "resume_path names one or fails"
    phase = RunState.load(path).phase
    if phase not in phases:
        raise CheckpointError(
            f"{path} is a checkpoint of {phase.upper()}, but this run does {' + '.join(phases)}; "
            f"start from its weights with actor_rollout_ref.model.path={huggingface_folder(path)}"
        )
