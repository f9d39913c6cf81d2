"""SGLang's HTTP routes, as a `Server`. Needs SGLang 0.5.23 or newer.

What differs from other servers, as its source says:

- While the server is paused, `/update_weights_from_disk` acts at once. Otherwise it waits until all
  requests have ended. Paused requests are put back into the queue (`retract`), so that the cache
  can be flushed and requests can be aborted.
- Log-probs are over the full vocabulary at the sampling temperature. Those of the truncated
  distribution come with the set of tokens that it keeps (`return_sampling_mask`), which needs a
  limit of that set's size (`top_k`).
- An id that is aborted also aborts requests whose ids begin with it. An abort of a request that
  waits for the end of a pause is lost, and another one is ignored.
- `ignore_eos` ignores `stop_token_ids`, too.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from slipstream.errors import EngineError, RequestError
from slipstream.inference.servers.client import CONTROL_S, ServerClient, ask_all, command_line
from slipstream.inference.servers.environment import numbers
from slipstream.inference.servers.http import ServerRefusedError
from slipstream.inference.servers.process import ServerProcess
from slipstream.inference.servers.protocol import Answer, Ends
from slipstream.types import GenerateRequest, PolicyVersion, SamplingParams, VersionSpan

OLDEST = (0, 5, 23)
"""The first version whose source was read. Versions per token came shortly before it."""

RESERVED = 8
"""Tokens by which SGLang's `context_length` must exceed the longest sequence. Of that length, it
uses 2 fewer for a sequence, and 6 fewer for a prompt."""

TEMPERATURES = (1e-6, math.inf)
"""The temperatures that SGLang supports beside 0. It takes lower ones as 0."""

SUPPORT = 4096
"""SGLang's default for the largest number of tokens that a truncated distribution may keep
(`--sampling-mask-max-tokens`)."""

ABORTED_S = 10.0
"""Seconds after an abort in which a request must end. Then its connection is closed."""

_GENERATE = "/generate"

_COMPUTED = "sglang:realtime_tokens_total{"
"""The counters of tokens in `/metrics`."""


def sglang_command(python: Path, model: Path, settings: Mapping[str, Any], port: int) -> list[str]:
    """The command line that serves `model` on a port of this machine. `settings` are SGLang's
    command line options, with underscores."""
    options: dict[str, Any] = {
        "model_path": model,
        "port": port,
        "host": "127.0.0.1",
        "served_model_name": "policy",
        # Token ids go in and out.
        "skip_tokenizer_init": True,
        "sampling_defaults": "openai",
        # Otherwise each event of a stream has all tokens so far.
        "incremental_streaming_output": True,
        # The number of computed tokens shows whether the server stalls.
        "enable_metrics": True,
        **settings,
    }
    return command_line(python, "sglang.launch_server", options, off=None)


def sglang_environment() -> dict[str, str]:
    """Environment variables of a server."""
    return {
        # Log-probs at the sampling temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        # `RESERVED` can exceed the context of the model. No token gets there.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }


def sampling_problem(p: SamplingParams, *, deterministic: bool, support: int) -> str | None:
    """What SGLang cannot do with these settings, and the remedy; None if it can.

    `deterministic`: the server has `--enable-deterministic-inference`. `support` is the largest
    number of tokens that a truncated distribution may keep.
    """
    if p.temperature == 0:
        return None
    if p.top_k == 1 and p.temperature != 1:
        return (
            f"top_k=1 with temperature={p.temperature:g}: SGLang's log-probs then depend on the "
            "other requests; set temperature=0"
        )
    if p.top_k > support:
        return (
            f"top_k={p.top_k}: SGLang reports log-probs for at most {support} tokens; set top_k to "
            f"at most {support}, or to -1, or raise --sampling-mask-max-tokens"
        )
    if p.min_p > 0 and deterministic:
        return (
            f"min_p={p.min_p:g}: SGLang cannot use it with --enable-deterministic-inference; set "
            "min_p=0, or remove enable_deterministic_inference"
        )
    if p.min_p > 0 and p.top_p < 1 and p.top_k <= 0:
        return (
            f"min_p={p.min_p:g} with top_p={p.top_p:g}: SGLang reports log-probs of this "
            f"distribution only with a top_k; set top_k to at most {support}, or min_p=0"
        )
    return None


def _wrong_options(name: str, info: Mapping[str, Any]) -> Iterator[str]:
    """Why the options of a server do not fit, with remedies."""
    if info.get("speculative_algorithm"):
        yield (
            f"{name} has --speculative-algorithm {info['speculative_algorithm']}: a weight update "
            "would load the policy into its draft model; start it without it"
        )
    for option, only in (("dp_size", 1), ("disaggregation_mode", "null")):
        if info.get(option, only) != only:
            yield (
                f"{name} has --{option.replace('_', '-')} {info[option]}; start one server for "
                "each replica, without this option"
            )
    if not info.get("enable_metrics"):
        yield f"{name} does not count computed tokens; start it with --enable-metrics"


@dataclass(frozen=True, slots=True)
class _Support:
    """A truncated distribution. `limit` is the number of tokens that must not limit it; None if
    the request has a limit of its own."""

    limit: int | None


class SGLangServer(ServerClient):
    """A client of one SGLang server."""

    KIND = "SGLang"

    def __init__(
        self,
        url: str | None = None,
        *,
        process: ServerProcess | None = None,
        api_key: str | None = None,
        update_s: float = 300.0,
        weights: Path | None = None,
    ) -> None:
        """See `ServerClient`."""
        super().__init__(url, process=process, api_key=api_key, update_s=update_s, weights=weights)
        self._support, self._deterministic = SUPPORT, False
        self._running: dict[str, anyio.CancelScope] = {}

    async def version(self) -> str:
        """The server's version; "" if it tells none. Raises EngineError if there is no server."""
        return str((await self._info()).get("version", ""))

    async def problems(self) -> list[str]:
        info = await self._info()
        version = str(info.get("version", ""))
        if numbers(version, 3) < OLDEST:
            return [
                f"{self.name} has version {version or 'unknown'}; SGLang "
                f"{'.'.join(map(str, OLDEST))} or newer is needed"
            ]
        with self._understood("/server_info"):
            self._support = info.get("sampling_mask_max_tokens") or SUPPORT
            self._deterministic = bool(info.get("enable_deterministic_inference"))
            found = [*_wrong_options(self.name, info)]
        if not found:
            # A run that was killed can have left it paused.
            await self.resume()
            found += await self._wrong_log_probs()
        return found

    async def check_model(self, config: Mapping[str, Any], max_model_len: int, dtype: str) -> None:
        """Raise EngineError if the server has another model than that of `config`, the contents of
        a `config.json`, a shorter longest sequence than `max_model_len`, or another dtype."""
        model = await self._http.get("/model_info", timeout_s=CONTROL_S)
        info = await self._info()
        with self._understood("/model_info"):
            kind, own = model.get("model_type"), config.get("model_type")
        if None not in (kind, own) and kind != own:
            raise EngineError(
                f"{self.name} has another model: its model_type is {kind}, the policy's {own}; "
                "start it with --model-path FOLDER, a checkpoint with the policy's config.json"
            )
        with self._understood("/server_info"):
            room, computes = int(info["max_req_input_len"]), str(info["dtype"])
        if room < max_model_len:
            raise EngineError(
                f"{self.name} serves up to {room} tokens, the run needs {max_model_len}; start it "
                f"with --context-length {max_model_len + RESERVED}, and with memory for as many "
                "tokens (--mem-fraction-static)"
            )
        if computes not in ("auto", dtype):
            raise EngineError(
                f"{self.name} computes in {computes}, the run in {dtype}; start it with "
                f"--dtype {dtype}, or set actor_rollout_ref.rollout.dtype={computes}"
            )

    async def _info(self) -> Mapping[str, Any]:
        """What the server says of itself. Raises EngineError if there is no SGLang server."""
        for route in ("/server_info", "/get_server_info"):
            try:
                info = await self._http.get(route, timeout_s=CONTROL_S)
            except ServerRefusedError as error:
                problem = error
                continue
            return info if isinstance(info, Mapping) else {}
        raise EngineError(f"{self.name} is no SGLang server ({problem}); check the URL")

    async def _wrong_log_probs(self) -> list[str]:
        """The problem if log-probs are not those at the sampling temperature."""
        spreads = []
        for temperature in (1.0, 0.25):
            params = SamplingParams(max_tokens=1, temperature=temperature, ignore_eos=True)
            body = {**_body([0], params, seed=0, stops=[]), "rid": f"check-{uuid.uuid4().hex}"}
            body["top_logprobs_num"] = 4
            answer = await self._http.post(_GENERATE, body, timeout_s=self._update_s)
            with self._understood(_GENERATE):
                values = [
                    _number(entry[0]) for entry in answer["meta_info"]["output_top_logprobs"][0]
                ]
                spreads.append(values[0] - values[-1])
        # Log-probs that are divided by the temperature have 4 times the distance.
        if spreads[1] >= 2 * spreads[0]:
            return []
        return [
            f"{self.name} reports log-probs without the sampling temperature; start it without "
            "SGLANG_RETURN_ORIGINAL_LOGPROB"
        ]

    async def alive(self) -> bool:
        if self._process is not None and not self._process.alive:
            return False
        try:
            # `/health` generates a token, so it does not answer while the server is paused.
            await self._http.get("/server_info", timeout_s=CONTROL_S)
        except EngineError:
            return False
        return True

    async def progress(self) -> float:
        text = await self._http.text("/metrics", timeout_s=CONTROL_S)
        with self._understood("/metrics"):
            return sum(
                float(line.rpartition(" ")[2])
                for line in text.splitlines()
                if line.startswith(_COMPUTED)
            )

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
        p = request.params
        problem = sampling_problem(p, deterministic=self._deterministic, support=self._support)
        if problem is not None:
            raise RequestError(f"request {request.request_id!r}: {problem}")
        context = [*request.prompt_ids, *request.prior_ids]
        # `ignore_eos` ignores stop tokens.
        stops = [] if p.ignore_eos else list(stop_token_ids)
        body = _body(context, p, seed=seed, stops=stops)
        body |= {"rid": _rid(wire_id), "cache_salt": salt}
        support: _Support | None = None
        if p.temperature and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0):
            support = _Support(None if p.top_k > 0 else self._support)
            body["sampling_params"]["top_k"] = p.top_k if p.top_k > 0 else self._support
            body |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        if ends is None and p.ignore_eos and stop_token_ids:
            ends = _any_of(stop_token_ids)
        with anyio.CancelScope() as scope:
            self._running[wire_id] = scope
            try:
                return await self._answered(body, support, wire_id, ends)
            finally:
                del self._running[wire_id]
        # The server did not end an aborted request.
        return Answer(aborted=True)

    async def _answered(
        self, body: Mapping[str, Any], support: _Support | None, wire_id: str, ends: Ends | None
    ) -> Answer:
        if ends is not None:
            return await self._stream({**body, "stream": True}, support, wire_id, ends)
        event = await self._http.post(_GENERATE, body)
        with self._understood(_GENERATE):
            answer = self._part(event, support, 0)
            self._finish(answer, event, body)
        return answer

    async def _stream(
        self, body: Mapping[str, Any], support: _Support | None, wire_id: str, ends: Ends
    ) -> Answer:
        answer, seen, ended, finished = Answer(), 0, False, False
        async with self._http.events(_GENERATE, body) as events:
            async for event in events:
                with self._understood(_GENERATE):
                    if "error" in event:
                        error = event["error"]
                        raise ServerRefusedError(f"{self.name}: {error['message']}", error["code"])
                    new = self._part(event, support, seen)
                seen += len(new.token_ids)
                finished = event["meta_info"]["finish_reason"] is not None
                if not ended:
                    answer.token_ids += new.token_ids
                    answer.log_probs += new.log_probs
                    answer.sampling_log_probs += new.sampling_log_probs
                    if new.token_ids and ends(new):
                        ended = True
                        if not finished:
                            await self.abort([wire_id])
                if finished:
                    with self._understood(_GENERATE):
                        self._finish(answer, event, body)
        answer.aborted = answer.aborted and not ended
        if not finished:
            raise EngineError(f"{self.name} ended the stream of {_GENERATE} before its last event")
        return answer

    def _part(self, event: Mapping[str, Any], support: _Support | None, seen: int) -> Answer:
        """The tokens of an event after the first `seen` ones.

        An event has all tokens, or those after the last event; an abort repeats the last one.
        """
        meta = event["meta_info"]
        count = meta["completion_tokens"] - seen
        if count < 0:
            raise ValueError(f"{meta['completion_tokens']} tokens after {seen}")
        if count == 0:
            return Answer()
        ids: list[int] = event["output_ids"][-count:]
        entries = meta["output_token_logprobs"][-count:]
        if [token for _, token, *_ in entries] != ids or len(ids) != count:
            raise ValueError("its log-probs are not those of its tokens")
        log_probs = sampling = [_number(value) for value, *_ in entries]
        if support is not None:
            sampling = [float(value) for value in meta["output_token_sampling_logprobs"][-count:]]
            largest = max(map(len, meta["output_token_sampling_mask"][-count:]))
            if support.limit is not None and largest >= support.limit:
                raise EngineError(
                    f"{self.name} sampled from {largest} tokens, the most whose log-probs it "
                    f"reports; set top_k to less than {support.limit}, or raise "
                    "--sampling-mask-max-tokens"
                )
        return Answer(token_ids=ids, log_probs=log_probs, sampling_log_probs=sampling)

    def _finish(self, answer: Answer, event: Mapping[str, Any], body: Mapping[str, Any]) -> None:
        """Take over what only the last event has."""
        meta = event["meta_info"]
        reason = meta["finish_reason"]
        if (reason.get("status_code") or 0) >= 400:
            raise ServerRefusedError(f"{self.name}: {reason['message']}", reason["status_code"])
        answer.aborted = reason["type"] == "abort"
        wanted = body["sampling_params"]["max_new_tokens"]
        if reason["type"] == "length" and meta["completion_tokens"] < wanted:
            raise EngineError(
                f"{self.name} ended a response after {meta['completion_tokens']} of {wanted} "
                "tokens; start it with a larger --context-length, or with more memory for tokens "
                "(--mem-fraction-static)"
            )
        spans = meta.get("weight_versions")
        if spans is None and answer.token_ids:
            raise EngineError(
                f"{self.name} does not report weight versions per token; SGLang "
                f"{'.'.join(map(str, OLDEST))} or newer is needed"
            )
        answer.spans = [
            VersionSpan(int(span["version"]), span["start"], span["end"])
            for span in spans or ()
            if span["end"] > span["start"]
        ]

    async def log_probs(
        self, contexts: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]], salt: str
    ) -> list[list[float]]:
        params = SamplingParams(max_tokens=1, temperature=1.0, ignore_eos=True)

        async def ask(index: int) -> list[float]:
            body = _body(contexts[index], params, seed=0, stops=[])
            body |= {
                "rid": f"check-{uuid.uuid4().hex}",
                "cache_salt": salt,
                "token_ids_logprob": list(token_ids[index]),
            }
            answer = await self._http.post(_GENERATE, body, timeout_s=self._update_s)
            with self._understood(_GENERATE):
                entries = answer["meta_info"]["output_token_ids_logprobs"][0]
                by_id = {token: _number(value) for value, token, _ in entries}
                return [by_id[token] for token in token_ids[index]]

        return await ask_all(contexts, ask)

    async def abort(self, wire_ids: Sequence[str]) -> None:
        for wire_id in wire_ids:
            scope = self._running.get(wire_id)
            if scope is not None and scope.deadline == math.inf:
                scope.deadline = anyio.current_time() + ABORTED_S
            body = {"rid": _rid(wire_id), "abort_all": False}
            await self._http.call("/abort_request", body, timeout_s=CONTROL_S)

    async def pause(self) -> None:
        await self._http.post("/pause_generation", {"mode": "retract"}, timeout_s=CONTROL_S)

    async def resume(self) -> None:
        body = {"torch_empty_cache": False}
        await self._http.post("/continue_generation", body, timeout_s=CONTROL_S)

    async def load(self, path: Path) -> None:
        body = {
            "model_path": str(path.parent),
            "load_format": "safetensors",
            "abort_all_requests": False,
            "weight_version": None,
            "is_async": False,
            "torch_empty_cache": False,
            "keep_pause": True,
            "recapture_cuda_graph": False,
            "token_step": 0,
            # With running requests, this would fail after the weights have changed.
            "flush_cache": False,
        }
        route = "/update_weights_from_disk"
        answer = await self._http.post(route, body, timeout_s=self._update_s)
        with self._understood(route):
            if answer["success"] is not True:
                raise EngineError(f"{self.name} did not load the weights: {answer['message']}")

    async def forget(self) -> None:
        await self._http.call("/flush_cache", timeout_s=CONTROL_S)

    async def set_version(self, version: PolicyVersion) -> None:
        # By default this aborts all requests.
        body = {"new_version": str(version), "abort_all_requests": False}
        await self._http.post("/update_weight_version", body, timeout_s=CONTROL_S)


