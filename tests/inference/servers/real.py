"""Real vLLM servers for tests, in the environment that `make peers` makes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import torch

from slipstream.build.servers import next_log_probs
from slipstream.config.engines import VLLM
from slipstream.inference.servers import vllm_worker
from slipstream.inference.servers.check import WeightCheck
from slipstream.inference.servers.drafts import ServedDrafts
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.process import Launch, ServerProcess
from slipstream.inference.servers.vllm import EXTENSION, VLLMServer, vllm_command, vllm_environment
from slipstream.inference.servers.weights import WeightFolder
from slipstream.models import Decoder, save_checkpoint
from slipstream.types import WeightUpdate
from tests.docs.pages import ROOT
from tests.inference.helpers import EOS, VOCAB, decode, make_decoder

PYTHON = ROOT / ".venv-vllm" / "bin" / "python"

decoder = partial(
    make_decoder, head_dim=32, hidden_size=64, num_heads=2, num_kv_heads=1, tie_word_embeddings=True
)
"""A policy that vLLM can serve on a CPU, with a tied LM head."""

CLIENT = httpx2.Client(
    timeout=60,
    verify=False,
    trust_env=False,
    limits=httpx2.Limits(max_keepalive_connections=0),
)
"""One client for all tests, because making one takes long."""


def launch(
    folder: Path,
    *,
    python: Path = PYTHON,
    environment: Mapping[str, str] | None = None,
    policy: Decoder | None = None,
    **more: Any,
) -> ServerProcess:
    """Start a server for `policy`, or `decoder(0)`, in `folder`. `more` are vLLM's options, and
    `environment` replaces environment variables."""
    save_checkpoint(policy or decoder(0, eos=EOS), folder / "model")
    extension = copy_extension(folder)
    shutil.copy(Path(__file__).with_name("slow_worker.py"), extension)
    command = partial(
        vllm_command,
        python,
        folder / "model",
        {
            "max_model_len": 96,
            "dtype": "float32",
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 26,
            "worker_extension_cls": "slow_worker.SlowWorker",
            **more,
        },
    )
    process = ServerProcess(
        Launch(
            command=command,
            environment={**vllm_environment(extension), **(environment or {})},
            log=folder / "server.log",
            timeout_s=120,
            what="the vLLM server",
        )
    )
    process.start()
    return process


def copy_extension(folder: Path) -> Path:
    """Make the folder `extension` with the worker extension, and return it."""
    extension = folder / "extension"
    extension.mkdir()
    shutil.copy(vllm_worker.__file__, extension / f"{EXTENSION}.py")
    return extension


def make_check(policy: Decoder, *, max_model_len: int = 96) -> WeightCheck:
    """A check of servers against `policy`."""
    return WeightCheck(
        partial(next_log_probs, policy.config, policy.device, torch.float32),
        dict(policy.named_parameters()),
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        dtype=torch.float32,
    )


def engine_on(
    *processes: ServerProcess,
    owned: bool = False,
    policy: Decoder | None = None,
    max_model_len: int = 96,
    check: WeightCheck | None = None,
    on_compute: Executor | None = None,
    client: Callable[..., VLLMServer] = VLLMServer,
    drafts: ServedDrafts | None = None,
) -> ServedEngine:
    """An engine on running servers, which get the weights of `policy`, or of `decoder(0)`."""
    policy = policy or decoder(0, eos=EOS)
    client = partial(client, drafts=drafts is not None)
    weights = WeightFolder(policy, torch.float32)
    stored = weights.write(WeightUpdate(version=0, buckets=[list(policy.named_parameters())]))
    for process in processes:
        rpc(process, "slipstream_load", str(stored.path))
    return ServedEngine(
        [client(process=p) if owned else client(p.url) for p in processes],
        weights,
        name="vllm",
        capabilities=VLLM,
        vocab_size=VOCAB,
        max_model_len=max_model_len,
        eos_token_ids=(EOS,),
        decode=decode,
        check=check,
        on_compute=on_compute,
        drafts=drafts,
    )


def rpc(process: ServerProcess, method: str, *args: Any) -> Any:
    """Call a method of the worker extension."""
    body = {"method": method, "args": list(args)}
    answer = CLIENT.post(process.url + "/collective_rpc", json=body)
    answer.raise_for_status()
    return answer.json()["results"]


def metric(process: ServerProcess, name: str) -> float:
    """A value of `/metrics`."""
    text = CLIENT.get(process.url + "/metrics").raise_for_status().text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))


def gate(process: ServerProcess, seconds: float) -> None:
    rpc(process, "slow_down", seconds)


__all__ = [
    "CLIENT",
    "PYTHON",
    "Decoder",
    "copy_extension",
    "decoder",
    "engine_on",
    "gate",
    "launch",
    "rpc",
]
