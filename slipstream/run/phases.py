"""The phases SFT and RL of a run, with their checkpoints, logs and validations.

Each takes a `Run`, creates its objects with `build`, and passes them to the pure loop (`loops.sft`,
`loops.rl`). Called by `run.train` and by the quickstart.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.build.algorithm import (
    make_kl_in_reward,
    rl_config,
    wants_critic,
    wants_ref_log_probs,
    wants_reference,
)
from slipstream.build.cotraining import check_cotraining, make_cotraining
from slipstream.build.critic import check_critic, critic_optim, make_critic
from slipstream.build.data import make_demonstrations, rl_steps
from slipstream.build.engine import check_engine, make_engine
from slipstream.build.policy import (
    actor_optim,
    add_adapter,
    check_reference,
    initial_policy,
    make_policy,
    max_model_len,
    model_config,
    optim_settings,
    process_count,
)
from slipstream.build.rollouts import make_rollouts
from slipstream.build.speculation import check_speculation
from slipstream.build.team import Wanted, gathered_vocab, policy_parts
from slipstream.checkpoint.layout import policy_folder
from slipstream.checkpoint.state import huggingface_folder
from slipstream.deadlines import close_parts, run_in_daemon
from slipstream.errors import CheckpointError, ConfigError
from slipstream.inference.protocol import InferenceEngine
from slipstream.loops.rl import WeightReceiver, run_rl_training
from slipstream.loops.sft import SFTTrainingConfig, run_sft_training
from slipstream.metrics.loggers import TeeLogger
from slipstream.metrics.timers import Timers
from slipstream.models.config import ModelConfig
from slipstream.models.hf_io import load_config
from slipstream.models.policy import policy_config
from slipstream.report.read import TOKENS_FOLDER
from slipstream.run.async_checkpoint import AsyncCheckpoints
from slipstream.run.console import short
from slipstream.run.context import Run
from slipstream.run.data_proto_step import proto_of_step
from slipstream.run.engine_metrics import EngineWatch
from slipstream.run.folder import forget_after
from slipstream.run.rollout_dump import dump_groups, dump_tokens
from slipstream.run.snapshot import LastPublished, restore_rl, restore_sft
from slipstream.training.critic import Critic
from slipstream.training.optim import OptimSettings
from slipstream.types import Group


async def sft_phase(run: Run, *, validate_last: bool = False) -> Path | None:
    """Run SFT from the configured model. Returns the Hugging Face folder of the last step, or None
    if the run was stopped.

    `validate_last` validates after the last step, even if `sft.test_freq` does not.
    """
    config, sft = run.config, run.config.sft
    initial = initial_policy(config)
    snapshots = replace(run.snapshots("sft"), base_model=initial)
    resume = run.resume_folder("sft")
    total = sft.total_training_steps

    optim = optim_settings(sft.optim, total, key="sft.optim")
    wanted = Wanted(
        start=initial,
        optim=optim,
        sft=True,
        # A single process creates the engine at its first validation. Several processes must create
        # it together, so they do it now.
        engine=run.team is not None and bool(run.held_out) and (sft.test_freq > 0 or validate_last),
    )
    with run.span("setup"):
        parts = run.compute.run(
            lambda: policy_parts(
                config, run.tokenizer, wanted, run.compute, run.team, run.progress.note
            )
        )
        backend, engine = parts.backend, parts.engine
        stream = make_demonstrations(config, run.tokenizer, run.task)
    done = 0
    if resume is not None:
        with run.span("setup"):
            done = run.compute.run(
                lambda: restore_sft(snapshots, resume, backend, stream, run.progress.note)
            )
        if done >= total:
            run.progress.note(f"SFT has already done all {total} steps")
            backend.close()
            return huggingface_folder(resume)
    forget_after(run.validation_folder, done if resume is not None else None, prefix="sft_")
    with run.span("setup"):
        logger = run.logger("sft", total, done if resume is not None else None)

    async def after_step(step: int, metrics: dict[str, float]) -> bool:
        nonlocal engine
        if run.held_out and _due(step, sft.test_freq, total if validate_last else None):
            if engine is None:
                with run.span("setup"):
                    engine = run.compute.run(
                        lambda: make_engine(config, parts.policy, run.tokenizer, run.compute)
                    )
            with run.span("testing", step=step):
                await engine.update_weights(backend.publish(advance=False))
                evaluation = await run.validate([engine])
                run.record_validation("sft", step, evaluation, logger)
            metrics |= evaluation.metrics
        return run.interrupt.requested

    async def save(step: int, stopping: bool) -> None:
        if stopping or step == total or (sft.save_freq > 0 and step % sft.save_freq == 0):
            state = {"stream": stream.state_dict()}
            with run.span("save_checkpoint", step=step):
                await _save(run, lambda: snapshots.save(step, backend, state))

    with _timed(run, "sft"):
        try:
            history = await run_sft_training(
                backend,
                stream,
                SFTTrainingConfig(
                    num_steps=total,
                    batch_size=sft.train_batch_size,
                    batch_tokens=sft.batch_tokens if sft.train_batch_size is None else None,
                    start_step=done,
                ),
                logger,
                after_step=after_step,
                save=save,
                deadlines=run.deadlines,
            )
        finally:
            logger.close()
            close_parts(run.deadlines, backend, engine)
    if done + len(history) < total:
        return None
    return huggingface_folder(snapshots.manager.folder(total))


async def rl_phase(run: Run, start: Path | None) -> bool:
    """Run RL from the weights in `start`. Returns False if it was stopped before the last step."""
    with run.span("setup"):
        phase = run.compute.run(lambda: _RLPhase(run, start))
    with _timed(run, "rl"):
        try:
            return await phase.train()
        finally:
            phase.close()


async def validate_policy(run: Run, start: Path | None) -> None:
    """Validate the policy that RL would start from, log the result, and stop
    (`trainer.val_only`)."""
    resume = run.resume_folder("rl")
    folder = huggingface_folder(resume) if resume is not None else start

    def make() -> InferenceEngine:
        if run.team is not None:
            # All engines get their weights from a trainer, which does nothing else here.
            wanted = Wanted(start=folder, optim=OptimSettings(lr=0.0))
            parts = policy_parts(
                run.config, run.tokenizer, wanted, run.compute, run.team, run.progress.note
            )
            assert parts.engine is not None
            return parts.engine
        decoder = make_policy(run.config, run.tokenizer, folder)
        add_adapter(run.config, decoder, first=folder == initial_policy(run.config))
        return make_engine(
            run.config, decoder, run.tokenizer, run.compute, speculate=run.progress.note
        )

    engine = run.compute.run(make)
    run.progress.note(f"validating {folder or 'freshly initialised weights'}")
    try:
        with run.span("testing"):
            evaluation = await run.validate([engine])
    finally:
        close_parts(run.deadlines, engine)
    for name, value in evaluation.metrics.items():
        run.progress.note(f"{name:<48} {value:.4f}")
    run.record_validation("rl", 0, evaluation)


class _RLPhase:
    """The objects of RL, and the callbacks around its steps. Created on the compute thread."""

    def __init__(self, run: Run, start: Path | None) -> None:
        config = run.config
        self._run = run
        self._snapshots = replace(run.snapshots("rl"), base_model=start)
        self._resume = run.resume_folder("rl")
        self._data = run.data
        self._total = rl_steps(config, self._data)
        parts = policy_parts(
            config,
            run.tokenizer,
            Wanted(
                start=start,
                optim=actor_optim(config, self._total),
            ),
            run.compute,
            run.team,
            run.progress.note,
        )
        assert parts.engine is not None
        self._backend, self._reference, self._engine = parts.backend, parts.reference, parts.engine
        self._critic: Critic | None = None
        if wants_critic(config):
            self._critic = make_critic(
                config,
                run.tokenizer,
                parts.policy,
                run.compute,
                rl_steps=self._total,
                resume=self._resume,
            )
        self._drafter = make_cotraining(
            config,
            parts.whole,
            [self._engine],
            run.compute,
            vocab=None if run.team is None else gathered_vocab(config, parts.policy, run.team),
            total_steps=self._total,
            notify=run.progress.note,
            deadlines=run.deadlines,
        )
        self._watch = EngineWatch(self._engine)
        self._rollouts = make_rollouts(
            config,
            self._engine,
            self._data,
            run.rewards,
            run.tokenizer,
            sink=None if self._drafter is None else self._drafter.decoded,
        )
        self._kl = make_kl_in_reward(config)
        self._published = LastPublished() if config.trainer.sync_every > 1 else None
        self._saves = AsyncCheckpoints(run.deadlines, run.progress.note)
        self._logger: TeeLogger | None = None

    async def train(self) -> bool:
        run, trainer = self._run, self._run.config.trainer
        with run.span("setup"):
            done = await self._restore()
        if self._resume is not None and done >= self._total:
            run.progress.note(f"RL has already done all {self._total} steps")
            return True
        resumed_at = done if self._resume is not None else None
        with run.span("setup"):
            forget_after(self._rollout_folder, resumed_at)
            forget_after(self._rollout_folder / TOKENS_FOLDER, resumed_at)
            forget_after(run.validation_folder, resumed_at)
            self._logger = logger = run.logger("rl", self._total, resumed_at)
        receivers: list[WeightReceiver] = [self._engine]
        if self._published is not None:
            receivers.append(self._published)
        try:
            if run.held_out and trainer.val_before_train and self._resume is None:
                logger.log(0, await self._validate(0))
            if run.interrupt.requested:
                return False
            if self._drafter is not None:
                # Now, so that its time is not part of the first step.
                with run.span("setup"):
                    await self._drafter.begin()
            run.progress.status(self._watch.status)
            history = await run_rl_training(
                self._backend,
                self._data,
                self._rollouts,
                receivers,
                rl_config(run.config, self._total, done),
                logger,
                reference=self._reference if wants_ref_log_probs(run.config) else None,
                critic=self._critic,
                kl_in_reward=self._kl,
                drafter=self._drafter,
                after_step=self._after_step,
                save=self._save,
                notify=run.progress.note,
                deadlines=run.deadlines,
            )
            with run.span("save_checkpoint"):
                await self._saves.finish()
        except Exception:
            await self._saves.give_up()
            raise
        finally:
            run.progress.status(None)
            logger.close()
            await self._rollouts.close()
        return done + len(history) >= self._total

    def close(self) -> None:
        close_parts(
            self._run.deadlines,
            self._drafter,
            self._backend,
            self._reference,
            self._critic,
            self._engine,
        )

    @property
    def _rollout_folder(self) -> Path:
        return Path(self._run.config.trainer.rollout_data_dir or self._run.folder / "rollouts")

    async def _restore(self) -> int:
        """Load the checkpoint to resume from, if any. Returns the number of steps already done."""
        done = 0
        if (resume := self._resume) is not None:
            note = self._run.progress.note
            done = self._run.compute.run(
                lambda: restore_rl(
                    self._snapshots,
                    resume,
                    self._backend,
                    self._data,
                    self._rollouts,
                    note,
                    kl=self._kl,
                    published=self._published,
                )
            )
            if self._drafter is not None:
                await self._drafter.restore(resume)
        if self._published is not None and not self._published.tensors:
            await self._published.update_weights(self._backend.publish(advance=False))
        if self._resume is not None:
            await self._engine.update_weights(
                self._backend.publish(advance=False)
                if self._published is None
                else self._published.as_update()
            )
        return done

    async def _after_step(
        self, step: int, groups: Sequence[Group], metrics: dict[str, float], timers: Timers
    ) -> bool:
        run = self._run
        self._saves.check()
        with timers.span("dump_rollout_generations"):
            path = self._rollout_folder / f"{step}.jsonl"
            dump_groups(path, groups, run.tokenizer, step, run.decode)
            shown = dump_tokens(path.parent / TOKENS_FOLDER, groups, run.tokenizer, step)
        for sample in shown[:1]:
            label = f"reward {short(sample['score'])}:"
            run.progress.sample(label, sample["pieces"], sample["drafted"])
        if (source := self._data.listener) is not None:
            batch = proto_of_step(groups, self._rollouts.rejected, run.decode, source.place_of)
            source.on_batch_end(batch)
        metrics |= self._watch.metrics()
        if run.held_out and _due(step, run.config.trainer.test_freq, self._total):
            with timers.span("testing"):
                metrics |= await self._validate(step)
        return run.interrupt.requested

    async def _validate(self, step: int) -> dict[str, float]:
        with self._run.span("testing", step=step):
            async with self._with_trained_weights(step):
                evaluation = await self._run.validate([self._engine])
            self._run.record_validation("rl", step, evaluation, self._logger)
        self._watch.skip()
        return evaluation.metrics

    @contextlib.asynccontextmanager
    async def _with_trained_weights(self, step: int) -> AsyncIterator[None]:
        """Give the engine the trainer's weights during the body, and its own weights afterwards."""
        if self._published is None or step % self._run.config.trainer.sync_every == 0:
            yield
            return
        await self._engine.update_weights(self._backend.publish(advance=False))
        try:
            yield
        finally:
            await self._engine.update_weights(self._published.as_update())

    async def _save(self, step: int, stopping: bool, timers: Timers) -> None:
        freq = self._run.config.trainer.save_freq
        if not (stopping or step == self._total or (freq > 0 and step % freq == 0)):
            return
        state: dict[str, Any] = {
            "data_buffer": self._data.state_dict(),
            "rollouts": self._rollouts.state_dict(),
        }
        if self._kl is not None:
            state["kl_in_reward"] = self._kl.state_dict()
        with timers.span("save_checkpoint"), self._run.span("save_checkpoint", step=step):
            await self._saves.begin(
                lambda go_on: self._snapshots.save(
                    step,
                    self._backend,
                    state,
                    self._published,
                    self._drafter,
                    self._critic,
                    go_on,
                )
            )


