"""Draft heads in servers: the file that servers load, the check after an update, and counters.

    update_drafter() --> file in memory --> every server: load, checksums, version, layer outputs
    each response    --> counts of its drafts --> `EngineStats`, and the alarm

A draft head cannot change what is sampled, only how fast. So a server whose draft head is wrong
does not end the run: it stops drafting, and the run says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import anyio
import torch
from torch import Tensor

from slipstream.errors import EngineError, RequestError
from slipstream.inference.protocol import MOST_DEPTHS, EngineStats
from slipstream.inference.servers.check import Finding, Verdict, judge
from slipstream.inference.servers.http import ServerGoneError
from slipstream.inference.servers.protocol import DraftCounts, Server
from slipstream.inference.servers.vllm_worker import checksum, probe_input, probed, tensors_of
from slipstream.inference.servers.weights import KEY, StoredWeights
from slipstream.inference.weights import checked_tensors
from slipstream.models.draft.layouts import export_draft_head
from slipstream.models.draft.model import DRAFT_TOKENS, DraftModel
from slipstream.reading import reason
from slipstream.types import GenerateRequest, PolicyVersion, UpdateKind, WeightUpdate

log = logging.getLogger(__name__)

ALARM_DRAFTS = 512
"""Number of verified drafts after which a server is judged by its accepted length."""

ALARM_LENGTH = 1.01
"""Mean tokens per verification, including the one that is always sampled, up to which drafting is
useless. A draft head that drafts arbitrary tokens is at 1 + 1 / vocabulary."""

LARGEST = {torch.float32: 1e-3, torch.bfloat16: 0.05}
"""Largest difference between the outputs of a server's layers and those of the published draft
head, relative to the size of the outputs, by dtype."""

ROUNDING = 4.0
"""How much larger than before this difference may become."""

SMALLEST = {torch.float32: 1e-5, torch.bfloat16: 5e-3}
"""The difference that is always allowed."""


@runtime_checkable
class DraftServer(Protocol):
    """What a server with a draft head can do more. Errors are those of `Server`."""

    @property
    def name(self) -> str: ...

    async def load_draft(self, path: Path, version: PolicyVersion) -> Mapping[str, int]:
        """Load a draft head while requests run. Returns the checksum of each tensor that the
        server received. Raises EngineError if parameters of its head got no weights."""
        ...

    async def draft_version(self) -> PolicyVersion | None:
        """The version of the head that the server has; None: the one it was started with."""
        ...

    async def probe_draft(self) -> Mapping[str, Sequence[float]] | None:
        """Apply each layer of the draft head to a fixed vector. Returns products of each result
        with fixed vectors, by the name of the weight (`vllm_worker.probed`); None if the server
        cannot tell."""
        ...

    async def set_drafting(self, on: bool) -> bool:
        """Switch drafting on or off. Returns whether the server drafts now."""
        ...


class DraftFolder:
    """The folder in memory from which servers load the draft head.

    PATH/config.json            of the head, in vLLM's layout
    PATH/model.safetensors      the newest weights, replaced atomically
    """

    def __init__(self, head: DraftModel, path: Path, dtype: torch.dtype) -> None:
        """Write `head` into the new folder `path`. Raises ConfigError if vLLM has no class for it,
        and EngineError if there is no room."""
        self._head, self._dtype = head.copy().cpu(), dtype
        self.path = path
        self.version: PolicyVersion = 0
        self.stored = self._export(first=True)

    @property
    def method(self) -> str:
        """vLLM's name of the head's algorithm."""
        return self._head.algorithm.lower()

    @property
    def file(self) -> Path:
        return self.path / "model.safetensors"

    def write(self, update: WeightUpdate) -> StoredWeights:
        """Check the tensors of an update and store them. Raises EngineError if they do not fit the
        draft head, or if there is no room; the old file stays then."""
        what = "draft head update"
        if update.kind is not UpdateKind.DRAFT:
            raise EngineError(f"the drafter takes draft weights, got {update.kind.value}")
        named = list(update.tensors())
        weights = [(name, tensor) for name, tensor in named if name != DRAFT_TOKENS]
        tokens = [tensor for name, tensor in named if name == DRAFT_TOKENS]
        tensors = checked_tensors(
            self._head, replace(update, buckets=[weights]), self._dtype, what=what
        )
        own = self._head
        if bool(tokens) != (own.draft_tokens is not None) or (
            tokens and own.algorithm != "EAGLE" and len(tokens[0]) != own.draft_vocab_size
        ):
            raise EngineError(
                f"{what} to version {update.version} refused: it has another draft vocabulary than "
                "the head that the servers were started with; start the run again from this head"
            )
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                parameter.copy_(tensors[name])
        if tokens:
            own.set_tokens(tokens[0])
        self.stored, self.version = self._export(first=False), update.version
        return self.stored

    def _export(self, *, first: bool) -> StoredWeights:
        new = self.path if first else self.path.with_suffix(".new")
        try:
            export_draft_head(self._head, new, "vllm", dtype=self._dtype)
            if not first:
                os.replace(new / self.file.name, self.file)
        except OSError as error:
            raise EngineError(
                f"the draft head cannot be written to {self.path} ({reason(error)}); set {KEY} to "
                "a folder with room for two copies of policy and draft head"
            ) from error
        tensors = dict(tensors_of(self.file))
        sums = {name: checksum(tensor) for name, tensor in tensors.items()}
        return StoredWeights(self.file, sums, tensors)

    def expected(self) -> dict[str, Tensor]:
        """What `DraftServer.probe_draft` returns for this head, computed in float64."""
        found = {}
        for name, tensor in self.stored.tensors.items():
            if not tensor.is_floating_point():
                continue  # the draft vocabulary
            weight = tensor.double()
            x = probe_input(weight.shape[-1])
            if weight.ndim == 2:
                outputs = weight @ x.to(self._dtype).double()
            else:
                outputs = weight * x.double()
            layer = name.replace("midlayer.", "layers.0.", 1)
            found[layer] = torch.tensor(probed(outputs), dtype=torch.float64)
        return found


class DraftCheck:
    """Tells from the outputs of its layers which draft head a server has.

    The old head is the last one that this server was confirmed to have. Outputs are relative to the
    size of each layer's.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._smallest, self._largest = SMALLEST[dtype], LARGEST[dtype]
        self._old: dict[str, Tensor] | None = None
        self._rounding = 0.0

    def decide(self, given: Mapping[str, Sequence[float]], new: Mapping[str, Tensor]) -> Finding:
        """Compare what a server gave with the published head. Raises EngineError if the server's
        head has other layers."""
        if given.keys() != new.keys():
            differ = ", ".join(sorted(given.keys() ^ new.keys())[:3])
            raise EngineError(f"its draft head has other layers ({differ})")
        sizes = {
            name: values.square().mean().sqrt().clamp(min=1e-12) for name, values in new.items()
        }
        # A row for each layer, because the errors of a layer's outputs depend on each other.
        row = torch.stack(
            [torch.tensor(given[name], dtype=torch.float64) / sizes[name] for name in new]
        )
        wanted = torch.stack([values / sizes[name] for name, values in new.items()])
        if self._old is None:
            before, rounding = wanted, self._largest
        else:
            before = torch.stack([self._old[name] / sizes[name] for name in new])
            rounding = min(self._largest, max(ROUNDING * self._rounding, self._smallest))
        finding = judge(row, wanted, before, rounding=rounding)
        if finding.verdict is Verdict.UNDECIDED and self._old is None:
            finding = replace(finding, verdict=Verdict.NEW)
        if finding.verdict is Verdict.NEW:
            self._old = dict(new)
            self._rounding = max(self._rounding, finding.difference)
        return finding


