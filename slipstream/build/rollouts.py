"""Builds the rollout manager, and the sampling settings of training and validation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from slipstream.build.algorithm import (
    group_filter,
    wants_greedy,
)
from slipstream.build.episodes import make_episodes, turn_ends
from slipstream.config.schema import Config
from slipstream.config.schema_actor import ValKwargsSection
from slipstream.config.val_settings import val_settings
from slipstream.data.data_buffer import DataBuffer
from slipstream.inference.protocol import InferenceEngine
from slipstream.loops.evaluate import EvalSettings
from slipstream.rewards.protocol import RewardManager
from slipstream.rollout.manager import AsyncRolloutManager, RolloutSettings
from slipstream.types import GenerationSink, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def sampling_params(config: Config, more_ends: Sequence[int] = ()) -> SamplingParams:
    """The sampling settings of training rollouts. `more_ends` are tokens that end a turn, in
    addition to end-of-sequence and `rollout.stop_token_ids`."""
    r = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=config.data.max_response_length,
        temperature=r.temperature if r.do_sample else 0.0,
        top_k=r.top_k,
        top_p=r.top_p,
        min_p=r.min_p,
        stop_token_ids=tuple(dict.fromkeys([*r.stop_token_ids, *more_ends])),
        stop=r.stop,
        ignore_eos=r.ignore_eos,
    )


def eval_settings(config: Config, tokenizer: PreTrainedTokenizerBase) -> EvalSettings:
    """The sampling settings of validation (`rollout.val_kwargs`), and what runs its episodes."""
    r = config.actor_rollout_ref.rollout
    episodes = make_episodes(config, tokenizer, evaluation=True)
    more_ends = turn_ends(config, tokenizer)

    def settings(v: ValKwargsSection) -> EvalSettings:
        return EvalSettings(
            params=SamplingParams(
                max_tokens=config.data.max_response_length,
                temperature=v.temperature if v.do_sample else 0.0,
                top_k=v.top_k,
                top_p=v.top_p,
                stop_token_ids=tuple(dict.fromkeys([*r.stop_token_ids, *more_ends])),
                stop=r.stop,
            ),
            seed=config.trainer.seed,
            n=v.n,
            batch_size=config.data.val_batch_size,
            timeout_s=config.trainer.stage_timeout_s,
            episode_timeout_s=r.episode_timeout_s,
            episodes=episodes,
        )

    by_source = {name: settings(val_settings(config, name)) for name in r.val_kwargs.by_source}
    return replace(settings(r.val_kwargs), by_source=by_source)


def make_rollouts(
    config: Config,
    engine: InferenceEngine,
    data_buffer: DataBuffer,
    rewards: RewardManager,
    tokenizer: PreTrainedTokenizerBase,
    *,
    sink: GenerationSink | None = None,
) -> AsyncRolloutManager:
    """Build the rollout manager for one engine. `sink` receives hidden states from decoding."""
    r = config.actor_rollout_ref.rollout
    episodes = make_episodes(config, tokenizer)
    settings = RolloutSettings(
        batch_size=config.data.train_batch_size,
        n=r.n,
        params=sampling_params(config, turn_ends(config, tokenizer)),
        seed=config.trainer.seed,
        over_sampling=r.over_sample_rate,
        partial_rollout=r.partial_rollout,
        timeout_s=r.timeout_s or config.trainer.stage_timeout_s,
        episode_timeout_s=r.episode_timeout_s,
        greedy_baseline=wants_greedy(config),
    )
    wanted = config.algorithm.filter_groups
    if wanted.enable:
        # This many batches of prompts are generated at most to fill one batch.
        tries = wanted.max_num_gen_batches - 1 if wanted.max_num_gen_batches else math.inf
        settings = replace(settings, max_rejected=tries)
    return AsyncRolloutManager(
        [engine],
        data_buffer,
        rewards,
        settings,
        group_filter=group_filter(config),
        sink=sink,
        episodes=episodes,
    )
