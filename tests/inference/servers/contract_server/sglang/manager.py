"""Requests on their way to the engine, as SGLang's tokenizer manager handles them."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm.core import Part
from vllm.faults import Faults
from vllm.sampling import BadRequestError, OutOfVocabularyError

from sglang.core import SchedulerThread
from sglang.sampling import Wanted, wanted
from slipstream.errors import RequestError

FORCED = 50
"""A request that is not streamed passes its tokens on in steps of this number."""


@dataclass(slots=True, eq=False)
class State:
    """A request from its arrival to its end."""

    rid: str
    body: Mapping[str, Any]
    checked: Wanted | None = None
    parts: asyncio.Queue[Part] = field(default_factory=asyncio.Queue)
    entries: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0
    abort_sent: bool = False

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


class Lock:
    """Any number of readers, or one writer. Readers wait for a writer that waits."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self.readers, self.writing = 0, False

    @asynccontextmanager
    async def reader(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.writing)
            self.readers += 1
        try:
            yield
        finally:
            async with self._changed:
                self.readers -= 1
                self._changed.notify_all()

    @asynccontextmanager
    async def writer(self) -> AsyncIterator[None]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self.writing)
            self.writing = True
            await self._changed.wait_for(lambda: not self.readers)
        try:
            yield
        finally:
            async with self._changed:
                self.writing = False
                self._changed.notify_all()


class Manager:
    """What stands between the routes and the scheduler."""

    def __init__(
        self,
        thread: SchedulerThread,
        *,
        vocab_size: int,
        options: Mapping[str, Any],
        faults: Faults,
    ) -> None:
        self._thread, self._vocab_size, self._options = thread, vocab_size, options
        self._faults = faults
        self.states: dict[str, State] = {}
        self.paused = False
        self._pause = asyncio.Condition()
        self.lock = Lock()

    async def events(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of a request. Without `stream`, only the last one."""
        rid = body.get("rid") or uuid.uuid4().hex
        if rid in self.states:
            raise BadRequestError(f"Duplicate request ID detected: {rid}")
        state = self.states[rid] = State(rid, body)
        try:
            async with self._pause:
                await self._pause.wait_for(lambda: not self.paused)
            async with self.lock.reader():
                await self._dispatch(state)
                finished = False
                while not finished:
                    part = await state.parts.get()
                    state.entries += part.entries
                    finished = part.finish_reason is not None or part.error is not None
                    if part.error is not None:
                        raise BadRequestError(part.error)
                    if state.stream or finished:
                        yield self._event(state, part)
        finally:
            self.states.pop(rid, None)
            if state.checked is not None:
                self._thread.abort(lambda job: job.external == rid)

    async def _dispatch(self, state: State) -> None:
        loop = asyncio.get_running_loop()

        def receive(part: Part) -> None:
            loop.call_soon_threadsafe(state.parts.put_nowait, part)

        try:
            checked = wanted(
                state.body,
                state.rid,
                vocab_size=self._vocab_size,
                context_length=self._options["context_length"],
                options=self._options,
            )
            deterministic = self._options["enable_deterministic_inference"]
            if deterministic and checked.request.params.min_p > 0 and not checked.greedy:
                self._thread.die("an assertion of the sampler: a seed with min_p")
            state.checked = checked
            await asyncio.wrap_future(self._thread.add(checked, state.rid, receive))
        except OutOfVocabularyError:
            self._thread.die("the embedding got a token id that it does not have")
        except RequestError as error:
            raise BadRequestError(str(error)) from error

    def abort(self, rid: str, abort_all: bool) -> None:
        """A request that waits for the end of a pause is not aborted, and cannot be any more."""
        if not abort_all:
            state = self.states.get(rid)
            if state is None or state.abort_sent:
                return
            state.abort_sent = True
        self._thread.abort(lambda job: abort_all or job.external.startswith(rid))

    async def pause(self, mode: str) -> None:
        async with self._pause:
            self.paused = True
            if mode == "in_place":
                await asyncio.wrap_future(self._thread.pause("keep"))
            elif mode == "retract":
                await asyncio.wrap_future(self._thread.retract())
            while mode == "abort" and self.lock.readers:
                self.abort("", True)
                await asyncio.sleep(0.05)  # SGLang: 1 s

    async def resume(self) -> None:
        async with self._pause:
            self.paused = False
            await asyncio.wrap_future(self._thread.resume())
            self._pause.notify_all()

    def _incremental(self, state: State) -> bool:
        """Whether each event has only the tokens after the last one."""
        switched_on = self._options["incremental_streaming_output"]
        return state.stream and switched_on and not self._faults["cumulative"]

    def _event(self, state: State, part: Part) -> dict[str, Any]:
        assert state.checked is not None
        entries, reason = state.entries, part.finish_reason
        queued = reason == "abort" and state.rid in self._thread.queued
        if queued and not state.stream:
            entries = entries[: len(entries) // FORCED * FORCED]
        ids = [entry["token_id"] for entry in entries]
        count, incremental = len(ids), self._incremental(state)
        start = state.sent if incremental and not queued else 0
        meta: dict[str, Any] = {
            "id": state.rid,
            "finish_reason": None,
            "prompt_tokens": len(state.checked.request.prompt_ids),
            "completion_tokens": count,
            "cached_tokens": 0,
            "num_retractions": 0,
            "weight_version": self._thread.label,
        }
        if state.body.get("return_logprob"):
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [e["logprob"] for e in entries[start:]]
            meta["output_token_logprobs_length"] = count
            if state.body.get("top_logprobs_num"):
                meta["output_top_logprobs"] = [e["top"] for e in entries[start:]]
            if state.body.get("token_ids_logprob"):
                meta["output_token_ids_logprobs"] = [e["ids"] for e in entries[start:]]
        if state.checked.support:
            meta["output_token_sampling_mask"] = [e["mask"] for e in entries[start:]]
            meta["output_token_sampling_logprobs"] = [e["sampling"] for e in entries[start:]]
            meta["output_token_sampling_mask_length"] = count
        if reason is not None:
            meta["finish_reason"] = _reason(reason, ids, queued)
            meta["e2e_latency"] = time.perf_counter()
            if self._faults["version"] >= "0.5.23":
                spans = part.weight_versions or []
                spans = [{**s, "end": min(s["end"], count)} for s in spans if s["start"] < count]
                first = {"version": self._thread.label, "start": 0, "end": 0}
                meta["weight_versions"] = spans or [first]
                meta["weight_version"] = meta["weight_versions"][-1]["version"]
        state.sent = count
        if queued:
            self._thread.queued.discard(state.rid)
            # A stream of segments gets the last token once more.
            return {"text": "", "output_ids": ids[-1:] if incremental else ids, "meta_info": meta}
        return {"output_ids": ids[start:], "meta_info": meta}


def _reason(reason: str, ids: list[int], queued: bool) -> dict[str, Any]:
    if queued:
        return {"type": "abort", "message": "Abort in waiting queue"}
    reasons: dict[str, dict[str, Any]] = {
        "stop": {"type": "stop", "matched": ids[-1] if ids else None},
        "length": {"type": "length", "length": len(ids)},
        "abort": {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None},
    }
    return reasons[reason]
