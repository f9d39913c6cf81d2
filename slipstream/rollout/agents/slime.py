"""Custom generate functions written for slime:

    async def generate(args, sample, sampling_params) -> Sample:
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        output = await post(url, {"input_ids": [...], "sampling_params": sampling_params})

The engine of the run answers `post` to this address, in SGLang's form and without HTTP. A context
variable holds the episode of the running code, so episodes that run together never mix.
Knows engines by `Generate` only.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import anyio
import httpx2

from slipstream.data.chat_template import apply_chat_template
from slipstream.errors import DataError
from slipstream.reading import shown
from slipstream.rollout.agents.session import (
    LENGTHS,
    PolicySession,
    Result,
    check_sampling,
)
from slipstream.rollout.agents.slime_types import Sample as SlimeSample
from slipstream.rollout.episode import EpisodeError, Generate
from slipstream.types import Prompt, Sample, Segment, Status

CUSTOM_GENERATE = "custom_generate"
"""The name of the function among agent loops."""

KIND = "custom generate function"

ROUTER_IP, ROUTER_PORT = "slipstream.invalid", 30000
"""The address of the router. No such host exists, so that a request past `post` fails."""

_ROUTER = f"http://{ROUTER_IP}:{ROUTER_PORT}/"

_PAYLOAD = ("input_ids", "text", "sampling_params", "return_logprob", "rid")

_IGNORED = ("spaces_between_special_tokens", "sampling_seed", "repetition_penalty")
"""Sampling parameters without effect."""

_TELLING = ("skip_special_tokens", "no_stop_trim")
"""Parameters of the answer's text."""


