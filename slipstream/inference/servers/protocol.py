"""The interface between `ServedEngine` and the client of one kind of server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from slipstream.types import GenerateRequest, PolicyVersion, VersionSpan


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCounts:
    """The drafts of one response.

    A verification is a step that verified a draft. Entry d - 1 of `offered_depths` counts those
    whose draft had at least d tokens, and of `accepted_depths` those that accepted as many.
    """

    verifications: int
    draft_tokens: int
    accepted_tokens: int
    offered_depths: tuple[int, ...]
    accepted_depths: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Answer:
    """What a server generated for one request, or a part of it. `sampling_log_probs` are those of
    the distribution that the tokens were sampled from. `log_probs` are over the full vocabulary at
    the sampling temperature, if the server reports them separately. `aborted` says whether the
    request was stopped before its end. `drafts` is None if the server does not count drafts."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    sampling_log_probs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    aborted: bool = False
    drafts: DraftCounts | None = None


Ends = Callable[[Answer], bool]
"""Takes new tokens, and returns whether the response ends with them."""


class Server(Protocol):
    """A client of one server. All methods raise `ServerGoneError` if the server does not answer,
    and `ServerRefusedError` if it answers with an error."""

    @property
    def name(self) -> str:
        """The server in messages, such as its URL."""
        ...

    async def alive(self) -> bool:
        """Return whether the server is there and can compute."""
        ...

    async def progress(self) -> float:
        """Return the number of tokens that the server has computed since its start, in prompts and
        responses."""
        ...

    async def generate(
        self,
        request: GenerateRequest,
        wire_id: str,
        *,
        seed: int,
        stop_token_ids: Sequence[int],
        salt: str,
        ends: Ends | None,
    ) -> Answer:
        """Generate the response to `request`, whose id at the server is `wire_id`.

        The noise depends on `seed`. Requests share prefixes only if they have the same `salt`. If
        `ends` is given, it gets the tokens as they come, and the server is told to stop when it
        returns True.
        """
        ...

    async def abort(self, wire_ids: Sequence[str]) -> None:
        """Stop requests. Their `generate` calls return what there is. Unknown ids are ignored."""
        ...

    async def pause(self) -> None:
        """Stop decoding until `resume`. Requests are kept."""
        ...

    async def resume(self) -> None: ...

    async def load(self, path: Path) -> Mapping[str, int] | None:
        """Load weights from a safetensors file while the server is paused. Returns the checksum of
        each tensor that it received; None if the server does not tell. Raises EngineError if it has
        parameters that got no weights, or does not use the new ones.
        """
        ...

    async def forget(self) -> None:
        """Drop all cached keys and values, also those of running requests, which are computed
        again."""
        ...

    async def set_version(self, version: PolicyVersion) -> None:
        """Name the weights. Tokens sampled from now on have this version in their spans."""
        ...

    async def log_probs(
        self, contexts: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]], salt: str
    ) -> list[list[float]]:
        """Return the log-probs of the given next tokens after each context, at temperature 1.

        The server may take a part of a context from its cache, as with requests of this `salt`.
        """
        ...

    async def restart(self) -> None:
        """Start the server again, with the weights in its model folder.

        Raises EngineError if it was not started by this process, or does not start.
        """
        ...

    def close(self) -> None:
        """End the server, if this process has started it."""
        ...
