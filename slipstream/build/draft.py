"""Builds the training of a draft head: policy, responses, trainer.

Called by `run.draft_phase`, on the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from slipstream.build.data import make_data_buffer, make_decode, validation_prompts
from slipstream.build.engine import check_engine, engine_settings, rollout_dtype
from slipstream.build.policy import add_adapter, device_of, make_decoder
from slipstream.build.rollouts import sampling_params
from slipstream.build.speculation import first_head, head_aux_layers
from slipstream.config.engines import ENGINE_KEY, engine_lacks, engines_with
from slipstream.config.schema import Config
from slipstream.config.schema_speculative import DrafterOptimSection
from slipstream.data.registry import Task
from slipstream.drafter.acceptance import HeldOut
from slipstream.drafter.sequences import VocabLayers, written
from slipstream.drafter.trainer import DraftTrainer, DraftTrainSettings
from slipstream.errors import ConfigError
from slipstream.inference.engine import Engine
from slipstream.loops.draft import DraftLoopSettings
from slipstream.loops.draft_data import (
    FreshResponses,
    RecordedResponses,
    Responder,
    SequenceSource,
    read_rollouts,
)
from slipstream.models.digest import weights_digest
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.model import DraftModel
from slipstream.training.optim import OptimSettings
from slipstream.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """The objects for training a draft head. `policy_digest` identifies the policy."""

    trainer: DraftTrainer
    source: SequenceSource
    vocab: VocabLayers
    responder: Responder
    held_out: list[Prompt]
    policy_digest: str

    def hold_out(self, stop: Callable[[], bool]) -> list[HeldOut] | None:
        """The responses on which acceptance is measured; None if `stop` became true."""
        return self.responder.respond(self.held_out, "draft-val", stop)


def check_draft(config: Config) -> None:
    """Raise ConfigError for settings with which a draft head cannot be trained."""
    if config.actor_rollout_ref.model.path is None:
        raise ConfigError(
            "a draft head needs a trained policy; set actor_rollout_ref.model.path=FOLDER "
            "and actor_rollout_ref.model.init=null, or give a run with --checkpoint DIR"
        )
    if engine_lacks(config, lambda engine: engine.hidden_states):
        raise ConfigError(
            f"{ENGINE_KEY}={config.actor_rollout_ref.rollout.name} returns no hidden states, "
            "but a draft head trains on them; set "
            f"{engines_with(lambda engine: engine.hidden_states)}"
        )
    if config.data.task is None and config.data.train_files is None:
        raise ConfigError(
            "a draft head needs prompts for the policy to answer; set data.train_files=FILE or "
            "data.task=countdown"
        )
    if config.trainer.val_only:
        raise ConfigError(
            "trainer.val_only=true trains nothing, but `slipstream draft` trains a draft head; set "
            "trainer.val_only=false"
        )


def make_parts(
    config: Config, tokenizer: PreTrainedTokenizerBase, task: Task | None, policy: Path | None
) -> DraftParts:
    """Build all objects for training a draft head of the policy in the folder `policy`.

    Raises ConfigError for impossible settings, and CheckpointError for a draft head of another
    policy.
    """
    check_draft(config)
    draft, train = config.speculative.draft, config.speculative.train
    decoder = make_decoder(config, tokenizer, policy)
    if config.actor_rollout_ref.model.lora_adapter_path is not None:
        add_adapter(config, decoder, first=True)
    check_engine(config, decoder.config)
    limits = engine_settings(config, decoder.config)
    data = make_data_buffer(config, tokenizer, task)
    records = None
    if draft.rollout_files is not None:
        records = read_rollouts(draft.rollout_files, vocab_size=decoder.config.vocab_size)

    decode = make_decode(config, tokenizer, decoder.config.eos_token_ids)
    aux_layers = head_aux_layers(config, decoder.config, counts=True)
    responder = Responder(
        engine=Engine(decoder, limits, decode=decode, aux_layers=aux_layers),
        params=sampling_params(config),
        seed=config.trainer.seed,
    )
    # Without validation prompts: training prompts with another noise key.
    held_out = validation_prompts(config, tokenizer, task, count=draft.held_out_samples)
    held_out = held_out or data.get_prompts(draft.held_out_samples)
    known = list[HeldOut]()

    def first_answers() -> list[list[int]]:
        if records is not None:
            return [response for _, response in records]
        # The first round uses the same prompts again.
        before = data.state_dict()
        known.extend(responder.first(data.get_prompts(draft.samples_per_round)))
        data.load_state_dict(before)
        return [written(answer.sequence) for answer in known]

    head, _ = first_head(config, decoder, first_answers)
    source: SequenceSource
    if records is None:
        source = FreshResponses(
            responder,
            data,
            samples=draft.samples_per_round,
            max_length=train.max_seq_len,
            known=known or None,
        )
    else:
        with torch.no_grad():
            packed = decoder.pack(limits.dtype)
        source = RecordedResponses(
            packed,
            records,
            samples=draft.samples_per_round,
            max_length=train.max_seq_len,
            seed=config.trainer.seed,
            aux_layers=head.aux_layers,
        )
    vocab = VocabLayers.of(decoder, limits.dtype)
    return DraftParts(
        trainer=DraftTrainer(
            head.to(device_of(config)),
            train_settings(config, head, draft.optim, draft.total_training_steps),
        ),
        source=source,
        vocab=vocab,
        responder=responder,
        held_out=held_out,
        policy_digest=weights_digest(decoder),
    )


def train_settings(
    config: Config, head: DraftModel, optim: DrafterOptimSection, total_steps: int
) -> DraftTrainSettings:
    """Settings of a training step of `head`: `speculative.train`, with an optimizer for
    `total_steps` steps. Raises ConfigError for a loss that such a head does not have."""
    train, eagle3 = config.speculative.train, isinstance(head, Eagle3Head)
    value_weight, depth, depth_decay = (0.0, 5, 0.8) if eagle3 else (1.0, 1, 1.0)
    if eagle3 and train.value_weight:
        raise ConfigError(
            f"speculative.train.value_weight={train.value_weight:g}: an EAGLE3 head predicts no "
            "features; set speculative.train.value_weight=null"
        )
    muon_lr = optim.muon_lr
    if muon_lr == "auto":
        muon_lr = default_muon_lr(head.config.hidden_size)
    topk, tokens = config.speculative.eagle.spec_topk, head.draft_vocab_size
    if train.topk_mass_weight and topk >= tokens:
        raise ConfigError(
            f"speculative.train.topk_mass_weight={train.topk_mass_weight:g}: the "
            f"head drafts only {tokens} tokens, so the speculative.eagle.spec_topk={topk} best are "
            f"all of them; set speculative.eagle.spec_topk below {tokens}, or "
            "speculative.train.topk_mass_weight=0"
        )
    return DraftTrainSettings(
        optim=OptimSettings(
            lr=optim.lr,
            optimizer=optim.optimizer,
            muon_lr=muon_lr if optim.optimizer == "Muon" else None,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            warmup_steps=optim.lr_warmup_steps,
            schedule=optim.lr_scheduler_type,
            min_lr_ratio=optim.min_lr_ratio or 0.0,
            total_steps=total_steps,
        ),
        compute_dtype=rollout_dtype(config),
        grad_clip=train.grad_clip,
        value_weight=value_weight if train.value_weight is None else train.value_weight,
        soft_weight=train.soft_weight,
        acceptance_weight=train.acceptance_weight,
        topk_mass_weight=train.topk_mass_weight,
        topk=topk,
        depth=depth if train.depth is None else train.depth,
        depth_decay=depth_decay if train.depth_decay is None else train.depth_decay,
        feature_noise=train.feature_noise,
        seed=config.trainer.seed,
    )


def default_muon_lr(hidden_size: int) -> float:
    """Return Muon's peak learning rate for a new head.

    The best rates measured are 0.05 for hidden sizes of 128 and 192, and 0.01 for 576
    (docs/log/draft_heads.md).
    """
    return float(0.05 * min(1.0, 192 / hidden_size) ** 1.5)


def loop_settings(config: Config) -> DraftLoopSettings:
    """The step counts of the loop."""
    draft, batch_size = config.speculative.draft, config.speculative.train.batch_size_per_gpu
    a_pass = -(-draft.samples_per_round // batch_size)
    return DraftLoopSettings(
        total_steps=draft.total_training_steps,
        steps_per_round=draft.steps_per_round or draft.epochs_per_round * a_pass,
        batch_size=batch_size,
        steps_per_pass=a_pass,
        seed=config.trainer.seed,
    )