def _body(
    context: Sequence[int], p: SamplingParams, *, seed: int, stops: Sequence[int]
) -> dict[str, Any]:
    """A request with all fields, because a server can have defaults of its own
    (`--preferred-sampling-params`)."""
    return {
        "input_ids": list(context),
        "stream": False,
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "return_hidden_states": False,
        "sampling_params": {
            "n": 1,
            "max_new_tokens": p.max_tokens,
            "min_new_tokens": 0,
            "temperature": p.temperature,
            "top_p": p.top_p,
            "top_k": p.top_k if p.top_k > 0 else -1,
            "min_p": p.min_p,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            # Used with `--enable-deterministic-inference`.
            "sampling_seed": seed,
            "stop": [],
            "stop_token_ids": list(stops),
            "stop_regex": [],
            "ignore_eos": p.ignore_eos,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
            "stream_interval": 1,
            "logit_bias": None,
            "json_schema": None,
            "regex": None,
            "ebnf": None,
            "structural_tag": None,
            "custom_params": None,
            "beam_width": None,
        },
    }


def _rid(wire_id: str) -> str:
    """The id of a request at the server. No id is the beginning of another one."""
    return f"{len(wire_id)}:{wire_id}"


def _number(value: float | None) -> float:
    """A log-prob. JSON has no infinity, so SGLang sends null for it."""
    return -math.inf if value is None else float(value)


def _any_of(stop_token_ids: Sequence[int]) -> Ends:
    stops = frozenset(stop_token_ids)
    return lambda new: not stops.isdisjoint(new.token_ids)
