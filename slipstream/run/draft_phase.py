"""Trains a draft head for a fixed policy: `slipstream draft`.

    responses of the policy, with hidden states -> training steps -> acceptance -> checkpoint

The run folder of this phase holds

    config.yaml              the resolved configuration
    metrics.jsonl            one line per training step
    global_step_N/draft/     the head: `config.json` and `model.safetensors`
    global_step_N/           also optimizer, position in the data, state
"""

from __future__ import annotations

import time
from collections.abc import Mapping
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
    state_file,
)
from slipstream.checkpoint.tree import load_tree, save_tree
from slipstream.config.launch import INTERRUPTED
from slipstream.config.schema import Config
from slipstream.config.tree import to_dict
from slipstream.deadlines import run_in_daemon
from slipstream.drafter.acceptance import Acceptance, HeldOut, measure_acceptance
from slipstream.drafter.trainer import DraftTrainer, Metrics
from slipstream.errors import CheckpointError
from slipstream.loops.draft import train_draft_head
from slipstream.loops.draft_data import SequenceSource
from slipstream.models.draft.files import load_draft_head, save_draft_head
from slipstream.run.context import Run
from slipstream.run.event_loop import run_async
from slipstream.run.snapshot import computed_with
from slipstream.run.train import opened


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
        self._manager = CheckpointManager(
            run.folder, keep=run.config.trainer.max_actor_ckpt_to_keep
        )
        self._held_out: list[HeldOut] = []
        self._before: Metrics = {}
        self._last: Metrics = {}
        self._clock = time.perf_counter()

    def train(self) -> Path | None:
        run, total = self._run, self._draft.total_training_steps
        trainer = run.config.trainer
        resume = self._manager.resolve(trainer.resume_mode, trainer.resume_from_path)
        if resume is not None:
            self._restore(resume)
            if self._trainer.step >= total:
                run.progress.note(f"the draft head has already done all {total} steps")
                return draft_folder(resume)
        run.progress.note(
            f"draft head for {initial_policy(run.config)}: {total} steps, "
            f"{self._draft.steps_per_round} on every {self._draft.samples_per_round} "
            + ("fresh responses" if self._draft.rollout_files is None else "recorded responses")
        )
        head = self._trainer.head
        if head.draft_tokens is not None:
            run.progress.note(
                f"draft vocabulary: {head.draft_vocab_size:,} of {head.config.vocab_size:,} tokens"
            )
        held_out = self._parts.hold_out(self._stop)
        if held_out is None:
            return None
        self._held_out = held_out
        logger = run.logger("draft", total, self._trainer.step if resume is not None else None)
        try:
            if resume is None:
                self._before = self._measure()
                logger.log(0, self._before)
            self._clock = time.perf_counter()
            finished = train_draft_head(
                self._trainer,
                self._parts.source,
                self._parts.vocab,
                build_draft.loop_settings(run.config),
                deadlines=run.deadlines,
                stop=self._stop,
                after_step=lambda step, metrics: logger.log(step, self._completed(step, metrics)),
                after_round=self._after_round,
            )
        finally:
            logger.close()
        if not finished:
            return None
        for line in acceptance_table({"before": self._before, "after": self._last}):
            run.progress.note(line)
        return draft_folder(self._manager.folder(total))

    def _stop(self) -> bool:
        return self._run.interrupt.requested

    def _due(self, step: int) -> bool:
        """True if a measurement and a checkpoint follow this step."""
        rounds = self._draft.save_freq
        every = rounds * self._draft.steps_per_round
        return step == self._draft.total_training_steps or (rounds > 0 and step % every == 0)

    def _completed(self, step: int, metrics: Metrics) -> Metrics:
        if self._due(step):
            self._last = self._measure()
            metrics = metrics | self._last
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return metrics | {"training/global_step": step, "timing_s/step": seconds}

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
        if ends or self._due(self._trainer.step):
            self._save(position)

    def _save(self, position: Mapping[str, Any]) -> None:
        data = {"source": position, "before": self._before, "policy": self._parts.policy_digest}
        state = RunState(
            step=self._trainer.step,
            phase="draft",
            threads=torch.get_num_threads(),
            config=to_dict(self._run.config),
            versions=computed_with(),
        )

        def write(folder: Path) -> None:
            save_draft_head(self._trainer.head, draft_folder(folder))
            optimizer_file(folder).parent.mkdir()
            save_tree(optimizer_file(folder), self._trainer.state_dict())
            write_json(data_file(folder), data)
            state.save(folder)

        self._manager.save(self._trainer.step, write)

    def _restore(self, folder: Path) -> None:
        """Resume from a verified checkpoint. Raises CheckpointError if it belongs to another phase
        or another policy."""
        self._before = restore_draft(
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
) -> Metrics:
    """Load a verified checkpoint into `trainer` and `source`. Returns the acceptance at the start.

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
        data = Saved(read_json(data_file(folder))).fields("source", "before", "policy")
        digest = data["policy"].text()
        before = _measured(data["before"])
    if digest != policy_digest:
        raise CheckpointError(
            f"{folder} was trained for a policy with other weights than {policy} has now; start "
            "over with trainer.resume_mode=disable, from this head with "
            f"speculative.eagle.spec_model_path={draft_folder(folder)}"
        )
    head = load_draft_head(draft_folder(folder), trainer.head.config)
    if not trainer.head.is_like(head):
        raise CheckpointError(
            f"{folder} has a draft head of another algorithm, or with other auxiliary layers "
            "or another draft vocabulary than speculative.eagle says; start over with "
            "trainer.resume_mode=disable, or restore the options"
        )
    with restoring(draft_folder(folder)):
        check_finite(head.named_parameters())
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
    trainer.head.load_state_dict(head.state_dict())
    return before


def _measured(saved: Saved) -> Metrics:
    """Return saved `acceptance_metrics`. Raises CheckpointError for others."""
    depths = range(1, 1 + -(-len(dict(saved.items())) // 2))
    names = [f"draft/accept_{what}_{k}" for k in depths for what in ("depth", "length")]
    return {name: value.number(0.0) for name, value in saved.fields(*names).items()}


def acceptance_metrics(acceptance: Acceptance) -> Metrics:
    """Acceptance by depth, with the names of docs/metrics.md."""
    depths = range(1, acceptance.depth + 1)
    return {f"draft/accept_depth_{k}": acceptance.at_depth(k) for k in depths} | {
        f"draft/accept_length_{k}": acceptance.replay(k).tokens_per_verification for k in depths
    }


def acceptance_table(rows: Mapping[str, Metrics]) -> list[str]:
    """Format measurements of `acceptance_metrics` as lines of text, one row per measurement."""
    # The run may have been resumed with another speculative.draft.accept_depth.
    counts = [sum(name.startswith("draft/accept_depth_") for name in row) for row in rows.values()]
    depths = range(1, 1 + min(counts))
    lines = []
    for title, name, form in (
        (
            "all drafts to this depth accepted (share)",
            "draft/accept_depth_",
            "6.3f",
        ),
        ("tokens per verification, by draft depth", "draft/accept_length_", "6.2f"),
    ):
        lines.append(f"{title:<42}" + "".join(f"{k:6d}" for k in depths))
        for label, metrics in rows.items():
            values = "".join(format(metrics[f"{name}{k}"], form) for k in depths)
            lines.append(f"  {label:<40}" + values)
    return lines
