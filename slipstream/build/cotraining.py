"""Builds co-training of the draft head. Called by `run.phases`, on the compute thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from slipstream.build.draft import train_settings
from slipstream.build.engine import rollout_dtype
from slipstream.build.policy import device_of, max_model_len
from slipstream.build.rollouts import sampling_params
from slipstream.build.speculation import first_head, head_aux_layers
from slipstream.config.schema import Config
from slipstream.deadlines import Deadlines
from slipstream.drafter.buffer import BufferSettings, DraftBuffer
from slipstream.drafter.collector import CollectorSettings, FeatureCollector
from slipstream.drafter.cotraining import CoTraining, CoTrainSettings
from slipstream.drafter.decoded import DecodedFeatures
from slipstream.drafter.interval import IntervalTraining
from slipstream.drafter.opportunistic import OpportunisticTraining
from slipstream.drafter.sequences import VocabLayers
from slipstream.drafter.worker import WorkerSetup
from slipstream.errors import ConfigError
from slipstream.inference.protocol import InferenceEngine
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.policy import Policy
from slipstream.threads import usable_cores
from slipstream.training.compute_thread import ComputeThread


def check_cotraining(config: Config, policy: ModelConfig, total_steps: int) -> None:
    """Raise ConfigError if the buffer cannot hold the longest response, the learning-rate schedule
    has no steps to decay over, or there is no core for a separate process."""
    train = config.speculative.train
    if not train.enable_drafter_training:
        return
    if train.mode == "opportunistic":
        _check_opportunistic(config)
    optim, key = train.optim, "speculative.train.optim"
    steps = training_steps(config, total_steps)
    if optim.lr_scheduler_type != "constant" and steps <= optim.lr_warmup_steps:
        raise ConfigError(
            f"{key}.lr_scheduler_type={optim.lr_scheduler_type} has nothing to decay over: "
            f"{total_steps} RL steps train the draft head {steps} times, with "
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps}; set {key}.lr_scheduler_type=constant"
        )
    longest = min(train.max_seq_len, max_model_len(config))
    numbers = policy.hidden_size * (1 + len(head_aux_layers(config, policy)))
    nbytes = longest * numbers * rollout_dtype(config).itemsize
    if nbytes > train.buffer_bytes:
        raise ConfigError(
            f"speculative.train.buffer_bytes={train.buffer_bytes}: prompt and response may have "
            f"{longest} tokens, whose hidden states need {nbytes} bytes; set it to several times "
            "that, or lower speculative.train.max_seq_len, which truncates responses"
        )


def _check_opportunistic(config: Config) -> None:
    key = "speculative.train.mode=opportunistic"
    if device_of(config).type != "cpu":
        raise ConfigError(
            f"{key} trains in a process on the CPU, but trainer.device is a GPU; set "
            "speculative.train.mode=interval"
        )
    cores, threads = usable_cores(), torch.get_num_threads()
    few = config.actor_rollout_ref.rollout.one_thread_below
    if cores < 2 or (threads >= cores and not few):
        remedy = "give it more cores"
        if cores > 1:
            remedy = (
                "let the last responses of a rollout decode on one thread "
                "(actor_rollout_ref.rollout.one_thread_below=4), lower trainer.num_threads"
            )
        raise ConfigError(
            f"{key} trains the draft head on idle cores, but the run uses {threads} threads on "
            f"{cores} cores; {remedy}, or set speculative.train.mode=interval"
        )
    optim = config.speculative.train.optim
    if optim.lr_scheduler_type != "constant":
        raise ConfigError(
            f"{key} has no fixed number of steps, so "
            f"speculative.train.optim.lr_scheduler_type={optim.lr_scheduler_type} cannot decay; "
            "set speculative.train.optim.lr_scheduler_type=constant"
        )


def training_steps(config: Config, rl_steps: int) -> int:
    """The maximum number of optimizer steps of the draft head in `rl_steps` RL steps."""
    train = config.speculative.train
    return rl_steps // train.training_interval_steps * train.updates_per_training


def make_cotraining(
    config: Config,
    policy: Policy,
    engines: Sequence[InferenceEngine],
    compute: ComputeThread,
    *,
    vocab: Callable[[], VocabLayers] | None = None,
    total_steps: int,
    notify: Callable[[str], None],
    deadlines: Deadlines,
) -> IntervalTraining | OpportunisticTraining | None:
    """Build co-training by `speculative.train` for `total_steps` RL steps; None if not enabled.

    `vocab` copies embedding and LM head of the trained policy, if that is not `policy` itself.
    """
    train = config.speculative.train
    if not train.enable_drafter_training:
        return None
    assert isinstance(policy, Decoder), "only the decoder has draft heads"
    buffer = BufferSettings(
        max_bytes=train.buffer_bytes,
        lookback_steps=train.lookback_steps,
        long_share=train.long_share,
        max_uses=train.max_epochs,
    )
    head, _ = first_head(config, policy)
    params = sampling_params(config)
    if not all(engine.capabilities.keyed_noise for engine in engines):
        # Acceptance cannot be measured with the noise that sampled a response. Such engines draft
        # the likeliest tokens.
        params = replace(params, temperature=0.0)
    collector = CollectorSettings(
        params=params,
        max_length=train.max_seq_len,
        held_out=train.held_out_samples,
        held_out_every=train.held_out_every,
        aux_layers=head.aux_layers,
    )
    is_new = config.speculative.eagle.spec_model_path is None
    settings = CoTrainSettings(
        train=train_settings(config, head, train.optim, training_steps(config, total_steps)),
        updates=train.updates_per_training,
        batch_size=train.batch_size_per_gpu,
        accept_depth=train.accept_depth,
        ema_decay=train.ema_decay,
        is_new=is_new,
        sizes_vocabulary=is_new and config.speculative.eagle.draft_vocab_size == "auto",
    )
    decoded = None
    if train.collect_hidden_states_from_engine:
        decoded = DecodedFeatures(train.buffer_bytes)
    vocab = vocab or partial(VocabLayers.of, policy, rollout_dtype(config))
    if train.mode == "opportunistic":
        setup = WorkerSetup(
            blank=head.blank(),
            weights={name: t.detach().clone() for name, t in head.state_dict().items()},
            version=0,
            collector=collector,
            buffer=buffer,
            train=settings,
            start_stopped=usable_cores() <= torch.get_num_threads(),
        )
        lenders = [engine for engine in engines if engine.capabilities.one_thread_tail]
        return OpportunisticTraining(
            setup,
            vocab,
            engines,
            compute,
            lenders=lenders if setup.start_stopped else (),
            notify=notify,
            deadlines=deadlines,
            decoded=decoded,
        )
    return IntervalTraining(
        CoTraining(
            head.to(device_of(config)),
            FeatureCollector(DraftBuffer(buffer), collector, decoded),
            settings,
        ),
        vocab,
        engines,
        compute,
        interval=train.training_interval_steps,
        notify=notify,
        deadlines=deadlines,
        decoded=decoded,
    )
