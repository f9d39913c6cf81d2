"""Starts the servers of the engine `vllm`, or attaches to running ones."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import torch

from slipstream.build.engine import EngineSetup, rollout_dtype
from slipstream.build.policy import device_of, max_model_len
from slipstream.build.vllm import check_python, check_vllm_settings, with_own_options
from slipstream.config.engines import VLLM, VLLM_PYTHON
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, EngineError
from slipstream.inference.protocol import InferenceEngine
from slipstream.inference.servers import vllm_worker
from slipstream.inference.servers.check import WeightCheck
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.process import Launch, ServerProcess
from slipstream.inference.servers.transfer import WeightTransfer, make_transfer
from slipstream.inference.servers.vllm import (
    EXTENSION,
    TEMPERATURES,
    VLLMServer,
    vllm_command,
    vllm_environment,
)
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, without_init
from slipstream.models.hf_io import read_tensors, save_checkpoint
from slipstream.models.policy import PolicyConfig
from slipstream.threads import usable_cores
from slipstream.types import WeightUpdate

_KEY = "actor_rollout_ref.rollout.server"

API_KEY = "VLLM_API_KEY"
"""vLLM's environment variable with the key that clients send."""

CPU_KV_BYTES = 4 << 30
"""Largest KV cache of a server on a CPU in bytes, unless `rollout.kv_cache_bytes` is set."""


def check_vllm(config: Config, model: PolicyConfig) -> None:
    """Raise ConfigError if there is no vLLM to start, or if it cannot have these settings."""
    rollout = config.actor_rollout_ref.rollout
    low, high = TEMPERATURES
    for key, section in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        if section.do_sample and section.temperature and not low <= section.temperature <= high:
            raise ConfigError(
                f"actor_rollout_ref.{key}.temperature={section.temperature:g}: vLLM samples at "
                f"temperatures from {low:g} to {high:g}; set one of these, or do_sample=false"
            )
    if not rollout.server.urls:
        assert isinstance(model, ModelConfig), "vLLM's capabilities name no other policy"
        check_vllm_settings(config, vllm_settings(config, model), model)
        check_python(vllm_python(config).absolute())


def vllm_python(config: Config) -> Path:
    """The Python interpreter that starts servers. Raises ConfigError if it has no vLLM."""
    given = config.actor_rollout_ref.rollout.server.python or os.environ.get(VLLM_PYTHON)
    if given is None:
        if importlib.util.find_spec("vllm") is not None:
            return Path(sys.executable)
        raise ConfigError(
            "actor_rollout_ref.rollout.name=vllm needs vLLM, which is not installed here; install "
            f"it in an environment of its own and set {_KEY}.python=ENVIRONMENT/bin/python (or "
            f"{VLLM_PYTHON}), or set {_KEY}.urls to running servers"
        )
    found = shutil.which(os.path.expanduser(given))
    if found is None:
        raise ConfigError(
            f"{_KEY}.python={given} was not found, or is not executable; set it to a Python "
            "interpreter"
        )
    return Path(found)


def make_vllm(setup: EngineSetup) -> InferenceEngine:
    """An engine on vLLM servers. The registry's factory of `vllm`."""
    config, policy = setup.config, setup.policy
    assert isinstance(policy, Decoder), "see `check_engine`"
    dtype = rollout_dtype(config)
    with torch.device("meta"):
        module = Decoder(policy.config)
    server = config.actor_rollout_ref.rollout.server
    parent = None if server.transfer_dir is None else Path(server.transfer_dir)
    weights = make_transfer(
        server.transport,
        module,
        dtype,
        parent,
        device=policy.device,
        timeout_s=server.update_timeout_s,
    )
    allow_connections()
    servers: list[VLLMServer] = []
    try:
        save_checkpoint(policy, weights.path, dtype=dtype, max_shard_bytes=sys.maxsize)
        check = WeightCheck(
            partial(next_log_probs, policy.config, policy.device, dtype),
            read_tensors(weights.path),
            vocab_size=policy.config.vocab_size,
            max_model_len=max_model_len(config),
            dtype=dtype,
        )
        if server.urls:
            weights.guard()
            servers = [
                VLLMServer(url, api_key=os.environ.get(API_KEY), update_s=server.update_timeout_s)
                for url in server.urls
            ]
        else:
            servers = _started(config, policy.config, weights)
        dtype_name = str(dtype).removeprefix("torch.")
        for each in servers:
            anyio.run(each.check)
            anyio.run(each.check_model, policy.config.to_hf(), max_model_len(config), dtype_name)
        if server.urls or _starts_empty(config):
            weights.prepare(WeightUpdate(version=0, buckets=[list(policy.named_parameters())]))
            for each in servers:
                anyio.run(weights.deliver, each)
    except BaseException as error:
        for each in servers:
            each.close()
        weights.close()
        if server.urls and isinstance(error, EngineError):
            raise EngineError(f"{_KEY}.urls: {error}") from error
        raise
    return ServedEngine(
        servers,
        weights,
        name="vllm",
        capabilities=VLLM,
        vocab_size=policy.config.vocab_size,
        max_model_len=max_model_len(config),
        eos_token_ids=policy.config.eos_token_ids,
        decode=setup.decode,
        temperatures=TEMPERATURES,
        check=check,
        on_compute=setup.compute.executor,
        stall_s=server.stall_timeout_s,
    )


