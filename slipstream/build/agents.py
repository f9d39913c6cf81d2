"""Builds what runs custom generate functions written for slime."""

from __future__ import annotations

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any

from slipstream.build.limits import branches_fit
from slipstream.config.schema import Config
from slipstream.data.end_tokens import end_token_ids
from slipstream.errors import ConfigError
from slipstream.rollout.agents.slime import (
    ROUTER_IP,
    ROUTER_PORT,
    Arguments,
    CustomGenerate,
    Settings,
)
from slipstream.user_code import load_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "actor_rollout_ref.rollout.agent.custom_generate_function_path"


def make_custom_generate(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool
) -> CustomGenerate | None:
    """What runs the episodes of the custom generate function; None if there is none.

    `evaluation` is passed to the function. Raises ConfigError if it cannot be imported or is no
    coroutine function.
    """
    rollout, data = config.actor_rollout_ref.rollout, config.data
    path = rollout.agent.custom_generate_function_path
    if path is None:
        return None
    params: dict[str, Any] = {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "min_p": rollout.min_p,
        "max_new_tokens": data.max_response_length,
        "stop": list(rollout.stop),
        "stop_token_ids": list(rollout.stop_token_ids),
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
    }
    args = Arguments(
        sglang_router_ip=ROUTER_IP,
        sglang_router_port=ROUTER_PORT,
        tokenizer=tokenizer,
        sampling_params=params,
        hf_checkpoint=config.actor_rollout_ref.model.path,
        rollout_temperature=rollout.temperature,
        rollout_top_p=rollout.top_p,
        rollout_top_k=rollout.top_k,
        rollout_stop=list(rollout.stop),
        rollout_stop_token_ids=list(rollout.stop_token_ids),
        rollout_skip_special_tokens=False,
        rollout_seed=config.trainer.seed,
        rollout_max_prompt_len=data.max_prompt_length,
        rollout_max_response_len=data.max_response_length,
        rollout_max_context_len=data.max_prompt_length + data.max_response_length,
        n_samples_per_prompt=rollout.n,
        # A function that was stopped begins again, and does not see it.
        partial_rollout=False,
        custom_generate_function_path=path,
        reward_key=None,
    )
    settings = Settings(
        args=args,
        tokenizer=tokenizer,
        sampling_params=params,
        max_tokens=data.max_response_length,
        max_prompt_tokens=data.max_prompt_length,
        end_token_ids=turn_end_ids(config, tokenizer),
        template_kwargs=data.apply_chat_template_kwargs,
        branches_fit=branches_fit(config),
        evaluation=evaluation,
    )
    return CustomGenerate(_function(path), settings)


def turn_end_ids(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """The tokens at which the engine ends a turn without tools."""
    rollout = config.actor_rollout_ref.rollout
    own = end_token_ids(tokenizer, config.data.apply_chat_template_kwargs)
    return (*(() if rollout.ignore_eos else own), *rollout.stop_token_ids)


@cache
def _function(path: str) -> Any:
    """The user's function. Its module is asked once, for training and validation."""
    module, _, name = path.rpartition(".")
    if not module or not name:
        raise ConfigError(f"{_KEY}={path} must be package.module.function")
    found = load_named(f"pkg://{module}", name, path_key=_KEY, name_key=_KEY, what="functions")
    if not inspect.iscoroutinefunction(found):
        raise ConfigError(f"{_KEY}={path} must be a function that is defined with `async def`")
    return found
