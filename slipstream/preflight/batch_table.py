"""Computes the sizes of a run: prompts, samples, tokens, optimizer steps and micro-batches.

It only predicts what trainer and engine will do with the settings, and configures neither. Called
by `dry_run` and `memory_estimate`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.build.algorithm import critic_budget, critic_updates, wants_greedy
from slipstream.build.policy import process_count
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.config.val_settings import val_settings
from slipstream.rollout.manager import with_over_sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class SftBatches:
    """Sizes of SFT: optimizer steps, demonstrations or tokens of one step, and maximum tokens of a
    forward pass. `accumulates`: a step can have several forward passes."""

    steps: int
    step_samples: int | None
    step_tokens: int
    micro_batch_tokens: int
    accumulates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RlBatches:
    """Sizes of one RL step if all prompts and responses have their maximum length.

    `processes` share the samples of an update and the requests of a rollout. So micro-batches and
    `in_flight` are counted for each process.
    """

    steps: int
    prompts: int
    started: int
    """Prompts that a rollout starts; with over-sampling, more than `prompts`."""
    per_prompt: int
    samples: int
    tokens: int
    """Tokens of all samples: prompts and responses."""
    updates: int
    """Optimizer steps of the policy per RL step."""
    mini_prompts: int
    """Prompts of one optimizer step."""
    mini_samples: int
    """Samples of one optimizer step."""
    micro_batch_tokens: int
    """Maximum tokens of one forward pass of the trainer."""
    micro_batches: int
    """Forward passes of one optimizer step."""
    critic_micro_batch_tokens: int
    critic_accumulates: bool
    """Whether an optimizer step of the critic can have several forward passes."""
    in_flight: int
    """Maximum number of responses that are decoded at the same time."""
    processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """Sizes of a whole run; `sft` or `rl` is None if the run does not have this phase."""

    sft: SftBatches | None
    rl: RlBatches | None
    longest: int
    """Maximum tokens of a sample: prompt and response."""
    held_out: int
    """Validation prompts."""
    val_per_prompt: int
    """Responses per validation prompt: the maximum over all data sources."""
    validation: int
    """Maximum number of responses decoded at the same time in a validation; 0 without one."""


def batches_of(config: Config, mode: Mode, *, rl_steps: int, held_out: int) -> Batches:
    """Return the sizes of a run with `rl_steps` RL steps and `held_out` validation prompts."""
    rollout = config.actor_rollout_ref.rollout
    default_n = rollout.val_kwargs.n
    sources = rollout.val_kwargs.by_source
    most = max([default_n, *(val_settings(config, name).n for name in sources)])
    concurrent = min(held_out, config.data.val_batch_size or held_out) * most
    return Batches(
        sft=_sft(config) if "sft" in mode else None,
        rl=_rl(config, rl_steps) if "rl" in mode else None,
        longest=_longest(config),
        held_out=held_out,
        val_per_prompt=most,
        validation=min(concurrent, rollout.max_num_seqs),
    )


def _longest(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _sft(config: Config) -> SftBatches:
    sft = config.sft
    # A step ends with a whole text, so it can exceed batch_tokens by up to max_length - 1.
    step = sft.batch_tokens + sft.max_length - 1
    if sft.train_batch_size is not None:
        step = sft.train_batch_size * sft.max_length
    return SftBatches(
        steps=sft.total_training_steps,
        step_samples=sft.train_batch_size,
        step_tokens=sft.batch_tokens,
        micro_batch_tokens=min(sft.max_tokens_per_micro_batch, step),
        accumulates=sft.max_tokens_per_micro_batch < step,
    )


def _rl(config: Config, steps: int) -> RlBatches:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, n = config.data.train_batch_size, rollout.n
    mini = actor.ppo_mini_batch_size or prompts
    longest = _longest(config)
    # Processes get nearly equal numbers of tokens. With equal lengths, samples are equal, too.
    processes = process_count(config)
    own_samples = math.ceil(mini * n / processes)
    mini_tokens = own_samples * longest
    # Either a number of tokens or a number of sequences limits a forward pass.
    budget = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
    rows = actor.ppo_micro_batch_size_per_gpu
    if budget is not None:
        most = min(budget, mini_tokens)
        passes = math.ceil(own_samples / max(1, budget // longest))
    else:
        rows = rows or own_samples
        most, passes = min(rows * longest, mini_tokens), math.ceil(own_samples / rows)
    token_budget = critic_budget(config)
    critic_rows = config.critic.ppo_micro_batch_size_per_gpu or rows or mini * n
    critic_tokens = critic_rows * longest if token_budget is None else token_budget
    critic_mini = critic_updates(config)[1] * n * longest
    started = with_over_sampling(prompts, rollout.over_sample_rate)
    greedy = 1 if wants_greedy(config) else 0
    return RlBatches(
        steps=steps,
        prompts=prompts,
        started=started,
        per_prompt=n,
        samples=prompts * n,
        tokens=prompts * n * longest,
        updates=actor.ppo_epochs * (prompts // mini),
        mini_prompts=mini,
        mini_samples=mini * n,
        micro_batch_tokens=most,
        micro_batches=passes,
        critic_micro_batch_tokens=min(critic_tokens, critic_mini),
        critic_accumulates=critic_tokens < critic_mini,
        in_flight=min(math.ceil(started * (n + greedy) / processes), rollout.max_num_seqs),
        processes=processes,
    )


def table_rows(batches: Batches) -> Iterator[tuple[str, str]]:
    """Yield the rows of the printed table: a label and a value."""
    if (sft := batches.sft) is not None:
        yield "SFT steps", f"{sft.steps:,}"
        samples, tokens = sft.step_samples, f"{sft.step_tokens:,} tokens"
        yield "SFT step", tokens if samples is None else f"{samples:,} demonstrations"
        yield "SFT micro-batches", f"at most {sft.micro_batch_tokens:,} tokens"
    if (rl := batches.rl) is not None:
        yield "RL steps", f"{rl.steps:,}"
        extra = f" ({rl.started:,} started)" if rl.started > rl.prompts else ""
        yield (
            "RL step",
            f"{rl.prompts:,} prompts{extra} x {rl.per_prompt:,} responses = {rl.samples:,} samples",
        )
        yield "sample", f"at most {batches.longest:,} tokens (prompt + response)"
        yield "tokens per step", f"at most {rl.tokens:,}"
        several, each = rl.processes > 1, " per process" if rl.processes > 1 else ""
        if several:
            yield "processes", f"{rl.processes:,}; they share samples and weights"
        yield "concurrent responses", f"at most {rl.in_flight:,}{each}"
        yield (
            "optimizer steps",
            f"{rl.updates:,} per RL step, each on {rl.mini_prompts:,} prompts = "
            f"{rl.mini_samples:,} samples",
        )
        yield (
            "micro-batches",
            f"at most {rl.micro_batches:,} per optimizer step{each}, each of at most "
            f"{rl.micro_batch_tokens:,} tokens",
        )
    if batches.held_out:
        several = batches.val_per_prompt > 1
        each = f" x at most {batches.val_per_prompt} responses" if several else ""
        yield (
            "validation",
            f"{batches.held_out:,} prompts{each}, at most {batches.validation:,} concurrent",
        )
    else:
        yield "validation", "none: there are no validation prompts"
