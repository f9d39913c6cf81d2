"""Starts the servers of the engines `vllm` and `sglang`, or attaches to running ones."""

from __future__ import annotations

import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anyio
import torch

from slipstream.build import sglang as sglang_options
from slipstream.build import vllm as vllm_options
from slipstream.build.engine import EngineSetup, rollout_dtype
from slipstream.build.policy import device_of, max_model_len
from slipstream.build.served_drafts import check_served_drafts, draft_settings, make_served_drafts
from slipstream.build.vllm import with_own_options
from slipstream.config import engines
from slipstream.config.engines import SERVED, is_here
from slipstream.config.schema import Config
from slipstream.errors import ConfigError, EngineError
from slipstream.inference.protocol import InferenceEngine
from slipstream.inference.servers import sglang, vllm, vllm_worker
from slipstream.inference.servers.check import WeightCheck
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.process import Launch, ServerProcess
from slipstream.inference.servers.sglang import SGLangServer
from slipstream.inference.servers.transfer import WeightTransfer, make_transfer
from slipstream.inference.servers.vllm import VLLMServer
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder, without_init
from slipstream.models.hf_io import read_tensors, save_checkpoint
from slipstream.models.policy import PolicyConfig
from slipstream.threads import usable_cores
from slipstream.types import EngineCapabilities, SamplingParams, WeightUpdate

_KEY = "actor_rollout_ref.rollout.server"

CPU_KV_BYTES = 4 << 30
"""Largest KV cache of a server on a CPU in bytes, unless `rollout.kv_cache_bytes` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of server. `name` is that of the engine, and `client` its class.

    `command(python, model, settings, port)` and `settings(config, model, number, drafts)` are its
    command line and its options. `environment(folder)` returns environment variables, and may write
    to the folder. `check_settings` and `check_python` raise ConfigError. `api_key` and `cores` are
    the environment variables with the key that clients send, and with the cores of a server.
    """

    name: str
    capabilities: EngineCapabilities
    client: type[VLLMServer] | type[SGLangServer]
    command: Callable[[Path, Path, Mapping[str, Any], int], list[str]]
    settings: Callable[[Config, ModelConfig, int, Mapping[str, Any]], dict[str, Any]]
    environment: Callable[[Path], dict[str, str]]
    check_settings: Callable[[Config, Mapping[str, Any], ModelConfig], None]
    check_python: Callable[[Path], None]
    api_key: str
    cores: str
    temperatures: tuple[float, float]

    @property
    def title(self) -> str:
        return self.client.KIND


def check_vllm(config: Config, model: PolicyConfig) -> None:
    """Raise ConfigError if there is no vLLM to start, or if it cannot have these settings."""
    _check(VLLM, config, model)


def check_sglang(config: Config, model: PolicyConfig) -> None:
    """Raise ConfigError if there is no SGLang to start, or if it cannot have these settings."""
    sglang_options.check_sampling(sampling(config), own_settings(SGLANG, config))
    _check(SGLANG, config, model)


def _check(kind: Kind, config: Config, model: PolicyConfig) -> None:
    low, high = kind.temperatures
    for key, params in sampling(config).items():
        if params.temperature and not low <= params.temperature <= high:
            raise ConfigError(
                f"{key}.temperature={params.temperature:g}: {kind.title} samples at temperatures "
                f"from {low:g} to {high:g}; set one of these, or do_sample=false"
            )
    assert isinstance(model, ModelConfig), "the capabilities name no other policy"
    if kind.capabilities.drafts:
        check_served_drafts(config, model)
    _check_transport(kind, config)
    if not config.actor_rollout_ref.rollout.server.urls:
        kind.check_settings(config, kind.settings(config, model, 0, {}), model)
        kind.check_python(server_python(kind, config).absolute())


