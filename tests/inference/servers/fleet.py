"""Contract servers that several tests share, and engines over them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import torch

from slipstream.config.engines import VLLM
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.process import Launch, ServerProcess
from slipstream.inference.servers.transfer import make_transfer
from slipstream.inference.servers.vllm import VLLMServer, vllm_command, vllm_environment
from slipstream.models import save_checkpoint
from slipstream.types import WeightUpdate
from tests.inference.helpers import EOS, VOCAB, decode
from tests.inference.servers.local import environment
from tests.inference.servers.real import CLIENT, copy_extension, decoder, make_check, rpc

SETTINGS: dict[str, Any] = {"max_model_len": 96, "dtype": "float32"}


class Fleet:
    """`count` servers that load their weights from one folder, as a run starts them."""

    def __init__(self, folder: Path, count: int, transport: str = "file") -> None:
        self.policy = decoder(0, eos=EOS)
        """The trainer's policy."""
        self.weights: Any = make_transfer(
            transport, self.policy, torch.float32, folder, bucket_bytes=1 << 15, timeout_s=60
        )
        save_checkpoint(self.policy, self.weights.path)
        extension = copy_extension(folder)
        self.processes = [
            ServerProcess(
                Launch(
                    command=partial(
                        vllm_command, Path(sys.executable), self.weights.path, SETTINGS
                    ),
                    environment={**vllm_environment(extension), **environment(extension)},
                    log=folder / f"server-{number}.log",
                    timeout_s=120,
                    what=f"server {number}",
                    folder=self.weights.path,
                )
            )
            for number in range(count)
        ]
        self._executor = ThreadPoolExecutor(1)
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(ServerProcess.start, self.processes))

    def renew_trainer(self) -> None:
        self.policy.load_state_dict(decoder(0, eos=EOS).state_dict())

    def renew(self) -> None:
        """Bring trainer and servers back to `decoder(0)`, without faults."""
        self.renew_trainer()
        stored = self.weights.write(self.update(0))
        for process in self.processes:
            try:
                CLIENT.post(process.url + "/test/renew").raise_for_status()
            except httpx2.HTTPError:
                process.start()
            rpc(process, "slipstream_load", str(stored.path))

    @contextmanager
    def engine(
        self,
        *numbers: int,
        attached: bool = False,
        checked: bool = False,
        **more: Any,
    ) -> Iterator[ServedEngine]:
        """An engine over the servers with these numbers. It does not end them."""
        processes = [self.processes[number] for number in numbers]
        yield ServedEngine(
            [VLLMServer(p.url) if attached else VLLMServer(process=p) for p in processes],
            self.weights,
            name="vllm",
            capabilities=VLLM,
            vocab_size=VOCAB,
            max_model_len=96,
            eos_token_ids=(EOS,),
            decode=decode,
            check=make_check(self.policy) if checked else None,
            on_compute=self._executor,
            **more,
        )

    def move(self, relative: float, seed: int = 1) -> None:
        """Change each weight of the trainer's policy by about this fraction of the tensor's size,
        as an optimizer step does."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.policy.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(relative * parameter.square().mean().sqrt() * noise)

    def update(self, version: int, **more: Any) -> WeightUpdate:
        """An update with the trainer's weights."""
        tensors = [(name, p.detach().clone()) for name, p in self.policy.named_parameters()]
        return WeightUpdate(version=version, buckets=[tensors], **more)

    def close(self) -> None:
        for process in self.processes:
            process.close()
        self.weights.close()
        self._executor.shutdown()
