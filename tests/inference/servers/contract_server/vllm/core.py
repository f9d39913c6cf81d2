"""The engine of the contract server, in a thread that plays vLLM's engine process.

Keys and values outlive a weight update, as in vLLM: requests find them by tokens and `cache_salt`
until `/reset_prefix_cache`. The thread does what other threads ask for between two steps.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

import slipstream.inference.engine.engine as engine_module
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.engine.batch_sampling import sampling_rows
from slipstream.inference.engine.prefix_cache import PrefixCache
from slipstream.inference.engine.request import Running
from slipstream.inference.engine.scheduler import ComputedPrefix, Scheduler
from slipstream.inference.speculation.protocol import DraftTree
from slipstream.models.decoder import HiddenStates
from slipstream.models.hf_io import load_checkpoint
from slipstream.models.numerics import pad_rows
from slipstream.sampling.choose import Choice, tempered
from slipstream.sampling.truncate import truncate
from slipstream.types import Generation, StopReason, WeightUpdate
from vllm.drafts import Counts, DraftModel, Speculation
from vllm.faults import Faults
from vllm.sampling import Checked

T = TypeVar("T")

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."

LEAST = -9999.0
"""What vLLM sends for smaller log-probs, because JSON has no infinity."""

REASONS = {
    StopReason.EOS: "stop",
    StopReason.STOP_TOKEN: "stop",
    StopReason.LENGTH: "length",
    StopReason.ABORT: "abort",
}


class EngineDeadError(Exception):
    """The engine has ended, and the server will."""


@dataclass(slots=True, kw_only=True)
class Part:
    """New tokens of a request. The last part has `finish_reason`, or `error`."""

    token_ids: list[int] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | None = None
    weight_versions: list[dict[str, Any]] | None = None
    drafts: dict[str, Any] | None = None
    error: str | None = None


@dataclass(slots=True, eq=False)
class Job:
    """A request. `external` is the id that aborts it."""

    checked: Checked
    external: str
    receive: Callable[[Part], None]
    entries: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0
    counts: Counts = field(default_factory=Counts)


class SaltedScheduler(Scheduler):
    """A scheduler with a prefix cache for each salt. An update keeps them."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.caching = self.prefix_cache is not None
        self.caches: dict[str, PrefixCache] = defaultdict(PrefixCache)
        self.salt_of: Callable[[Running], str] = lambda request: ""

    def _computed_prefix(
        self, request: Running, running_before: Sequence[Running], weights: int
    ) -> ComputedPrefix | None:
        self._choose_cache(request)
        return super()._computed_prefix(request, running_before, weights)

    def cache_kv(self, request: Running, weights: int) -> None:
        self._choose_cache(request)
        super().cache_kv(request, weights)

    def drop_caches(self) -> None:
        self.prefix_cache = None
        super().drop_caches()

    def _choose_cache(self, request: Running) -> None:
        self.prefix_cache = self.caches[self.salt_of(request)] if self.caching else None