def _check_transport(kind: Kind, config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    transport = rollout.server.transport
    if transport != "file" and not hasattr(kind.client, "load_shared"):
        raise ConfigError(
            f"{_KEY}.transport={transport}: {kind.title} takes weights from files only; set "
            f"{_KEY}.transport=file"
        )
    if transport == "collective" and device_of(config).type == "cuda":
        needed = 1 + rollout.server.replicas * (rollout.tensor_model_parallel_size or 1)
        if not rollout.server.urls and len(_gpus()) < needed:
            raise ConfigError(
                f"{_KEY}.transport={transport}: a GPU cannot be in a process group twice, so "
                f"trainer and servers need {needed} GPUs, and there are {len(_gpus())}; set "
                f"{_KEY}.transport=shared_memory"
            )


def sampling(config: Config) -> dict[str, SamplingParams]:
    """How responses are sampled, by the key of the settings."""
    rollout = config.actor_rollout_ref.rollout
    val = rollout.val_kwargs
    return {
        "actor_rollout_ref.rollout": SamplingParams(
            max_tokens=1,
            temperature=rollout.temperature if rollout.do_sample else 0.0,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            min_p=rollout.min_p,
        ),
        "actor_rollout_ref.rollout.val_kwargs": SamplingParams(
            max_tokens=1,
            temperature=val.temperature if val.do_sample else 0.0,
            top_k=val.top_k,
            top_p=val.top_p,
        ),
    }


def server_python(kind: Kind, config: Config) -> Path:
    """The Python interpreter that starts servers. Raises ConfigError if there is none."""
    variable = SERVED[kind.name]
    given = config.actor_rollout_ref.rollout.server.python or os.environ.get(variable)
    if given is None:
        if is_here(kind.name):
            return Path(sys.executable)
        raise ConfigError(
            f"actor_rollout_ref.rollout.name={kind.name} needs {kind.title}, which is not "
            "installed here; install it in an environment of its own and set "
            f"{_KEY}.python=ENVIRONMENT/bin/python (or {variable}), or set {_KEY}.urls to running "
            "servers"
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
    return _made(VLLM, setup)


def make_sglang(setup: EngineSetup) -> InferenceEngine:
    """An engine on SGLang servers. The registry's factory of `sglang`."""
    return _made(SGLANG, setup)


def _made(kind: Kind, setup: EngineSetup) -> InferenceEngine:
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
    servers: list[VLLMServer | SGLangServer] = []
    client: Callable[..., VLLMServer | SGLangServer] = partial(
        kind.client, api_key=os.environ.get(kind.api_key), update_s=server.update_timeout_s
    )
    try:
        drafts = None
        if kind.capabilities.drafts:
            drafts = make_served_drafts(
                config, policy, weights.path / "draft", dtype=dtype, notify=setup.notify
            )
            client = partial(client, drafts=drafts is not None)
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
            servers = [client(url) for url in server.urls]
        else:
            own = weights.file if _starts_empty(config) else None
            settings = partial(kind.settings, config, policy.config)
            options = draft_settings(config, drafts)
            started = _started(kind, config, lambda number: settings(number, options), weights)
            servers = [client(process=process, weights=own) for process in started]
        dtype_name = str(dtype).removeprefix("torch.")
        for each in servers:
            anyio.run(each.check)
            anyio.run(each.check_model, policy.config.to_hf(), max_model_len(config), dtype_name)
        if server.urls or _starts_empty(config):
            weights.prepare(WeightUpdate(version=0, buckets=[list(policy.named_parameters())]))
            for each in servers:
                anyio.run(each.pause)
                anyio.run(weights.deliver, each)
                anyio.run(each.resume)
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
        name=kind.name,
        capabilities=kind.capabilities,
        vocab_size=policy.config.vocab_size,
        max_model_len=max_model_len(config),
        eos_token_ids=policy.config.eos_token_ids,
        decode=setup.decode,
        temperatures=kind.temperatures,
        check=check,
        on_compute=setup.compute.executor,
        drafts=drafts,
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


def _started(
    kind: Kind,
    config: Config,
    settings: Callable[[int], Mapping[str, Any]],
    weights: WeightTransfer,
) -> list[ServerProcess]:
    """Start all servers at the same time. `settings(number)` are the options of one."""
    server = config.actor_rollout_ref.rollout.server
    environment = kind.environment(weights.path)
    logs = Path(config.trainer.default_local_dir).absolute() / "servers"
    command = partial(kind.command, server_python(kind, config).absolute(), weights.path)
    processes = [
        ServerProcess(
            Launch(
                command=partial(command, settings(number)),
                environment={**environment, **placement(kind, config, number)},
                log=logs / f"{kind.name}-{number}.log",
                timeout_s=server.startup_timeout_s,
                what=f"{kind.title} server {number}",
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
    return processes


def _starts_empty(config: Config) -> bool:
    """Whether the servers begin with random weights."""
    return config.actor_rollout_ref.rollout.load_format == "dummy"


def own_settings(kind: Kind, config: Config) -> dict[str, Any]:
    """The options of `engine_kwargs.NAME`, with underscores."""
    own = config.actor_rollout_ref.rollout.engine_kwargs.get(kind.name) or {}
    if not isinstance(own, Mapping):
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs.{kind.name} must be a mapping of "
            f"{kind.title}'s options, such as {{option: 32}}, not {own!r}"
        )
    return {name.replace("-", "_"): value for name, value in own.items()}


def vllm_settings(
    config: Config,
    model: ModelConfig,
    number: int = 0,
    drafts: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """vLLM's options for the settings of a run, with those of `drafts` (`draft_settings`).
    `engine_kwargs.vllm` is added last."""
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
        **drafts,
    }
    size = rollout.tensor_model_parallel_size or 1
    if size > 1:
        settings["tensor_parallel_size"] = size
    for name in ("load_format", "enable_chunked_prefill", "enable_prefix_caching"):
        if (value := getattr(rollout, name)) is not None:
            settings[name] = value
    memory = kv_bytes(config, model, heads=int(bool(drafts)))
    if memory is not None:
        settings["kv_cache_memory_bytes"] = memory
    else:
        settings["gpu_memory_utilization"] = rollout.gpu_memory_utilization
    return {**settings, **own_settings(VLLM, config)}


def sglang_settings(
    config: Config,
    model: ModelConfig,
    number: int = 0,
    drafts: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """SGLang's options for the settings of a run. `engine_kwargs.sglang` is added last."""
    assert not drafts, "see the capabilities of the engine"
    rollout = config.actor_rollout_ref.rollout
    settings: dict[str, Any] = {
        "context_length": max_model_len(config) + sglang.RESERVED,
        "dtype": str(rollout_dtype(config)).removeprefix("torch."),
        "max_running_requests": rollout.max_num_seqs,
        "max_prefill_tokens": rollout.max_num_batched_tokens,
        "chunked_prefill_size": rollout.max_num_batched_tokens,
        # Servers with equal seeds can draw equal noise.
        "random_seed": config.trainer.seed + number,
        "disable_radix_cache": rollout.enable_prefix_caching is False,
    }
    if rollout.enable_chunked_prefill is False:
        settings["chunked_prefill_size"] = -1
    if (size := rollout.tensor_model_parallel_size or 1) > 1:
        settings["tp_size"] = size
    if rollout.load_format is not None:
        settings["load_format"] = rollout.load_format
    if rollout.enforce_eager:
        phases = ("cuda_graph_backend_decode", "cuda_graph_backend_prefill")
        settings |= dict.fromkeys(phases, "disabled")
    if device_of(config).type == "cpu":
        settings["device"] = "cpu"
    else:
        settings["mem_fraction_static"] = rollout.gpu_memory_utilization
    memory = kv_bytes(config, model)
    if memory is not None:
        settings["max_total_tokens"] = memory // token_bytes(config, model)
    return {**settings, **own_settings(SGLANG, config)}


def token_bytes(config: Config, model: ModelConfig) -> int:
    """Size in bytes of the keys and values of a token on one GPU."""
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size or 1
    width = model.num_layers * max(1, model.num_kv_heads // size) * model.head_dim
    return 2 * width * rollout_dtype(config).itemsize


def kv_bytes(config: Config, model: ModelConfig, *, heads: int = 0) -> int | None:
    """Size in bytes of the KV cache on one GPU; None if it follows from the GPU's memory. `heads`
    is the number of draft heads, which have a layer each."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.kv_cache_bytes is not None:
        return rollout.kv_cache_bytes
    if device_of(config).type != "cpu":
        return None
    token = token_bytes(config, model) * (model.num_layers + heads) // model.num_layers
    wanted = rollout.max_num_seqs * (max_model_len(config) + 128) * token
    return min(CPU_KV_BYTES, max(64 << 20, wanted))


def placement(kind: Kind, config: Config, number: int) -> dict[str, str]:
    """Environment variables that give a server its own cores, or its own GPUs."""
    rollout = config.actor_rollout_ref.rollout
    replicas, size = rollout.server.replicas, rollout.tensor_model_parallel_size or 1
    if device_of(config).type == "cuda":
        names = _gpus()
        # The trainer has the first one.
        first = number * size + (rollout.server.transport == "collective")
        own = [names[(first + rank) % len(names)] for rank in range(size)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(own)}
    if replicas * size == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))[: usable_cores()]
    parts = [_share(cores, replicas * size, number * size + rank) for rank in range(size)]
    return {kind.cores: "|".join(",".join(map(str, part)) for part in parts)}


def _gpus() -> list[str]:
    """The GPUs of the run, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name for name in given.split(",") if name]
    return names or [str(index) for index in range(max(1, torch.cuda.device_count()))]


def _share(cores: Sequence[int], parts: int, number: int) -> Sequence[int]:
    """The part of `cores` with this number. If there are fewer cores than parts, parts share."""
    each = max(1, len(cores) // parts)
    first = number * each % len(cores)
    return cores[first : first + each]


def _vllm_environment(folder: Path) -> dict[str, str]:
    extension = folder / "extension"
    extension.mkdir()
    shutil.copy(vllm_worker.__file__, extension / f"{vllm.EXTENSION}.py")
    return vllm.vllm_environment(extension)


def _sglang_environment(folder: Path) -> dict[str, str]:
    return sglang.sglang_environment()


VLLM = Kind(
    name="vllm",
    capabilities=engines.VLLM,
    client=VLLMServer,
    command=vllm.vllm_command,
    settings=vllm_settings,
    environment=_vllm_environment,
    check_settings=vllm_options.check_vllm_settings,
    check_python=vllm_options.check_python,
    api_key="VLLM_API_KEY",
    cores="VLLM_CPU_OMP_THREADS_BIND",
    temperatures=vllm.TEMPERATURES,
)
SGLANG = Kind(
    name="sglang",
    capabilities=engines.SGLANG,
    client=SGLangServer,
    command=sglang.sglang_command,
    settings=sglang_settings,
    environment=_sglang_environment,
    check_settings=sglang_options.check_sglang_settings,
    check_python=sglang_options.check_python,
    api_key="SGLANG_API_KEY",
    cores="SGLANG_CPU_OMP_THREADS_BIND",
    temperatures=sglang.TEMPERATURES,
)
