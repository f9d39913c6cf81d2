"""Contract servers that several tests share, and engines over them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import torch

from slipstream.config.engines import engine_entry
from slipstream.inference.servers.drafts import DraftFolder, ServedDrafts
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.process import Launch, ServerProcess
from slipstream.inference.servers.transfer import make_transfer
from slipstream.inference.servers.vllm import VLLMServer, vllm_command, vllm_environment
from slipstream.inference.servers.weights import WeightFolder
from slipstream.models import Decoder, save_checkpoint
from slipstream.models.draft.model import DraftModel
from slipstream.types import UpdateKind, WeightUpdate
from tests.inference.helpers import EOS, VOCAB, decode
from tests.inference.servers.local import environment
from tests.inference.servers.real import CLIENT, copy_extension, decoder, make_check, rpc

SETTINGS: dict[str, Any] = {"max_model_len": 96, "dtype": "float32"}


class Fleet:
    """`count` contract servers of vLLM that load their weights from one folder, as a run starts
    them."""

    name = "vllm"
    client: Any = VLLMServer
    settings: Mapping[str, Any] = SETTINGS

    def __init__(
        self,
        folder: Path,
        count: int,
        *,
        make: Callable[..., Decoder] = decoder,
        head: Callable[[Decoder], DraftModel] | None = None,
        steps: int = 3,
        transport: str = "file",
    ) -> None:
        """`make` makes the policy, and `head` its draft head, which drafts `steps` tokens."""
        self._make = make
        self.policy = make(0, eos=EOS)
        """The trainer's policy."""
        self.weights: Any = make_transfer(
            transport, self.policy, torch.float32, folder, bucket_bytes=1 << 15, timeout_s=60
        )
        self.head = None if head is None else head(self.policy)
        self.steps = steps
        self.settings = dict(self.settings)
        if self.head is not None:
            path = self.weights.path / "draft"
            self.draft_folder = DraftFolder(self.head, path, torch.float32)
            self.settings["speculative_config"] = {
                "method": self.draft_folder.method,
                "model": str(path),
                "num_speculative_tokens": steps,
            }
            self.settings["per_request_spec_decode_metrics"] = "detailed"
        save_checkpoint(self.policy, self.weights.path)
        command, variables = self.program(folder)
        self.processes = [
            ServerProcess(
                Launch(
                    command=command,
                    environment=variables,
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

    def program(self, folder: Path) -> tuple[Callable[[int], list[str]], dict[str, str]]:
        """The command line of a server for a port, and its environment variables."""
        extension = copy_extension(folder)
        python = Path(sys.executable)
        command = partial(vllm_command, python, self.weights.path, self.settings)
        return command, {**vllm_environment(extension), **environment(extension)}

    def load(self, process: ServerProcess, path: Path) -> None:
        """Load weights into a server behind the back of its engine."""
        rpc(process, "slipstream_load", str(path))

    def renew_trainer(self) -> None:
        self.policy.load_state_dict(self._make(0, eos=EOS).state_dict())

    def renew(self) -> None:
        """Bring trainer and servers back to `decoder(0)`, without faults."""
        self.renew_trainer()
        stored = self.weights.write(self.update(0))
        for process in self.processes:
            try:
                CLIENT.post(process.url + "/test/renew").raise_for_status()
            except httpx2.HTTPError:
                process.start()
            self.load(process, stored.path)

    @contextmanager
    def engine(
        self,
        *numbers: int,
        attached: bool = False,
        checked: bool = False,
        drafts: ServedDrafts | None = None,
        client: Callable[..., Any] | None = None,
        weights: WeightFolder | None = None,
        **more: Any,
    ) -> Iterator[ServedEngine]:
        """An engine over the servers with these numbers. It does not end them."""
        processes = [self.processes[number] for number in numbers]
        make = self.client if client is None else client
        if drafts is not None:
            make = partial(make, drafts=True)
        yield ServedEngine(
            [make(p.url) if attached else make(process=p) for p in processes],
            weights or self.weights,
            name=self.name,
            capabilities=engine_entry(self.name).capabilities,
            vocab_size=VOCAB,
            max_model_len=96,
            eos_token_ids=(EOS,),
            decode=decode,
            check=make_check(self.policy) if checked else None,
            on_compute=self._executor,
            drafts=drafts,
            **more,
        )

    def drafts(self, notify: Callable[[str], None], **more: Any) -> ServedDrafts:
        """The fleet's draft head, as version 0, and drafts with it."""
        assert self.head is not None
        named = list(self.head.state_dict().items())
        self.draft_folder.write(WeightUpdate(version=0, kind=UpdateKind.DRAFT, buckets=[named]))
        return ServedDrafts(
            self.draft_folder, steps=self.steps, dtype=torch.float32, notify=notify, **more
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
