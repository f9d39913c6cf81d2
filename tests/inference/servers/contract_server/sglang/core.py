"""The engine of the contract server, in a thread that plays SGLang's scheduler."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.core import Core, EngineThread, Job

from slipstream.inference.engine import Engine
from slipstream.inference.engine.batch_sampling import sampling_rows
from slipstream.inference.engine.request import Running
from slipstream.inference.servers.vllm_worker import checksum, tensors_of
from slipstream.inference.speculation.protocol import DraftTree
from slipstream.models.decoder import HiddenStates
from slipstream.models.numerics import pad_rows
from slipstream.sampling.choose import Choice, tempered
from slipstream.sampling.truncate import truncate

Pair = list[Any]
"""A log-prob, its token id, and null: the text is not decoded. The log-prob is null if it is minus
infinity."""


class SGLangCore(Core):  # type: ignore[misc]
    """The engine, with SGLang's log-probs."""

    def flush(self, ignore_waiting: bool) -> bool:
        """Drop cached keys and values, unless requests run or wait. Returns whether it did."""
        if self._scheduler.running or (self._scheduler.waiting and not ignore_waiting):
            return False
        self.scheduler.drop_caches()
        self.scheduler.caches.clear()
        return True

    def retract(self) -> None:
        """Put running requests back into the queue."""
        self.scheduler.requeue_all()
        self._sampling = None

    def waits(self, name: str) -> bool:
        return any(request.request_id == name for request in self._scheduler.waiting)

    def checksums(self) -> dict[str, str]:
        """A checksum of each tensor with which the engine computes."""
        tensors = dict(self._runner._decoder.named_parameters())
        return {name: f"{checksum(tensor):016x}" for name, tensor in tensors.items()}

    def _accept(
        self,
        requests: list[Running],
        trees: Sequence[DraftTree],
        choice: Choice,
        hidden: HiddenStates,
        starts: Sequence[int],
    ) -> list[list[int]]:
        own = list(starts)[: len(requests)]  # There may be padding behind them.
        logits = self._logits(requests, hidden.final[own])
        tokens = choice.tokens[own].tolist()
        kept, sampling = self._support(requests, logits)
        rows = self._reported(requests, logits)
        for index, (request, token) in enumerate(zip(requests, tokens, strict=True)):
            job, row = self.jobs[request.request_id], rows[index]
            checked: Any = job.checked
            entry: dict[str, Any] = {"token_id": token, "logprob": _pair(token, row)}
            entry["ids"] = [_pair(i, row) for i in checked.token_ids] or None
            entry["top"] = [_pair(i, row) for i in row.topk(checked.top).indices.tolist()]
            if checked.support:
                entry["mask"] = kept[index].nonzero().flatten().tolist()
                entry["sampling"] = float(sampling[index, token])
            job.entries.append(entry)
        return Engine._accept(self, requests, trees, choice, hidden, starts)

    def _logits(self, requests: Sequence[Running], hidden_ND: Tensor) -> Tensor:
        padded = pad_rows(hidden_ND, self._runner.tokens_multiple)
        logits = self._runner.packed.lm_head(padded)[: len(requests)].float()
        if rounding := self._faults["rounding"]:
            logits = logits + rounding * torch.randn(logits.shape, generator=self._noise)
        return logits  # type: ignore[no-any-return]

    def _reported(self, requests: Sequence[Running], logits_NV: Tensor) -> Tensor:
        """(N, V): log-probs at the temperature, without truncation. If all requests are greedy,
        their temperatures are not used."""
        jobs: list[Any] = [self.jobs[request.request_id].checked for request in requests]
        if not all(job.greedy for job in jobs) and not self._faults["original_log_probs"]:
            logits_NV = logits_NV / torch.tensor([job.temperature for job in jobs])[:, None]
        return logits_NV.log_softmax(-1)

    def _support(self, requests: Sequence[Running], logits_NV: Tensor) -> tuple[Tensor, Tensor]:
        """(N, V): the tokens of the distributions that are sampled, and their log-probs."""
        rows = sampling_rows(requests, logits_NV.device)
        found = tempered(logits_NV, rows).log_softmax(-1)
        kept = truncate(found, rows.top_k_N, rows.top_p_N, rows.min_p_N)
        greedy = rows.temperature_N == 0
        best = torch.zeros_like(kept).scatter_(1, found.argmax(-1, keepdim=True), True)
        kept = torch.where(greedy[:, None], best, kept)
        return kept, found.masked_fill(~kept, -math.inf).log_softmax(-1)


def _pair(token: int, row: Tensor) -> Pair:
    value = float(row[token])
    return [None if math.isinf(value) else value, token, None]


class SchedulerThread(EngineThread):  # type: ignore[misc]
    """Runs an `SGLangCore`."""

    _core: SGLangCore

    def __init__(self, core: SGLangCore, faults: Any) -> None:
        super().__init__(core, faults)
        self.queued: set[str] = set()
        """Requests that were aborted while they waited."""

    def abort(self, chosen: Callable[[Job], bool]) -> Future[None]:
        def work() -> None:
            jobs = self._core.jobs
            names = [name for name, job in jobs.items() if chosen(job)]
            self.queued.update(jobs[name].external for name in names if self._core.waits(name))
            if names:
                self._publish(self._core.abort(names))

        return self.call(work)  # type: ignore[no-any-return]

    def retract(self) -> Future[None]:
        def work() -> None:
            self.paused = True
            self._core.retract()

        return self.call(work)  # type: ignore[no-any-return]

    def flush(self) -> Future[bool]:
        return self.call(lambda: self._core.flush(self.paused))  # type: ignore[no-any-return]

    def checksums(self) -> Future[dict[str, str]]:
        return self.call(self._core.checksums)  # type: ignore[no-any-return]

    def load_folder(self, path: Path) -> Future[None]:
        """Load the safetensors files of a folder. If that fails, the old weights stay."""

        def work() -> None:
            tensors = {name: tensor.clone() for name, tensor in tensors_of(path)}
            if not self._faults["skip_load"]:
                self._core.load(tensors)
            if self._faults["die_in_update"]:
                os._exit(1)

        return self.call(work)  # type: ignore[no-any-return]

    def die(self, why: str = "the scheduler failed") -> None:
        """End all processes at once, as SGLang does if its scheduler fails."""
        print(f"Scheduler hit an exception: {why}", flush=True)
        os._exit(1)


FAULTS: Mapping[str, Any] = {
    # Log-probs do not depend on the temperature, as with SGLANG_RETURN_ORIGINAL_LOGPROB=1.
    "original_log_probs": False,
    # The server has `/server_info`.
    "server_info": True,
    # Options of the server that `/server_info` reports in place of its own.
    "info": {},
    # The same for `/model_info`.
    "model_info": {},
    # Each event of a stream has all tokens, as without --incremental-streaming-output.
    "cumulative": False,
}
"""Faults of this server beside those of `vllm.faults`."""