def allow_connections() -> None:
    """Raise the soft limit of open files to the hard one. Each running request has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@torch.no_grad()
def next_log_probs(
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    tensors: Mapping[str, torch.Tensor],
    ids: Sequence[int],
) -> torch.Tensor:
    """Return the log-probs (T, V) of the token after each of T tokens, float32 on the CPU.

    They are computed on `device`, in `dtype`, with the weights in `tensors`.
    """
    with torch.device("meta"), without_init():
        policy = Decoder(model)
    own = {name: tensor.detach().to(device) for name, tensor in tensors.items()}
    policy.load_state_dict(own, assign=True)
    packed = policy.pack(dtype)
    # In exact mode the number of rows must be a multiple.
    padded = [*ids, *[0] * (-len(ids) % packed.row_multiple)]
    tokens = torch.tensor([padded], device=policy.device)
    positions = torch.arange(len(padded), device=policy.device)[None]
    final = packed.forward(tokens, positions).final[0, : len(ids)]
    return packed.lm_head(final).float().log_softmax(-1).cpu()


def _started(config: Config, model: ModelConfig, weights: WeightTransfer) -> list[VLLMServer]:
    """Start all servers at the same time, and return their clients."""
    server = config.actor_rollout_ref.rollout.server
    extension = weights.path / "extension"
    extension.mkdir()
    shutil.copy(vllm_worker.__file__, extension / f"{EXTENSION}.py")
    settings = vllm_settings(config, model)
    logs = Path(config.trainer.default_local_dir).absolute() / "servers"
    command = partial(vllm_command, vllm_python(config).absolute(), weights.path, settings)
    processes = [
        ServerProcess(
            Launch(
                command=command,
                environment={**vllm_environment(extension), **placement(config, number)},
                log=logs / f"vllm-{number}.log",
                timeout_s=server.startup_timeout_s,
                what=f"vLLM server {number}",
                folder=weights.path,
            )
        )
        for number in range(server.replicas)
    ]
    try:
        with ThreadPoolExecutor(len(processes)) as threads:
            list(threads.map(ServerProcess.start, processes))
    except BaseException as error:
        for process in processes:
            process.close()
        if isinstance(error, EngineError):
            raise with_own_options(error, config) from error
        raise
    own = weights.file if _starts_empty(config) else None
    return [
        VLLMServer(
            process=process,
            api_key=os.environ.get(API_KEY),
            update_s=server.update_timeout_s,
            weights=own,
        )
        for process in processes
    ]


def _starts_empty(config: Config) -> bool:
    """Whether the servers begin with random weights."""
    return config.actor_rollout_ref.rollout.load_format == "dummy"


def vllm_settings(config: Config, model: ModelConfig) -> dict[str, Any]:
    """vLLM's options for the settings of a run. `engine_kwargs.vllm` is added last."""
    rollout = config.actor_rollout_ref.rollout
    length, cpu = max_model_len(config), device_of(config).type == "cpu"
    settings: dict[str, Any] = {
        "max_model_len": length,
        "dtype": str(rollout_dtype(config)).removeprefix("torch."),
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        # On a CPU, compiling the model at the start takes longer than it saves.
        "enforce_eager": rollout.enforce_eager or cpu,
        "seed": config.trainer.seed,
        "generation_config": "vllm",
        "enable_log_requests": False,
    }
    size = rollout.tensor_model_parallel_size or 1
    if size > 1:
        settings["tensor_parallel_size"] = size
    for name in ("load_format", "enable_chunked_prefill", "enable_prefix_caching"):
        if (value := getattr(rollout, name)) is not None:
            settings[name] = value
    if rollout.kv_cache_bytes is not None:
        settings["kv_cache_memory_bytes"] = rollout.kv_cache_bytes
    elif cpu:
        width = model.num_layers * max(1, model.num_kv_heads // size) * model.head_dim
        token = 2 * width * rollout_dtype(config).itemsize
        wanted = rollout.max_num_seqs * (length + 128) * token
        settings["kv_cache_memory_bytes"] = min(CPU_KV_BYTES, max(64 << 20, wanted))
    else:
        settings["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    own = rollout.engine_kwargs.get("vllm") or {}
    if not isinstance(own, Mapping):
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs.vllm must be a mapping of vLLM's options, "
            f"such as {{block_size: 32}}, not {own!r}"
        )
    return {**settings, **{name.replace("-", "_"): value for name, value in own.items()}}


def placement(config: Config, number: int) -> dict[str, str]:
    """Environment variables that give a server its own cores, or its own GPUs."""
    rollout = config.actor_rollout_ref.rollout
    replicas, size = rollout.server.replicas, rollout.tensor_model_parallel_size or 1
    if device_of(config).type == "cuda":
        given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name for name in given.split(",") if name]
        names = names or [str(index) for index in range(max(1, torch.cuda.device_count()))]
        own = [names[(number * size + rank) % len(names)] for rank in range(size)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    if replicas * size == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))[: usable_cores()]
    parts = [_share(cores, replicas * size, number * size + rank) for rank in range(size)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}


def _share(cores: Sequence[int], parts: int, number: int) -> Sequence[int]:
    """The part of `cores` with this number. If there are fewer cores than parts, parts share."""
    each = max(1, len(cores) // parts)
    first = number * each % len(cores)
    return cores[first : first + each]