def check_rl(run: Run, start: Path | None) -> None:
    """Raise the errors that would stop RL at its start.

    It checks names against the registries, prompts, whether the engine can serve the model, the
    size of the co-training buffer, and the reference and critic with their tokenizers.
    """
    config, policy = run.config, model_config(run.config, run.tokenizer, start)
    if isinstance(policy, ModelConfig):
        check_speculation(config, policy, max_model_len(config))
    steps = rl_steps(config, run.data)
    rl_config(config, steps, 0)
    actor_optim(config, steps)
    if wants_critic(config):
        if process_count(config) > 1:
            raise ConfigError(
                f"algorithm.adv_estimator={config.algorithm.adv_estimator} uses a critic, which "
                "cannot run in several processes; set trainer.nnodes=1 and "
                "trainer.n_gpus_per_node to at most 1, or another estimator"
            )
        critic_optim(config, steps)
    check_engine(config, policy)
    if isinstance(policy, ModelConfig):
        check_cotraining(config, policy, steps)
    if (path := config.actor_rollout_ref.ref.path) is not None:
        folder = policy_folder(Path(path))
        model = config.actor_rollout_ref.model
        reference = policy_config(
            folder, model.implementation, positions=model.override_config.max_position_embeddings
        )
        check_reference(config, reference, policy, folder, run.tokenizer)
    if (path := config.critic.model.path) is not None and wants_critic(config):
        positions = config.critic.model.override_config.max_position_embeddings
        critic = load_config(policy_folder(Path(path)), positions=positions)
        check_critic(config, critic, run.tokenizer, policy)


