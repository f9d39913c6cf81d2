"""What the settings come to: prompts, samples, tokens, optimizer steps and micro-batches.

Called by `dry_run` and `memory_estimate`. Nothing here is decided: it is what trainer and engine
will do by themselves.
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
    """Tokens of an optimizer step and of a forward pass, the texts at most as long as allowed."""

    steps: int
    step_tokens: int
    micro_batch_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RlBatches:
    """Of one step, all responses as long as they may be: `tokens` with their prompts; an update of
    the policy has `updates` optimizer steps, of `mini_prompts` prompts each, in `micro_batches`
    forward passes of `micro_batch_tokens` at most. `in_flight` responses are decoded at once."""

    steps: int
    prompts: int
    started: int
    """Prompts with those of over-sampling."""
    per_prompt: int
    samples: int
    tokens: int
    updates: int
    mini_prompts: int
    mini_samples: int
    micro_batch_tokens: int
    micro_batches: int
    critic_micro_batch_tokens: int
    in_flight: int
    processes: int
    """They share an update's samples, and what is decoded; so `micro_batches`, the tokens of one
    and `in_flight` are those of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """`validation`: responses that are decoded at once there; 0: nothing is validated.
    `val_per_prompt`: of the source that has most."""

    sft: SftBatches | None
    rl: RlBatches | None
    longest: int
    """Tokens of prompt and response."""
    held_out: int
    val_per_prompt: int
    validation: int


def batches_of(config: Config, mode: Mode, *, rl_steps: int, held_out: int) -> Batches:
    """`rl_steps` of RL, where it has some, and `held_out` prompts to validate on."""
    rollout = config.actor_rollout_ref.rollout
    own = rollout.val_kwargs.n
    most = max([own, *(val_settings(config, name).n for name in rollout.val_kwargs.by_source)])
    at_once = min(held_out, config.data.val_batch_size or held_out) * most
    return Batches(
        sft=_sft(config) if "sft" in mode else None,
        rl=_rl(config, rl_steps) if "rl" in mode else None,
        longest=_longest(config),
        held_out=held_out,
        val_per_prompt=most,
        validation=min(at_once, rollout.max_num_seqs),
    )


def _longest(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _sft(config: Config) -> SftBatches:
    sft = config.sft
    # A text is taken whole.
    step = sft.batch_tokens + sft.max_length - 1
    return SftBatches(
        steps=sft.total_training_steps,
        step_tokens=sft.batch_tokens,
        micro_batch_tokens=min(sft.max_tokens_per_micro_batch, step),
    )


def _rl(config: Config, steps: int) -> RlBatches:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    prompts, n = config.data.train_batch_size, rollout.n
    mini = actor.ppo_mini_batch_size or prompts
    longest = _longest(config)
    # Of each process, as near as their lengths allow.
    processes = process_count(config)
    own_samples = math.ceil(mini * n / processes)
    mini_tokens = own_samples * longest
    # A forward pass takes so many tokens, or sequences.
    budget = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
    rows = actor.ppo_micro_batch_size_per_gpu
    if budget is not None:
        most = min(budget, mini_tokens)
        passes = math.ceil(own_samples / max(1, budget // longest))
    else:
        rows = rows or own_samples
        most, passes = min(rows * longest, mini_tokens), math.ceil(own_samples / rows)
    own = critic_budget(config)
    critic_rows = config.critic.ppo_micro_batch_size_per_gpu or rows or mini * n
    critic_tokens = critic_rows * longest if own is None else own
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
        in_flight=min(math.ceil(started * (n + greedy) / processes), rollout.max_num_seqs),
        processes=processes,
    )


def rows_of(batches: Batches) -> Iterator[tuple[str, str]]:
    """Of the table: what, and how much of it."""
    if (sft := batches.sft) is not None:
        yield "SFT steps", f"{sft.steps:,}"
        yield "an SFT step", f"{sft.step_tokens:,} tokens"
        yield "its micro-batches", f"at most {sft.micro_batch_tokens:,} tokens"
    if (rl := batches.rl) is not None:
        yield "RL steps", f"{rl.steps:,}"
        extra = f", {rl.started:,} started" if rl.started > rl.prompts else ""
        yield (
            "an RL step",
            f"{rl.prompts:,} prompts{extra} x {rl.per_prompt:,} responses = {rl.samples:,} samples",
        )
        yield "a sample", f"at most {batches.longest:,} tokens, prompt and response"
        yield "tokens of a step", f"at most {rl.tokens:,}"
        several, each = rl.processes > 1, " in each process" if rl.processes > 1 else ""
        if several:
            yield "processes", f"{rl.processes:,}, which share samples and weights"
        yield "decoded at once", f"at most {rl.in_flight:,} responses{each}"
        yield (
            "updates of a step",
            f"{rl.updates:,} of {rl.mini_prompts:,} prompts = {rl.mini_samples:,} samples",
        )
        yield (
            "their micro-batches",
            f"at most {rl.micro_batches:,} of at most {rl.micro_batch_tokens:,} tokens{each}",
        )
    if batches.held_out:
        several = batches.val_per_prompt > 1
        each = f" x {batches.val_per_prompt} responses (at most)" if several else ""
        yield (
            "a validation",
            f"{batches.held_out:,} prompts{each}, at most {batches.validation:,} decoded at once",
        )
    else:
        yield "a validation", "none: there are no validation prompts"
