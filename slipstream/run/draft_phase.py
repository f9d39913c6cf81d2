"""Trains a draft head for a fixed policy: `slipstream draft`.

    responses of the policy, with hidden states -> training steps -> acceptance -> checkpoint

The run folder of this phase holds

    config.yaml              the resolved configuration
    metrics.jsonl            one line per training step
    global_step_N/draft/     the better one of the newest head and the best measured head:
                             `config.json`, `model.safetensors`; in `newest/` or `best/` the other
                             one, if they differ
    global_step_N/           also optimizer, position in the data, state

Each round ends with a measurement on held-out responses. The training ends early if several rounds
give no better head.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slipstream.build import draft as build_draft
from slipstream.build.policy import initial_policy
from slipstream.checkpoint.files import read_json, write_json
from slipstream.checkpoint.manager import CheckpointManager
from slipstream.checkpoint.saved import (
    MOST_PER_STEP,
    REMEDY,
    Saved,
    check_finite,
    drawn_from,
    restoring,
)
from slipstream.checkpoint.state import (
    RunState,
    data_file,
    draft_folder,
    optimizer_file,
    other_head_folder,
    state_file,
)
from slipstream.checkpoint.tree import load_tree, save_tree
from slipstream.config.launch import INTERRUPTED
from slipstream.config.schema import Config
from slipstream.config.tree import to_dict
from slipstream.deadlines import run_in_daemon
from slipstream.drafter.acceptance import HeldOut, measure_acceptance
from slipstream.drafter.best import (
    BestHead,
    acceptance_line,
    acceptance_metrics,
    acceptance_table,
    saved_acceptance,
)
from slipstream.drafter.linear_start import start_linear
from slipstream.drafter.sequences import DraftSequence
from slipstream.drafter.trainer import DraftTrainer, Metrics
from slipstream.errors import CheckpointError
from slipstream.loops.draft import train_draft_head
from slipstream.loops.draft_data import SequenceSource
from slipstream.models.draft.files import load_draft_head, save_draft_head
from slipstream.models.draft.model import DraftModel
from slipstream.run.context import Run
from slipstream.run.event_loop import run_async
from slipstream.run.snapshot import computed_with
from slipstream.run.train import opened

LARGE_GAP = 0.1
"""A larger difference of training and held-out accuracy causes a warning."""


async def draft_phase(run: Run) -> Path | None:
    """Train a head for the policy of `run`. Returns the head's folder, or None if stopped."""

    with run.span("draft"):
        return await run_in_daemon(lambda: run.compute.run(lambda: _DraftPhase(run).train()))


def main(config: Config) -> int:
    """Run `slipstream draft` and return the exit status."""
    with opened(config) as run:
        folder = run_async(draft_phase, run)
    if folder is None:
        print(f"stopped; the same command resumes from the last checkpoint in {run.folder}")
        return INTERRUPTED
    print(f"draft head   {folder}")
    return 0