class Core(Engine):
    """The engine, with the log-probs of all tokens."""

    scheduler: SaltedScheduler

    def __init__(
        self,
        model: Path,
        settings: EngineSettings,
        *,
        raw: bool,
        faults: Faults,
        speculation: Mapping[str, Any] | None = None,
    ) -> None:
        """`raw`: log-probs are those of the model, not of the distribution that is sampled.
        `speculation` is the value of `--speculative-config`."""
        engine_module.Scheduler = SaltedScheduler  # type: ignore[attr-defined]
        decoder = load_checkpoint(model)
        drafts = self.drafts = (
            None
            if speculation is None
            else Speculation(speculation, decoder.config, settings.dtype, faults)
        )
        super().__init__(
            decoder,
            settings,
            proposer=None if drafts is None else drafts.proposer,
            selector=None if drafts is None else drafts.plans,
        )
        assert isinstance(self._scheduler, SaltedScheduler)
        self.scheduler = self._scheduler
        self.scheduler.salt_of = self._salt_of
        self.jobs: dict[str, Job] = {}
        self._raw, self._faults = raw, faults
        self.described = SimpleNamespace(
            hf_text_config=SimpleNamespace(**self._runner.config.to_hf()),
            max_model_len=settings.max_model_len,
            dtype=settings.dtype,
        )
        """What the worker knows of the model."""
        self._noise = torch.Generator().manual_seed(0)

    @property
    def vocab_size(self) -> int:
        return self._runner.config.vocab_size

    def parameter_names(self) -> list[str]:
        return [name for name, _ in self._runner._decoder.named_parameters()]

    def randomize(self) -> None:
        """Replace the weights by random ones, as `--load-format dummy` does."""
        noise = torch.Generator().manual_seed(0)
        print("random weights", flush=True)
        with torch.no_grad():
            self.load(
                {
                    name: torch.empty_like(p).uniform_(-1e-3, 1e-3, generator=noise)
                    for name, p in self._runner._decoder.named_parameters()
                }
            )

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load weights. Versions are changed by another call."""
        head = self._runner.packed.lm_head
        self.update_weights(WeightUpdate(version=self.version, buckets=[list(tensors.items())]))
        if self._faults["forget_head"]:
            self._runner.packed = replace(self._runner.packed, lm_head=head)

    def forget(self, running: bool) -> bool:
        """Drop cached keys and values, also of `running` requests. Returns whether it did."""
        if self._scheduler.running and not running:
            return False
        self.scheduler.drop_caches()
        self.scheduler.caches.clear()
        self._scheduler.requeue_all()
        self._sampling = None
        return True

    def _salt_of(self, request: Running) -> str:
        return "" if self._faults["stale_cache"] else self.jobs[request.request_id].checked.salt

    def _accept(
        self,
        requests: list[Running],
        trees: Sequence[DraftTree],
        choice: Choice,
        hidden: HiddenStates,
        starts: Sequence[int],
    ) -> list[list[int]]:
        paths = super()._accept(requests, trees, choice, hidden, starts)
        of_row: list[Running] = []
        index: list[int] = []
        # There may be padding behind the requests.
        for request, tree, first, path in zip(requests, trees, starts, paths, strict=False):
            job = self.jobs[request.request_id]
            job.counts.add(len(tree) - 1, len(path) - 1)
            of_row += [request] * len(path)
            index += [first + node for node in path]
        if not index:
            return paths
        rows = self._log_probs(of_row, hidden.final[index])
        tokens = choice.tokens[index].tolist()
        for request, token, row in zip(of_row, tokens, rows, strict=True):
            job = self.jobs[request.request_id]
            entry = _entry(token, row)
            wanted, top = job.checked.token_ids, job.checked.top or 0
            if not wanted:
                wanted = row.topk(top).indices.tolist()
            # vLLM cuts the list to `logprobs` entries. The sampled token is the first of them.
            listed = list(dict.fromkeys([token, *wanted]))[: max(1, top)]
            entry["top_logprobs"] = [_entry(i, row) for i in listed]
            job.entries.append(entry)
        return paths

    def _log_probs(self, requests: Sequence[Running], hidden_ND: Tensor) -> Tensor:
        """(N, V): the log-probs that are reported."""
        padded = pad_rows(hidden_ND, self._runner.tokens_multiple)
        logits = self._runner.packed.lm_head(padded)[: len(hidden_ND)].float()
        if rounding := self._faults["rounding"]:
            logits = logits + rounding * torch.randn(logits.shape, generator=self._noise)
        if self._raw:
            return logits.log_softmax(-1)
        rows = sampling_rows(requests, logits.device)
        found = tempered(logits, rows).log_softmax(-1)
        if rows.any_truncated:
            kept = truncate(found, rows.top_k_N, rows.top_p_N, rows.min_p_N)
            kept |= (rows.temperature_N == 0)[:, None]
            found = found.masked_fill(~kept, float("-inf")).log_softmax(-1)
        return found


def _entry(token: int, row: Tensor) -> dict[str, Any]:
    log_prob = float(row[token])
    rank = int((row > log_prob).sum()) + 1
    return {"token_id": token, "logprob": max(log_prob, LEAST), "rank": rank}


class EngineThread:
    """Runs a `Core`. Every method can be called from any thread."""

    def __init__(self, core: Core, faults: Faults) -> None:
        self._core, self._faults = core, faults
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._numbers = count()
        self._labels = ["default"]
        self.paused = False
        self._broken = False
        self.dead = False
        self.tokens = 0
        """Tokens since a fault was planted that counts them."""

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def call(self, work: Callable[[], T]) -> Future[T]:
        """Do something between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        if self.dead:
            future.set_exception(EngineDeadError(DEAD))
        else:
            self._inbox.put(run)
        return future

    def add(self, checked: Checked, external: str, receive: Callable[[Part], None]) -> Future[Job]:
        name = f"{external}-{next(self._numbers)}"
        request = replace(checked.request, request_id=name)
        job = Job(replace(checked, request=request), external, receive)

        def work() -> Job:
            self._core.jobs[name] = job
            self._core.add(request)
            return job

        return self.call(work)

    def abort(self, chosen: Callable[[Job], bool]) -> Future[None]:
        """Abort the requests that are chosen. They get what there is."""

        def work() -> None:
            names = [name for name, job in self._core.jobs.items() if chosen(job)]
            if names:
                self._publish(self._core.abort(names))

        return self.call(work)

    def pause(self, mode: str) -> Future[None]:
        """Stop decoding, with running requests kept or aborted."""

        def work() -> None:
            if mode == "abort":
                self._publish(self._core.abort(None))
            self.paused = True

        return self.call(work)

    def resume(self) -> Future[None]:
        return self.call(lambda: setattr(self, "paused", False))

    def idle(self) -> Future[bool]:
        return self.call(lambda: not self._core.has_work())

    def forget(self, running: bool) -> Future[bool]:
        return self.call(lambda: self._core.forget(running))

    def set_version(self, label: str) -> Future[None]:
        def work() -> None:
            if label not in self._labels:
                self._labels.append(label)
            self._core.version = self._labels.index(label)

        return self.call(work)

    @property
    def label(self) -> str:
        return self._labels[self._core.version]

    def load(self, tensors: Callable[[], dict[str, Tensor]]) -> None:
        """Load weights, on this thread. If that fails, the next step does, too: vLLM's model has
        lost its weights by then."""
        self._broken = True
        found = tensors()
        if not self._faults["skip_load"]:
            self._core.load(found)
        if self._faults["die_in_update"]:
            os._exit(1)
        self._broken = False

    def load_draft(self, tensors: dict[str, Tensor]) -> set[str]:
        """Load a draft head, on this thread. Returns the parameters that got no weights."""
        if self._core.drafts is None:
            raise RuntimeError("this server has no draft head")
        missing: set[str] = self._core.drafts.load(tensors)
        return missing

    def _run(self) -> None:
        while not self.dead:
            try:
                self._serve_inbox()
                if self._core.has_work() and not self.paused:
                    time.sleep(self._faults["delay"])
                    if self._broken:
                        raise RuntimeError("the model has no weights")
                    self._publish(self._core.step())
            except Exception as error:
                print(f"EngineCore encountered a fatal error: {error!r}", flush=True)
                self.die()

    def _serve_inbox(self) -> None:
        busy = self._core.has_work() and not self.paused
        try:
            self._inbox.get(block=not busy)()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass

    def die(self) -> None:
        """End as vLLM does without its engine: requests get errors, and then the process ends."""
        self.dead = True
        for job in self._core.jobs.values():
            job.receive(Part(error=DEAD))
        while not self._inbox.empty():
            self._inbox.get_nowait()()
        threading.Timer(0.3, os._exit, (1,)).start()

    def _publish(self, ended: Sequence[Generation]) -> None:
        """Pass new tokens on."""
        jobs = self._core.jobs
        done = {generation.request_id: generation for generation in ended}
        for name, job in list(jobs.items()):
            new = job.entries[job.sent :]
            job.sent += len(new)
            self.tokens += len(new)
            part = Part(token_ids=[entry["token_id"] for entry in new], entries=new)
            if name in done:
                self._finish(part, done[name])
                if self._core.drafts is not None:
                    part.drafts = job.counts.metrics(self._core.drafts.steps)
                del jobs[name]
            if new or part.finish_reason or part.error:
                job.receive(part)
        if (most := self._faults["die_after"]) is not None and self.tokens >= most:
            os._exit(1)
        if (most := self._faults["core_dies_after"]) is not None and self.tokens >= most:
            self.die()

    def _finish(self, part: Part, generation: Generation) -> None:
        if generation.stop_reason is StopReason.ERROR:
            part.error = generation.error
            return
        part.finish_reason = REASONS[generation.stop_reason]
        if generation.stop_reason is StopReason.STOP_TOKEN:
            part.stop_reason = generation.token_ids[-1]
        part.weight_versions = [
            {"version": self._labels[span.version], "start": span.start, "end": span.end}
            for span in generation.spans
        ]


