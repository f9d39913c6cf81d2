"""Wiring of co-training: the head that learns, what it learns from, and when.

Every function takes the configuration and gives one part. Called by `loops.phases`, on the compute
thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.config.schema import Config
from slipstream.drafter.buffer import BufferSettings, DraftBuffer
from slipstream.drafter.collector import CollectorSettings, FeatureCollector
from slipstream.drafter.cotraining import CoTraining, CoTrainSettings
from slipstream.errors import ConfigError
from slipstream.loops import build
from slipstream.loops.build_draft import train_settings
from slipstream.loops.build_speculation import first_head
from slipstream.loops.cotrain import DraftReceiver, IntervalTraining
from slipstream.loops.stages import Stages
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.training.compute_thread import ComputeThread


def check_cotraining(config: Config, policy: ModelConfig, total_steps: int) -> None:
    """Refuse a buffer that the longest response does not fit into, and a learning rate that has
    no steps to fall in. Raises ConfigError."""
    train = config.speculative.train
    if not train.enable_drafter_training:
        return
    optim, key = train.optim, "speculative.train.optim"
    steps = training_steps(config, total_steps)
    if optim.lr_scheduler_type != "constant" and steps <= optim.lr_warmup_steps:
        raise ConfigError(
            f"{key}.lr_scheduler_type={optim.lr_scheduler_type} has nothing to decay over: "
            f"{total_steps} RL steps train the draft model {steps} times, with "
            f"{key}.lr_warmup_steps={optim.lr_warmup_steps}; set {key}.lr_scheduler_type=constant"
        )
    longest = min(train.max_seq_len, build.max_model_len(config))
    nbytes = longest * policy.hidden_size * build.rollout_dtype(config).itemsize
    if nbytes > train.buffer_bytes:
        raise ConfigError(
            f"speculative.train.buffer_bytes={train.buffer_bytes}: prompt and response may take "
            f"{longest} tokens, whose features need {nbytes}; raise it to several times that, or "
            "lower speculative.train.max_seq_len, after which responses are cut off"
        )


def training_steps(config: Config, rl_steps: int) -> int:
    """Optimizer steps of the draft model in so many RL steps, at most."""
    train = config.speculative.train
    return rl_steps // train.training_interval_steps * train.updates_per_training


def make_cotraining(
    config: Config,
    policy: Decoder,
    engines: Sequence[DraftReceiver],
    compute: ComputeThread,
    *,
    total_steps: int,
    notify: Callable[[str], None],
    stages: Stages,
) -> IntervalTraining | None:
    """After `speculative.train`, beside the trainer of `policy` for `total_steps` RL steps; None
    where it is not enabled."""
    train = config.speculative.train
    if not train.enable_drafter_training:
        return None
    buffer = DraftBuffer(
        BufferSettings(
            max_bytes=train.buffer_bytes,
            lookback_steps=train.lookback_steps,
            long_share=train.long_share,
            max_uses=train.max_epochs,
        )
    )
    collector = FeatureCollector(
        buffer,
        CollectorSettings(
            params=build.sampling_params(config),
            max_length=train.max_seq_len,
            held_out=train.held_out_samples,
            held_out_every=train.held_out_every,
        ),
    )
    settings = CoTrainSettings(
        train=train_settings(config, train.optim, training_steps(config, total_steps)),
        updates=train.updates_per_training,
        batch_size=train.batch_size_per_gpu,
        accept_depth=train.accept_depth,
    )
    head, _ = first_head(config, policy.config)
    return IntervalTraining(
        CoTraining(head.to(build.device_of(config)), collector, settings),
        policy,
        engines,
        compute,
        interval=train.training_interval_steps,
        dtype=build.rollout_dtype(config),
        notify=notify,
        stages=stages,
    )