class Arguments(SimpleNamespace):
    """slime's `args`, as far as they mean something here."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args.{name} of slime does not exist here; read the value from sample.metadata, or "
            "write it into the function's module"
        )


class GenerateState:
    """slime's state of all rollouts: `tokenizer` and `sampling_params`."""

    def __init__(self, args: Arguments) -> None:
        self.args = args
        self.tokenizer = args.tokenizer
        self.processor = None
        self.aborted = False
        self.sampling_params: dict[str, Any] = copy.deepcopy(args.sampling_params)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of all episodes. `end_token_ids` are the tokens that end a turn. `template_kwargs`
    are variables of the chat template. `branches_fit` tells whether branches of given lengths can
    be trained on together."""

    args: Arguments
    tokenizer: Any
    sampling_params: Mapping[str, Any]
    max_tokens: int
    max_prompt_tokens: int | None
    end_token_ids: Sequence[int]
    template_kwargs: Mapping[str, Any]
    branches_fit: Callable[[Sequence[int]], bool]
    evaluation: bool = False


class CustomGenerate:
    """An `EpisodeRunner` of a custom generate function."""

    def __init__(self, function: Callable[..., Any], settings: Settings) -> None:
        self._function = function
        self._settings = settings

    async def run(
        self,
        sample: Sample,
        row: Prompt,
        generate: Generate,
        *,
        seed: int,
        stop: anyio.Event | None = None,
    ) -> bool:
        """Run an episode, or continue one that was stopped (see `EpisodeRunner`)."""
        settings = self._settings
        session = PolicySession(
            sample,
            generate,
            kind=KIND,
            max_tokens=settings.max_tokens,
            max_prompt_tokens=settings.max_prompt_tokens,
            branches_fit=settings.branches_fit,
        )
        more = {}
        if "evaluation" in inspect.signature(self._function).parameters:
            more["evaluation"] = settings.evaluation

        async def call() -> None:
            given = SlimeSample(
                group_index=sample.group_index,
                index=sample.index,
                prompt=self._prompt(row),
                label=copy.deepcopy(row.ground_truth),
                metadata=copy.deepcopy(row.extra_info),
                session_id=f"{sample.group_index}/{sample.index}",
            )
            params = copy.deepcopy(dict(settings.sampling_params))
            result = await self._function(settings.args, given, params, **more)
            if session.ended is None:
                _finish(sample, session, result)

        token = _router.set(_Router(session, settings))
        try:
            return await session.run(KIND, call)
        finally:
            _router.reset(token)

    def _prompt(self, row: Prompt) -> str:
        """The prompt as text, with the generation prompt."""
        if isinstance(row.messages, str):
            return row.messages
        kwargs = {"add_generation_prompt": True, **self._settings.template_kwargs}
        text = apply_chat_template(
            self._settings.tokenizer, copy.deepcopy(row.messages), tokenize=False, **kwargs
        )
        return str(text)

    async def discard(self, sample: Sample) -> None:
        return None

    async def close(self) -> None:
        return None


async def post(
    url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """Post JSON to `url` and return the JSON or text of the answer, as slime's `post` does.

    The router's address is answered by the engine. Requests to other addresses are sent, up to
    `max_retries` times, one second apart; then the last error is raised.
    """
    if url.startswith(_ROUTER):
        router = _router.get()
        if router is None:
            raise DataError(f"{url} can be used only in a custom generate function")
        return await router.answer(url.removeprefix(_ROUTER), payload)
    async with httpx2.AsyncClient(timeout=None) as client:
        while True:
            try:
                answer = await client.post(url, json=payload or {}, headers=headers)
                answer.raise_for_status()
                break
            except httpx2.HTTPError:
                max_retries -= 1
                if max_retries < 1:
                    raise
                await asyncio.sleep(1)
    is_json = "json" in answer.headers.get("content-type", "")
    return answer.json() if is_json else answer.text


class _Router:
    """SGLang's router for one episode."""

    def __init__(self, session: PolicySession, settings: Settings) -> None:
        self._session = session
        self._settings = settings
        self._tokenizer = settings.tokenizer
        self._text: str | None = None
        """All text so far, as the function has it; None if it is not known."""
        self._untold = ""
        """The end of the last turn that its text lacks, such as an end token."""

    async def answer(self, route: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request. Raises DataError for one that cannot be answered here."""
        session = self._session
        if session.ended is not None:
            raise session.ended
        try:
            given = self._sampling_params(route, payload)
            ids = self._ids(payload)
        except (DataError, EpisodeError) as error:
            session.ended = error  # The function may catch it.
            raise
        asked = [int(given[name]) for name in LENGTHS if given.get(name) is not None]
        turn = await session.turn(ids, min(asked, default=None))
        if turn is None:
            turn = Segment.given("assistant", [])
        limit = min([session.left + len(turn.ids), *asked])
        stopped = self._stopped(turn.ids, limit)
        text = self._tell(turn.ids, given, stopped=stopped)
        self._text = None if payload.get("text") is None else payload["text"] + text
        meta_info: dict[str, Any] = {
            "id": str(payload.get("rid") or ""),
            "finish_reason": (
                {"type": "stop", "matched": turn.ids[-1]}
                if stopped
                else {"type": "length", "length": len(turn.ids)}
            ),
            "prompt_tokens": len(ids),
            "completion_tokens": len(turn.ids),
            "cached_tokens": 0,
            "weight_version": str(turn.spans[-1].version if turn.spans else 0),
        }
        if payload.get("return_logprob"):
            pairs = zip(turn.log_probs, turn.ids, strict=True)
            meta_info["output_token_logprobs"] = [[x, token, None] for x, token in pairs]
        return {"text": text, "output_ids": list(turn.ids), "meta_info": meta_info}

    def _sampling_params(self, route: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters of a request, checked."""
        if route != "generate":
            raise DataError(f"the {KIND} posted to /{route}; only /generate is answered here")
        for name, value in payload.items():
            if name not in _PAYLOAD and value:
                raise DataError(
                    f"the {KIND} posted {name}={shown(value, 40)}, which has no effect here; "
                    f"remove it (known: {', '.join(_PAYLOAD)})"
                )
        given = _with_lists(payload.get("sampling_params") or {})
        wanted = _with_lists(self._settings.sampling_params)
        check_sampling(given, wanted, kind=KIND, ignored=(*_IGNORED, *_TELLING))
        return given

    def _ids(self, payload: Mapping[str, Any]) -> list[int]:
        """The token ids of a request. Raises EpisodeError if its text does not extend the text of
        the episode."""
        ids, text = payload.get("input_ids"), payload.get("text")
        if ids is not None:
            ids = list(ids)
            if not all(isinstance(token, int) for token in ids):
                raise DataError(f"the {KIND} must post input_ids of one request, as a list of ints")
            return ids
        if not isinstance(text, str):
            raise DataError(f"the {KIND} must post input_ids or text, got {shown(text, 40)}")
        if not self._session.begun:
            return self._encode(text)
        if self._text is None or not text.startswith(self._text):
            raise EpisodeError(
                f"the text of turn {self._session.record.turns + 1} does not begin with the text "
                "that was sent and received before, so its tokens are not known; post input_ids, "
                "or let actor_rollout_ref.rollout.stop end turns where the function cuts them"
            )
        # The token that ended a turn stays, although the answer's text may lack it.
        more = text[len(self._text) :].removeprefix(self._untold)
        return [*self._session.tokens, *self._encode(more)]

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _stopped(self, ids: Sequence[int], limit: int) -> bool:
        """Whether a turn ended by itself, and not at its limit. It depends on the tokens alone, so
        that a replayed turn is answered as before."""
        if not ids:
            return False
        if len(ids) < limit or ids[-1] in self._settings.end_token_ids:
            return True
        text = str(self._tokenizer.decode(ids))
        return any(stop in text for stop in _listed(self._settings.sampling_params.get("stop")))

    def _tell(self, ids: Sequence[int], given: Mapping[str, Any], *, stopped: bool) -> str:
        """Return the text of a turn as SGLang does, and note what it leaves out at the end."""
        ends = stopped and ids[-1] in self._settings.end_token_ids
        kept = ids[:-1] if ends and not given.get("no_stop_trim") else ids
        skip = bool(given.get("skip_special_tokens", True))
        text = str(self._tokenizer.decode(kept, skip_special_tokens=skip))
        whole = str(self._tokenizer.decode(ids))
        self._untold = whole.removeprefix(text) if whole.startswith(text) else ""
        return text


_router: ContextVar[_Router | None] = ContextVar("router", default=None)
"""The router of the running episode."""


def _finish(sample: Sample, session: PolicySession, returned: Any) -> None:
    """Check the function's samples against what was sampled, and take their masks, rewards and
    status. There is one sample for each context; the rewards are added."""
    results = returned if isinstance(returned, list) else [returned]
    for result in results:
        if not isinstance(result, SlimeSample):
            raise DataError(f"the {KIND} must return a Sample, got {type(result).__name__}")
        if isinstance(result.reward, Mapping):
            raise DataError(f"the {KIND} set sample.reward to a dictionary; set it to a number")
        if result.status in (SlimeSample.Status.ABORTED, SlimeSample.Status.FAILED):
            raise EpisodeError(f"it set Sample.Status.{result.status.name}")
    rewards = [result.reward for result in results if result.reward is not None]
    if rewards and len(rewards) < len(results):
        raise DataError(f"the {KIND} set sample.reward of some samples only; set it of all or none")
    names = ("sample.tokens", "sample.loss_mask", "sample.reward")
    score = sum(rewards) if rewards else None
    session.finish([_checked(result, sample) for result in results], score, names=names)
    states = {result.status for result in results}
    if SlimeSample.Status.TRUNCATED in states:
        sample.status = Status.TRUNCATED
    elif SlimeSample.Status.COMPLETED in states:
        sample.status = Status.COMPLETED


def _checked(result: SlimeSample, sample: Sample) -> Result:
    """The tokens and the mask of a sample that the function returned."""
    start = len(result.tokens) - result.response_length
    prompt, response = list(result.tokens[: max(start, 0)]), list(result.tokens[max(start, 0) :])
    if start < 0 or prompt not in [branch.prompt_ids for branch in sample.branches]:
        raise EpisodeError(
            f"sample.tokens must be the prompt of the first request, and response_length="
            f"{result.response_length} tokens after it"
        )
    mask = [0] * len(response) if result.remove_sample else result.loss_mask
    return Result(response, mask, prompt)


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return [value] if isinstance(value, str | int) else list(value)


def _with_lists(params: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters with lists for what ends a turn."""
    return {
        name: _listed(value) if name in ("stop", "stop_token_ids") else value
        for name, value in params.items()
    }