class _Parameters:
    """What the worker extension asks a model for."""

    config = None

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def named_parameters(self) -> Iterator[tuple[str, None]]:
        yield from ((name, None) for name in self._names)

    def modules(self) -> Iterator[None]:
        yield from ()


class _Runner:
    def __init__(self, model: _Parameters, drafts: Speculation | None) -> None:
        self._model, self._drafts = model, drafts
        if drafts is not None:
            self.drafter = drafts.drafter

    def get_draft_model(self) -> DraftModel | None:
        return None if self._drafts is None else DraftModel(self._drafts)

    def get_model(self) -> _Parameters:
        return self._model


def make_worker(extension: type | None, thread: EngineThread, core: Core, faults: Faults) -> Any:
    """The worker, with the methods of the extension. Only how weights reach the model is its own.

    The real extension calls vLLM's layers there (`_load`).
    """

    class CPUWorker(extension or object):  # type: ignore[misc]
        def __init__(self) -> None:
            self.vllm_config = SimpleNamespace(
                scheduler_config=SimpleNamespace(async_scheduling=False),
                parallel_config=SimpleNamespace(
                    tensor_parallel_size=1, data_parallel_index=0, world_size=1
                ),
                model_config=core.described,
            )
            self.model_runner = _Runner(_Parameters(core.parameter_names()), core.drafts)

        def _load(self, model: _Parameters, tensors: Any) -> set[str]:
            names, loaded = {name for name, _ in model.named_parameters()}, set[str]()

            def read() -> dict[str, Tensor]:
                found = {}
                for name, tensor in tensors:
                    found[name] = tensor.clone()
                    if faults["broken_read"] == "die":
                        os._exit(1)
                    if faults["broken_read"] == "raise":
                        raise RuntimeError("the planted failure")
                loaded.update(found)
                return found

            thread.load(read)
            return names - loaded

        def _load_draft(self, tensors: Any) -> set[str]:
            return thread.load_draft({name: tensor.clone() for name, tensor in tensors})

        def slipstream_load_draft(self, path: str, version: int) -> dict[str, Any]:
            result: dict[str, Any] = super().slipstream_load_draft(path, version)
            if faults["wrong_draft_sum"]:
                first = next(iter(result["checksums"]))
                result["checksums"][first] ^= 1
            return result

        def slipstream_draft(self, on: bool | None = None) -> dict[str, Any]:
            result: dict[str, Any] = super().slipstream_draft(on)
            # This server has none of vLLM's modules, and nothing to repair.
            result["unmended"] = faults["unmended"]
            if (version := faults["draft_version"]) is not None:
                result["version"] = version
            return result

        def _received(self, tensors: Any) -> dict[str, Any]:
            result: dict[str, Any] = super()._received(tensors)
            if faults["wrong_sum"]:
                first = next(iter(result["checksums"]))
                result["checksums"][first] ^= 1
            return result

    return CPUWorker()
