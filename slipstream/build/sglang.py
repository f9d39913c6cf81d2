"""SGLang's options for the settings of a run, and their checks before a server starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.build.vllm import check_environment, check_own_options, check_parts
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.inference.servers.sglang import OLDEST, SUPPORT, sampling_problem
from slipstream.models.config import ModelConfig
from slipstream.types import SamplingParams

_ROLLOUT = "actor_rollout_ref.rollout"

FIXED = {
    "model": "the run serves its policy",
    "model_path": "the run serves its policy",
    "host": "the run starts servers on this machine",
    "port": "the run chooses a free port",
    "served_model_name": "the run names the policy",
    "skip_tokenizer_init": "token ids go in and out",
    "enable_metrics": "the run counts computed tokens",
    "context_length": f"set {_ROLLOUT}.max_model_len instead",
    "tp_size": f"set {_ROLLOUT}.tensor_model_parallel_size instead",
    "tensor_parallel_size": f"set {_ROLLOUT}.tensor_model_parallel_size instead",
    "pp_size": f"set {_ROLLOUT}.tensor_model_parallel_size instead",
    "pipeline_parallel_size": f"set {_ROLLOUT}.tensor_model_parallel_size instead",
    "dp_size": f"set {_ROLLOUT}.server.replicas instead",
    "data_parallel_size": f"set {_ROLLOUT}.server.replicas instead",
    "load_format": f"set {_ROLLOUT}.load_format instead",
    "speculative_algorithm": "a weight update would load the policy into the draft model",
}
"""SGLang's options that `engine_kwargs.sglang` cannot set, and why."""


def check_python(python: Path) -> None:
    """Raise ConfigError if the environment of an interpreter has no SGLang, or one too old."""
    check_environment(python, "sglang", "SGLang", OLDEST)


def check_sglang_settings(config: Config, settings: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError if SGLang would refuse its options, or if they contradict the run."""
    check_own_options(config, "sglang", FIXED)
    check_parts(config, model)
    if config.actor_rollout_ref.rollout.enable_chunked_prefill is False:
        length, tokens = settings["context_length"], settings["max_prefill_tokens"]
        if tokens < length:
            raise ConfigError(
                f"{_ROLLOUT}.max_num_batched_tokens={tokens} is below the longest sequence, "
                f"{length} tokens, and {_ROLLOUT}.enable_chunked_prefill=false lets SGLang prefill "
                f"it only as a whole; set {_ROLLOUT}.max_num_batched_tokens={length}, or "
                f"{_ROLLOUT}.enable_chunked_prefill=true"
            )


def check_sampling(sampling: Mapping[str, SamplingParams], own: Mapping[str, Any]) -> None:
    """Raise ConfigError if SGLang cannot report log-probs of a distribution. `sampling` has the
    settings by their key, and `own` the options of `engine_kwargs.sglang`."""
    deterministic = bool(own.get("enable_deterministic_inference"))
    support = own.get("sampling_mask_max_tokens", SUPPORT)
    for key, params in sampling.items():
        problem = sampling_problem(params, deterministic=deterministic, support=support)
        if problem is not None:
            raise ConfigError(f"{key}.{problem}")