@dataclass(slots=True)
class _State:
    """What is known of one server. `off` says why it does not draft."""

    check: DraftCheck
    verifications: int = 0
    accepted: int = 0
    off: str | None = None


class ServedDrafts:
    """The draft heads of all servers of an engine."""

    def __init__(
        self,
        folder: DraftFolder,
        *,
        steps: int,
        dtype: torch.dtype,
        notify: Callable[[str], None],
        waits: bool = False,
    ) -> None:
        """`folder` has the head that the servers were started with, as version 0. A draft has
        `steps` tokens. With `waits`, nothing is drafted before version 1, because the first head is
        untrained. `notify` takes messages for the user."""
        self.folder = folder
        self._steps, self._dtype = steps, dtype
        self._notify = notify
        self._waits = waits
        self._expected = folder.expected()
        self._states: dict[str, _State] = {}
        self._stats = EngineStats()

    @property
    def version(self) -> PolicyVersion:
        return self.folder.version

    def check_request(self, request: GenerateRequest) -> None:
        """Raise RequestError for sampling that vLLM does not support with drafts."""
        if request.params.min_p:
            raise RequestError(
                f"request {request.request_id!r}: min_p={request.params.min_p:g}: vLLM has no "
                "min_p for requests with drafts; set min_p=0 or speculative.enable=false"
            )

    async def update(
        self,
        update: WeightUpdate,
        each: Callable[[Callable[[Server, str], Awaitable[None]]], Awaitable[None]],
    ) -> None:
        """Bring a new head into all servers. `each` calls a function with every server and its
        key. Raises EngineError, and keeps the old head, if the update does not fit."""
        await anyio.to_thread.run_sync(self._write, update)
        await each(self.install)

    def _write(self, update: WeightUpdate) -> None:
        self.folder.write(update)
        self._expected = self.folder.expected()

    async def install(self, server: Server, key: str) -> None:
        """Load the newest head into a server, check it, and switch drafting on.

        If the check fails twice, or the accepted length was useless, drafting is switched off and
        the user gets a message. Raises ServerGoneError if the server does not answer.
        """
        assert isinstance(server, DraftServer)
        state = self._states.setdefault(key, _State(DraftCheck(self._dtype)))
        state.verifications = state.accepted = 0
        problem = await self._load(server, state)
        if problem is not None:
            log.warning("%s %s; the draft head is loaded again", server.name, problem)
            problem = await self._load(server, state)
        if problem is not None:
            await self._stop(server, state, problem)
            return
        state.off = None
        await server.set_drafting(not self._waits or self.version > 0)

    async def confirm(self, server: Server, key: str) -> None:
        """Check that a server still has the newest head, and load it again if not."""
        assert isinstance(server, DraftServer)
        state = self._states.get(key)
        if state is None or state.off is not None:
            return
        problem = await self._problem(server, state)
        if problem is not None:
            log.warning("%s %s; the draft head is loaded again", server.name, problem)
            self._notify(f"{server.name} {problem}; draft head {self.version} is loaded again")
            await self.install(server, key)

    def forget(self, key: str) -> None:
        """A server was started again: its next outputs are compared with the newest head only."""
        if key in self._states:
            self._states[key] = _State(DraftCheck(self._dtype))

    async def _load(self, server: DraftServer, state: _State) -> str | None:
        """Load the newest head. Returns what is wrong then; None: nothing."""
        try:
            received = await server.load_draft(self.folder.file, self.version)
        except ServerGoneError:
            raise
        except EngineError as error:
            return f"did not load draft head {self.version} ({error})"
        sums = self.folder.stored.checksums
        wrong = [name for name, value in sums.items() if received.get(name) != value]
        if wrong:
            return f"received other values of {', '.join(wrong[:3])} of draft head {self.version}"
        return await self._problem(server, state)

    async def _problem(self, server: DraftServer, state: _State) -> str | None:
        """What is wrong with the head of a server; None: nothing."""
        try:
            found = await server.draft_version()
            if found != self.version:
                return f"has draft head {found}, but draft head {self.version} was published"
            given = await server.probe_draft()
            if given is None:
                return None
            finding = state.check.decide(given, self._expected)
        except ServerGoneError:
            raise
        except EngineError as error:
            return f"cannot be checked for draft head {self.version} ({error})"
        log.info("%s, draft head %d: %s", server.name, self.version, finding)
        if finding.verdict is Verdict.OLD:
            return (
                f"still drafts with the head before draft head {self.version}: its layers show "
                f"{finding.share:.0%} of the change"
            )
        if finding.verdict is Verdict.WRONG:
            return (
                f"drafts with another head than draft head {self.version}: the outputs of its "
                f"layers differ by {finding.difference:.2g} of their size"
            )
        return None

    async def _stop(self, server: DraftServer, state: _State, problem: str) -> None:
        state.off = problem
        try:
            drafts = await server.set_drafting(False)
        except ServerGoneError:
            raise
        except EngineError as error:
            drafts = True
            problem = f"{problem}, and it does not stop drafting ({error})"
        if not drafts:
            what = "it does not draft until the next draft head"
        else:
            what = (
                "it goes on drafting, because vLLM cannot stop that while it schedules "
                "asynchronously; set "
                "actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling=false, or "
                "speculative.enable=false"
            )
        message = f"{server.name} {problem}; {what}"
        log.warning("%s", message)
        self._notify(message)

    async def count(self, server: Server, key: str, counts: DraftCounts) -> None:
        """Add the counts of a response. Switches drafting off on a server that drafts in vain."""
        assert isinstance(server, DraftServer)
        s = self._stats
        self._stats = replace(
            s,
            draft_tokens=s.draft_tokens + counts.draft_tokens,
            head_draft_tokens=s.head_draft_tokens + counts.draft_tokens,
            accepted_tokens=s.accepted_tokens + counts.accepted_tokens,
            verifications=s.verifications + counts.verifications,
            # Servers do not say which requests shared a step, so each verification counts.
            draft_steps=s.draft_steps + counts.verifications,
            draft_depth=s.draft_depth + counts.draft_tokens,
            offered_depths=_added(s.offered_depths, counts.offered_depths),
            accepted_depths=_added(s.accepted_depths, counts.accepted_depths),
        )
        state = self._states.get(key)
        if state is None or state.off is not None:
            return
        state.verifications += counts.verifications
        state.accepted += counts.accepted_tokens
        if state.verifications < ALARM_DRAFTS:
            return
        length = 1 + state.accepted / state.verifications
        if length <= ALARM_LENGTH:
            problem = (
                f"drafts in vain with draft head {self.version}: the accepted length is "
                f"{length:.3f} over {state.verifications} drafts"
            )
            with contextlib.suppress(ServerGoneError):  # The response is complete.
                await self._stop(server, state, problem)

    def stats(self, stats: EngineStats) -> EngineStats:
        """`stats` with the counters of drafts."""
        names = (
            "draft_tokens",
            "head_draft_tokens",
            "accepted_tokens",
            "verifications",
            "draft_steps",
            "draft_depth",
            "offered_depths",
            "accepted_depths",
        )
        own = {name: getattr(self._stats, name) for name in names}
        return replace(stats, plan=f"{self._steps}_1_{self._steps + 1}", **own)


def _added(sums: tuple[int, ...], new: Sequence[int]) -> tuple[int, ...]:
    """Sums by depth; deeper drafts than `MOST_DEPTHS` count as the last one."""
    found = list(sums)
    for depth, value in enumerate(new[:MOST_DEPTHS]):
        found[depth] += value
    return tuple(found)
