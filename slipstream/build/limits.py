"""Checks that sequences fit the token budgets and the context of the policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.build.algorithm import (
    critic_budget,
    wants_critic,
)
from slipstream.build.policy import (
    device_of,
    max_model_len,
    process_count,
    too_long,
)
from slipstream.config.mode import Mode
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.inference.engine.memory import free_bytes
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import supports_varlen
from slipstream.models.numerics import dtype_from_name
from slipstream.models.policy import PolicyConfig
from slipstream.training.packing import fits_micro_batch, padded_length


def check_budgets(config: Config, policy: PolicyConfig, mode: Mode) -> None:
    """Raise ConfigError if one padded sequence exceeds the budget of tokens per forward pass."""
    actor, device = config.actor_rollout_ref.actor, device_of(config)
    dtype = dtype_from_name(actor.dtype, device)
    if isinstance(policy, ModelConfig) and supports_varlen(policy, dtype, device):
        return
    key, longest = "ppo_max_token_len_per_gpu", max_model_len(config)
    budgets: dict[str, tuple[int | None, int]] = {}
    if "sft" in mode:
        sft = config.sft
        budgets["sft.max_tokens_per_micro_batch"] = sft.max_tokens_per_micro_batch, sft.max_length
    if "rl" in mode:
        own = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
        budgets[f"actor_rollout_ref.actor.{key}"] = own, longest
        if wants_critic(config):
            budgets[f"critic.{key}"] = critic_budget(config), longest
    for name, (budget, length) in budgets.items():
        if budget is not None and budget < padded_length(length):
            raise ConfigError(
                f"{name}={budget} cannot hold one sequence of {length} tokens, which has "
                f"{padded_length(length)} tokens with padding; set {name}={padded_length(length)}"
            )


def branches_fit(config: Config) -> Callable[[Sequence[int]], bool]:
    """Return whether branches of given lengths fit into one micro-batch of the policy, and of the
    critic if there is one. Padding is counted, although some backends have none."""
    actor, critic = config.actor_rollout_ref.actor, config.critic
    rows = actor.ppo_micro_batch_size_per_gpu
    tokens = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
    limits = [(tokens, rows if tokens is None else None)]
    if wants_critic(config):
        tokens = critic_budget(config)
        rows = critic.ppo_micro_batch_size_per_gpu or rows
        limits.append((tokens, rows if tokens is None else None))

    def fit(lengths: Sequence[int]) -> bool:
        return all(
            fits_micro_batch(lengths, max_tokens=tokens, max_rows=rows, padded=True)
            for tokens, rows in limits
        )

    return fit


def check_demonstrations(config: Config, policy: PolicyConfig) -> None:
    """Raise ConfigError if SFT texts may be too long for the policy."""
    longest, limit = config.sft.max_length, policy.context_limit
    if longest > limit.tokens:
        raise ConfigError(f"SFT texts {too_long(longest, limit, f'sft.max_length={limit.tokens}')}")


def check_weights(config: Config, policy: PolicyConfig) -> None:
    """Raise ConfigError if the policy's weights alone need more memory than is free, or if
    lora_rank is larger than its matrices.

    They are counted with two bytes per weight, so a run with more free memory may still fail. A
    model of another family has no count.
    """
    if not isinstance(policy, ModelConfig):
        return
    device, count = device_of(config), process_count(config)
    rank = config.actor_rollout_ref.model.lora_rank
    hidden, heads = policy.hidden_size, policy.num_heads + policy.num_kv_heads
    layer = 2 * hidden * policy.head_dim * heads + 3 * hidden * policy.intermediate_size
    weights = policy.num_layers * (layer + 2 * rank * hidden) + policy.vocab_size * hidden
    side = max(hidden, policy.intermediate_size, policy.num_heads * policy.head_dim)
    if rank > side:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={rank} is more than the {side} rows of the "
            f"policy's largest matrix; set at most {side}"
        )
    # All layers use one table with the sine and cosine of each position and entry of a head. When
    # it is made, angles and intermediate results exist, too.
    table = 14 * policy.max_position_embeddings * policy.head_dim
    size = 2 * weights // count + table
    if size > (free := free_bytes(device)):
        raise ConfigError(
            f"the policy has {weights:,} weights and {policy.max_position_embeddings:,} positions, "
            f"which need at least {size / 1e9:,.1f} GB, but {free / 1e9:,.1f} GB are free on "
            f"{device.type}; lower actor_rollout_ref.model.init.* or "
            "actor_rollout_ref.model.lora_rank, or choose a smaller model"
        )