def result_of_sft(run: Run) -> Path | None:
    """The policy of an earlier SFT in this folder; None if there was none."""
    result = run.sft_result(run.folder)
    if result is not None:
        run.progress.note(f"RL starts from the SFT in this folder: {result}")
    return result


def start_of_rl(run: Run, rl_checkpoint: Path) -> Path | None:
    """The policy that RL started from, for a run of mode sft+rl that resumes from `rl_checkpoint`.

    A reference policy needs it, and so does a LoRA adapter, which belongs to these weights. Raises
    CheckpointError if it is needed and no longer exists.
    """
    start = run.sft_result(rl_checkpoint.parent)
    actor = run.config.actor_rollout_ref
    if start is None and (actor.model.lora_rank or actor.model.lora_adapter_path is not None):
        raise CheckpointError(
            f"the LoRA adapter in {rl_checkpoint} belongs to the weights that RL started from, the "
            f"result of SFT, but {rl_checkpoint.parent / 'sft'} has no checkpoint any more; put it "
            "back, or start a new run from the merged weights with trainer.mode=rl and "
            f"actor_rollout_ref.model.path={huggingface_folder(rl_checkpoint)}"
        )
    needs = wants_reference(run.config)
    if start is None and needs and actor.ref.path is None:
        raise CheckpointError(
            f"the KL term compares with the policy that RL started from, the result of SFT, but "
            f"{rl_checkpoint.parent / 'sft'} has no checkpoint any more; put it back, or continue "
            "in a new trainer.default_local_dir with trainer.resume_mode=resume_path, "
            f"trainer.resume_from_path={rl_checkpoint} and actor_rollout_ref.ref.path=FOLDER"
        )
    return huggingface_folder(rl_checkpoint) if start is None else start


async def _save(run: Run, write: Callable[[], object]) -> None:
    """Write a checkpoint off the event loop, within the deadline of a stage."""
    async with run.deadlines.stage("checkpoint", "writing it to disk"):
        await run_in_daemon(write)


def _due(step: int, freq: int, last: int | None) -> bool:
    return step == last or (freq > 0 and step % freq == 0)


@contextlib.contextmanager
def _timed(run: Run, phase: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        with run.span(phase):
            yield
    finally:
        run.seconds[phase] = time.perf_counter() - started
