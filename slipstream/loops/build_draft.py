"""Wiring of a draft head's training: policy, responses, trainer.

Every function takes the configuration and gives one part. Called by `loops.draft`, on the compute
thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.config.schema import Config
from slipstream.config.schema_speculative import DrafterOptimConfig
from slipstream.drafter.acceptance import HeldOut
from slipstream.drafter.sequences import PolicyEnds
from slipstream.drafter.trainer import DraftTrainer, DraftTrainSettings
from slipstream.environment.registry import Task
from slipstream.errors import ConfigError
from slipstream.inference.engine import Engine
from slipstream.loops import build
from slipstream.loops.build_speculation import first_head
from slipstream.loops.draft import DraftLoopSettings
from slipstream.loops.draft_data import (
    FreshResponses,
    RecordedResponses,
    Responder,
    SequenceSource,
    read_rollouts,
)
from slipstream.training.optim import OptimSettings
from slipstream.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """What a draft head's training is made of. `policy_digest` tells policies apart."""

    trainer: DraftTrainer
    source: SequenceSource
    ends: PolicyEnds
    responder: Responder
    held_out: list[Prompt]
    policy_digest: str

    def hold_out(self, stop: Callable[[], bool]) -> list[HeldOut] | None:
        """The responses that acceptance is measured on; None where `stop` became true."""
        return self.responder.respond(self.held_out, "draft-val", stop)


def check_draft(config: Config) -> None:
    """Refuse what a draft head cannot be trained with. Raises ConfigError."""
    if config.actor_rollout_ref.model.path is None:
        raise ConfigError(
            "a draft head learns from a trained policy; set actor_rollout_ref.model.path=FOLDER "
            "and actor_rollout_ref.model.init=null, or give a run with --checkpoint DIR"
        )
    name = config.actor_rollout_ref.rollout.name
    if name != "embedded":
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={name} hands over no hidden states, which a draft "
            "head learns from; set actor_rollout_ref.rollout.name=embedded"
        )
    if config.data.task is None and config.data.train_files is None:
        raise ConfigError(
            "a draft head needs prompts for the policy to answer; set data.train_files=FILE or "
            "data.task=countdown"
        )
    if config.trainer.val_only:
        raise ConfigError(
            "trainer.val_only=true trains nothing, and `slipstream draft` trains a draft head; set "
            "trainer.val_only=false"
        )


def make_parts(
    config: Config, tokenizer: PreTrainedTokenizerBase, task: Task | None, policy: Path | None
) -> DraftParts:
    """Everything, for the policy in the folder `policy`.

    Raises ConfigError where the settings do not allow it, and CheckpointError for a draft head of
    another policy.
    """
    check_draft(config)
    draft, train = config.speculative.draft, config.speculative.train
    decoder = build.make_decoder(config, tokenizer, policy)
    build.check_engine(config, decoder.config)
    engine_settings = build.engine_settings(config, decoder.config)
    decode = build.decode_with(tokenizer)
    responder = Responder(
        engine=Engine(decoder, engine_settings, decode=decode),
        params=build.sampling_params(config),
        seed=config.trainer.seed,
    )
    data = build.make_data_buffer(config, tokenizer, task)
    held_out = build.validation_prompts(config, tokenizer, task, count=draft.held_out_samples)
    source: SequenceSource
    if draft.rollout_files is None:
        source = FreshResponses(
            responder, data, samples=draft.samples_per_round, max_length=train.max_seq_len
        )
    else:
        with torch.no_grad():
            packed = decoder.pack(engine_settings.dtype)
        source = RecordedResponses(
            packed,
            read_rollouts(draft.rollout_files, vocab_size=decoder.config.vocab_size),
            samples=draft.samples_per_round,
            max_length=train.max_seq_len,
            seed=config.trainer.seed,
        )
    head, _ = first_head(config, decoder.config)
    ends = PolicyEnds.of(decoder, engine_settings.dtype)
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in decoder.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return DraftParts(
        trainer=DraftTrainer(
            head.to(build.device_of(config)),
            train_settings(config, draft.optim, draft.total_training_steps),
        ),
        source=source,
        ends=ends,
        responder=responder,
        # Without validation prompts: training prompts, answered with other noise.
        held_out=held_out or data.get_prompts(draft.held_out_samples),
        policy_digest=digest.hexdigest(),
    )


def train_settings(
    config: Config, optim: DrafterOptimConfig, total_steps: int
) -> DraftTrainSettings:
    """What one training step does: `speculative.train`, with an optimizer for so many steps."""
    train = config.speculative.train
    return DraftTrainSettings(
        optim=OptimSettings(
            lr=optim.lr,
            optimizer=optim.optimizer,
            muon_lr=optim.muon_lr if optim.optimizer == "Muon" else None,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            warmup_steps=optim.lr_warmup_steps,
            schedule=optim.lr_scheduler_type,
            min_lr_ratio=optim.min_lr_ratio or 0.0,
            total_steps=total_steps,
        ),
        compute_dtype=build.rollout_dtype(config),
        grad_clip=train.grad_clip,
        value_weight=train.value_weight,
        soft_weight=train.soft_weight,
        acceptance_weight=train.acceptance_weight,
        depth=train.depth,
        depth_decay=train.depth_decay,
        feature_noise=train.feature_noise,
        seed=config.trainer.seed,
    )


def loop_settings(config: Config) -> DraftLoopSettings:
    """Lengths of the loop."""
    draft = config.speculative.draft
    return DraftLoopSettings(
        total_steps=draft.total_training_steps,
        steps_per_round=draft.steps_per_round,
        batch_size=config.speculative.train.batch_size_per_gpu,
        seed=config.trainer.seed,
    )