class _DraftPhase:
    """The objects of the phase, and the callbacks around its steps. Runs on the compute thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._draft = run.config.speculative.draft
        self._parts = build_draft.make_parts(
            run.config, run.tokenizer, run.task, initial_policy(run.config)
        )
        self._trainer = self._parts.trainer
        self._settings = build_draft.loop_settings(run.config)
        self._manager = CheckpointManager(
            run.folder, keep=run.config.trainer.max_actor_ckpt_to_keep
        )
        self._held_out: list[HeldOut] = []
        self._before: Metrics = {}
        self._best = BestHead()
        self._newest: Metrics = {}
        """The acceptance of the newest head, if it was measured."""
        self._trained: list[tuple[float, float]] = []
        """The training accuracy and the number of slots of each step of this round."""
        self._warned = False
        self._clock = time.perf_counter()

    def train(self) -> Path | None:
        run, total, progress = self._run, self._draft.total_training_steps, self._run.progress
        trainer = run.config.trainer
        resume = self._manager.resolve(trainer.resume_mode, trainer.resume_from_path)
        if resume is not None:
            self._restore(resume)
            if self._trainer.step >= total:
                progress.note(f"the draft head has already done all {total} steps")
                return draft_folder(resume)
            if self._has_stalled():
                progress.note(f"{self._stalled()}; set speculative.draft.patience=-1 to go on")
                return draft_folder(resume)
        settings = self._settings
        progress.note(
            f"draft head for {initial_policy(run.config)}: {total} steps of {settings.batch_size} "
            f"responses, {settings.steps_per_round} on every {self._draft.samples_per_round} "
            + ("fresh responses" if self._draft.rollout_files is None else "recorded responses")
        )
        head = self._trainer.head
        if head.draft_tokens is not None:
            progress.note(
                f"draft vocabulary: {head.draft_vocab_size:,} of {head.config.vocab_size:,} tokens"
            )
        held_out = self._parts.hold_out(self._stop)
        if held_out is None:
            return None
        self._held_out = held_out
        logger = run.logger("draft", total, self._trainer.step if resume is not None else None)
        try:
            self._clock = time.perf_counter()
            finished = train_draft_head(
                self._trainer,
                self._parts.source,
                self._parts.vocab,
                settings,
                deadlines=run.deadlines,
                stop=self._stop,
                after_step=lambda step, metrics: logger.log(step, self._completed(step, metrics)),
                after_round=self._after_round,
                enough=self._has_stalled,
                before_training=None
                if self._best.head is not None
                else lambda sequences: logger.log(0, self._started(sequences)),
            )
        finally:
            logger.close()
        if self._best.metrics:
            step, after = self._best.step, self._best.metrics
            if self._newest and self._best.is_beaten_by(self._newest):
                step, after = self._trainer.step, self._newest
            for line in acceptance_table({"before": self._before, f"after step {step}": after}):
                progress.note(line)
        if not finished:
            return None
        if self._trainer.step < total:
            progress.note(self._stalled())
        return draft_folder(self._manager.folder(self._trainer.step))

    def _started(self, sequences: Sequence[DraftSequence]) -> Metrics:
        """Initialize a new head with the sequences of the first round, and measure the head."""
        head, progress = self._trainer.head, self._run.progress
        if self._run.config.speculative.eagle.spec_model_path is None and start_linear(
            head, sequences, self._parts.vocab
        ):
            progress.note("the new head starts as a linear predictor of the policy's features")
        self._newest = self._before = self._measure()
        self._best.offer(0, self._before, head)
        progress.note(f"held out, step 0: {acceptance_line(self._before)}")
        self._clock = time.perf_counter()
        return self._before

    def _stop(self) -> bool:
        return self._run.interrupt.requested

    def _has_stalled(self) -> bool:
        """Return whether the last `patience` rounds after the warm-up gave no better head."""
        patience, begin = self._draft.patience, self._draft.optim.lr_warmup_steps
        since = self._trainer.step - max(self._best.step, begin)
        return patience >= 0 and since >= max(patience, 1) * self._settings.steps_per_round

    def _stalled(self) -> str:
        return (
            f"the training ended early: no head after step {self._best.step} was better on "
            "held-out responses"
        )

    def _ends_round(self, step: int) -> bool:
        return step == self._settings.total_steps or step % self._settings.steps_per_round == 0

    def _completed(self, step: int, metrics: Metrics) -> Metrics:
        """Add acceptance and times to the metrics of a step; at the end of a round, also show
        them."""
        self._newest = {}
        self._trained.append((metrics["draft/accuracy"], metrics["draft/slots"]))
        if self._ends_round(step):
            held_out = self._trainer.evaluate(
                [each.sequence for each in self._held_out],
                self._parts.vocab,
                batch_size=self._settings.batch_size,
            )
            self._newest = self._measure()
            metrics = metrics | self._newest | held_out
            improved = self._best.offer(step, self._newest, self._trainer.head)
            self._show(step, held_out["draft/val_accuracy"], improved=improved)
            self._trained = []
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return metrics | {"training/global_step": step, "timing_s/step": seconds}

    def _show(self, step: int, accuracy: float, *, improved: bool) -> None:
        """Show the held-out acceptance after a round, and warn if the head only learns the
        responses that it trains on."""
        draft, progress = self._draft, self._run.progress
        best = "" if improved else f"; the head of step {self._best.step} is better"
        progress.note(f"held out, step {step}: {acceptance_line(self._newest)}{best}")
        # The first pass over a round's responses does not know them yet.
        last = self._trained[-self._settings.steps_per_pass :]
        trained = sum(share * slots for share, slots in last) / sum(slots for _, slots in last)
        is_whole = len(last) == self._settings.steps_per_pass
        if is_whole and trained - accuracy > LARGE_GAP and not self._warned:
            self._warned = True
            more, fewer = "samples_per_round", "epochs_per_round"
            if draft.rollout_files is not None:
                more = "rollout_files"
            if draft.steps_per_round is not None:
                fewer = "steps_per_round"
            progress.note(
                f"warning: the head overfits its training responses: its likeliest token is the "
                f"policy's for {trained:.0%} of their tokens, but for {accuracy:.0%} of "
                f"held-out tokens; give more responses with speculative.draft.{more}, or lower "
                f"speculative.draft.{fewer}"
            )

    def _measure(self) -> Metrics:
        acceptance = measure_acceptance(
            self._trainer.head,
            self._held_out,
            self._parts.vocab,
            depth=self._draft.accept_depth,
            batch_size=self._run.config.speculative.train.batch_size_per_gpu,
        )
        return acceptance_metrics(acceptance)

    def _after_round(self, position: Mapping[str, Any], ends: bool) -> None:
        rounds, step = self._draft.save_freq, self._trainer.step
        if self._best.head is None:
            return  # stopped before the first step
        due = rounds > 0 and step % (rounds * self._settings.steps_per_round) == 0
        if ends and not self._newest:
            # Stopped within a round. This measurement is not part of the training: an
            # uninterrupted one would not have made it.
            self._newest = self._measure()
            self._run.progress.note(f"held out, step {step}: {acceptance_line(self._newest)}")
        if ends or due:
            self._save(position)

    def _save(self, position: Mapping[str, Any]) -> None:
        best, newest = self._best, self._trainer.head
        data = {
            "source": position,
            "before": self._before,
            "policy": self._parts.policy_digest,
            "best": best.state_dict(),
        }
        state = RunState(
            step=self._trainer.step,
            phase="draft",
            threads=torch.get_num_threads(),
            config=to_dict(self._run.config),
            versions=computed_with(),
        )
        best_head = best.head
        assert best_head is not None
        use_newest = best.is_beaten_by(self._newest)

        def write(folder: Path) -> None:
            save_draft_head(newest if use_newest else best_head, draft_folder(folder))
            if not use_newest:
                save_draft_head(newest, other_head_folder(folder, "newest"))
            elif best.step != self._trainer.step:
                save_draft_head(best_head, other_head_folder(folder, "best"))
            optimizer_file(folder).parent.mkdir()
            save_tree(optimizer_file(folder), self._trainer.state_dict())
            write_json(data_file(folder), data)
            state.save(folder)

        self._manager.save(self._trainer.step, write)

    def _restore(self, folder: Path) -> None:
        """Resume from a verified checkpoint. Raises CheckpointError if it belongs to another phase
        or another policy."""
        self._before, self._best = restore_draft(
            folder,
            self._trainer,
            self._parts.source,
            policy=str(initial_policy(self._run.config)),
            policy_digest=self._parts.policy_digest,
        )
        self._run.progress.note(f"resuming from {folder}")


def restore_draft(
    folder: Path,
    trainer: DraftTrainer,
    source: SequenceSource,
    *,
    policy: str,
    policy_digest: str,
) -> tuple[Metrics, BestHead]:
    """Load a verified checkpoint into `trainer` and `source`. Returns the acceptance at the start,
    and the best head so far.

    `policy` is the folder of the policy, for messages. Raises CheckpointError if the checkpoint is
    corrupt, or belongs to another phase or another policy.
    """
    state = RunState.load(folder)
    if state.phase != "draft":
        raise CheckpointError(
            f"{folder} is a checkpoint of phase {state.phase!r}, not of draft head "
            "training; set another trainer.default_local_dir"
        )
    with restoring(data_file(folder)):
        data = Saved(read_json(data_file(folder))).fields("source", "before", "policy", "best")
        digest = data["policy"].text()
        before = saved_acceptance(data["before"])
    if digest != policy_digest:
        raise CheckpointError(
            f"{folder} was trained for a policy with other weights than {policy} has now; start "
            "over with trainer.resume_mode=disable, from this head with "
            f"speculative.eagle.spec_model_path={draft_folder(folder)}"
        )
    newest = used = _load_head(draft_folder(folder), folder, trainer)
    with restoring(data_file(folder)):
        best = BestHead.restore(data["best"], used, step=state.step)
    others = {which: other_head_folder(folder, which) for which in ("newest", "best")}
    found = {which: place for which, place in others.items() if place.is_dir()}
    if len(found) != int(best.step != state.step):
        raise CheckpointError(
            f"{folder}: the best head is of step {best.step}, and the newest of step {state.step}, "
            f"but beside draft/ there are {len(found)} other heads; {REMEDY}"
        )
    if "newest" in found:
        newest = _load_head(found["newest"], folder, trainer)
    if "best" in found:
        best.head = _load_head(found["best"], folder, trainer)
    with restoring(optimizer_file(folder)):
        trainer.load_state_dict(load_tree(optimizer_file(folder)))
        trainer.check_never_reset()
        if trainer.step != state.step:
            raise CheckpointError(
                f"step is {trainer.step}, but in {state_file(folder).name} it is {state.step}; "
                f"{REMEDY}"
            )
    with restoring(data_file(folder)), restoring("source"):
        source.load_state_dict(data["source"].value)
        if (drawn := drawn_from(source)) is not None:
            Saved(drawn, "the number of prompts drawn").count((1 + state.step) * MOST_PER_STEP)
    trainer.head.load_state_dict(newest.state_dict())
    return before, best


def _load_head(place: Path, checkpoint: Path, trainer: DraftTrainer) -> DraftModel:
    """Load a head of a checkpoint. Raises CheckpointError if the trainer's head is of another
    kind."""
    head = load_draft_head(place, trainer.head.config)
    if not trainer.head.is_like(head):
        raise CheckpointError(
            f"{checkpoint} has a draft head of another algorithm, or with other auxiliary layers "
            "or another draft vocabulary than speculative.eagle says; start over with "
            "trainer.resume_mode=disable, or restore the options"
        )
    with restoring(place):
        check_finite(head.named_parameters())
    return head
