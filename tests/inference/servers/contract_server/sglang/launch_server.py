"""The contract server: SGLang's command line and HTTP routes.

python -m sglang.launch_server --model-path FOLDER --port 30000 ...
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.api_server import disconnected
from vllm.faults import DEFAULTS, Faults
from vllm.sampling import BadRequestError

from sglang.core import FAULTS, SchedulerThread, SGLangCore
from sglang.manager import Manager
from sglang.sampling import SAMPLING, SUPPORT
from slipstream.inference.engine import EngineSettings

HEALTH_S = 20.0
SESSION = "must run between begin_weight_update() and end_weight_update()"


def parser() -> argparse.ArgumentParser:
    """SGLang's options, as far as Slipstream gives them. Others are errors, as in SGLang."""
    found = argparse.ArgumentParser(allow_abbrev=False)
    found.add_argument("--model-path", "--model", required=True)
    found.add_argument("--host", default="127.0.0.1")
    found.add_argument("--served-model-name")
    found.add_argument("--dtype", default="auto")
    found.add_argument("--device")
    found.add_argument("--sampling-defaults", default="model", choices=["openai", "model"])
    found.add_argument("--mem-fraction-static", type=float)
    found.add_argument("--speculative-algorithm")
    found.add_argument("--cuda-graph-backend-decode")
    found.add_argument("--cuda-graph-backend-prefill")
    found.add_argument("--port", type=int, default=30000)
    found.add_argument("--dp-size", type=int, default=1)
    found.add_argument("--sampling-mask-max-tokens", type=int, default=SUPPORT)
    for name in ("context-length", "max-running-requests", "chunked-prefill-size", "random-seed"):
        found.add_argument(f"--{name}", type=int)
    for name in ("max-total-tokens", "max-prefill-tokens"):
        found.add_argument(f"--{name}", type=int)
    found.add_argument("--tp-size", type=int, default=1)
    found.add_argument("--load-format", choices=("auto", "safetensors", "dummy"), default="auto")
    for name in (
        "skip-tokenizer-init",
        "incremental-streaming-output",
        "disable-radix-cache",
        "enable-deterministic-inference",
        "enable-metrics",
    ):
        found.add_argument(f"--{name}", action="store_true")
    return found


def error(text: str, status: int = 400) -> JSONResponse:
    return JSONResponse({"error": {"message": text}}, status_code=status)


def invalid(text: str) -> JSONResponse:
    """The answer to a body that lacks a field, or has a wrong one."""
    body = {"object": "error", "message": text, "type": "Bad Request", "param": None, "code": 400}
    return JSONResponse(body, status_code=400)


def result(success: bool, message: str, **more: Any) -> JSONResponse:
    body = {"success": success, "message": message, **more}
    return JSONResponse(body, status_code=200 if success else 400)


class Server:
    """The routes."""

    def __init__(self, args: argparse.Namespace) -> None:
        original = os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB", "0") not in ("", "0", "false")
        own = {**FAULTS, "original_log_probs": original}
        self.faults = Faults(**{**DEFAULTS, **own, "version": "0.5.23"})
        self.options = vars(args)
        assert args.dtype in ("float32", "bfloat16"), args.dtype
        settings = EngineSettings(
            max_model_len=args.context_length,
            dtype=getattr(torch, args.dtype),
            max_num_seqs=args.max_running_requests or 256,
            prefix_caching=not args.disable_radix_cache,
        )
        self.core = SGLangCore(Path(args.model_path), settings, raw=False, faults=self.faults)
        self.thread = SchedulerThread(self.core, self.faults)
        self.manager = Manager(
            self.thread,
            vocab_size=self.core.vocab_size,
            options=self.options,
            faults=self.faults,
        )
        self.model_path = args.model_path
        self.since = self.core.stats()
        if args.load_format == "dummy":
            self.core.randomize()
        self.session = False
        self.thread.start()

    def app(self) -> ASGIApp:
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self.health,
            "/health_generate": self.health,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/model_info": self.model_info,
            "/metrics": self.metrics,
            "/flush_cache": self.flush,
        }
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/generate": self.generate,
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/flush_cache": self.flush,
            "/update_weights_from_disk": self.update,
            "/update_weights_from_tensor": self.update_from_tensor,
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/update_weight_version": self.set_version,
            "/weights_checker": self.check_weights,
            "/test/plant": self.plant,
            "/test/renew": self.renew,
        }
        gets["/test/running"] = self.running
        routes = [Route(path, work, methods=["GET"]) for path, work in gets.items()]
        routes += [Route(path, work, methods=["POST"]) for path, work in posts.items()]
        return self.guarded(Starlette(routes=routes))

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Apply the faults of routes."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            answer: Response | None = None
            if path == "/server_info" and not self.faults["server_info"]:
                answer = JSONResponse({"detail": "Not Found"}, status_code=404)
            elif path == self.faults["garbage"]:
                answer = PlainTextResponse("<html>welcome</html>")
            elif path == self.faults["hang"]:
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
            elif path == "/generate" and self.faults["drop"] > 0:
                self.faults.plant("drop", self.faults["drop"] - 1)
                # The connection is closed before the answer is complete.
                answer = Response(b"{", headers={"content-length": "10"})
            with contextlib.suppress(ClientDisconnect):
                await (answer or app)(scope, receive, send)

        return run

    async def health(self, request: Request) -> Response:
        """SGLang generates a token. While it is paused, it gives up after a time."""
        for _ in range(int(HEALTH_S / 0.1)):
            if not self.manager.paused:
                return Response()
            await asyncio.sleep(0.1)
        return Response(status_code=503)

    async def server_info(self, request: Request) -> Response:
        length = self.options["context_length"]
        found = {**self.options, "max_req_input_len": length - 6, "internal_states": [{}]}
        found |= {"version": self.faults["version"], "disaggregation_mode": "null"}
        found |= self.faults["info"]
        return JSONResponse(found)

    async def model_info(self, request: Request) -> Response:
        found = {"model_path": self.model_path, "weight_version": self.thread.label}
        kind = self.core.described.hf_text_config.model_type
        return JSONResponse({**found, "model_type": kind, **self.faults["model_info"]})

    async def metrics(self, request: Request) -> Response:
        if not self.options["enable_metrics"]:
            return JSONResponse({"detail": "Not Found"}, status_code=404)
        stats = self.core.stats()
        values = {
            "prefill_compute": stats.prompt_tokens - self.since.prompt_tokens,
            "decode": stats.generated_tokens - self.since.generated_tokens,
        }
        name = "sglang:realtime_tokens_total"
        lines = [f'{name}{{mode="{mode}",tp_rank="0"}} {float(n)}' for mode, n in values.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def renew(self, request: Request) -> Response:
        """Take back all faults, requests and caches, as for a new test."""
        self.faults.renew()
        self.since = self.core.stats()
        await asyncio.wrap_future(self.thread.abort(lambda job: True))
        await asyncio.wrap_future(self.thread.forget(True))
        await asyncio.wrap_future(self.thread.set_version("default"))
        await self.manager.resume()
        self.session = False
        return JSONResponse({})

    async def plant(self, request: Request) -> Response:
        body = await request.json()
        self.faults.plant(body["fault"], body["value"])
        self.thread.tokens = 0
        return JSONResponse({"planted": body["fault"]})

    async def running(self, request: Request) -> Response:
        """The ids of the requests that have tokens, for tests."""
        states = self.manager.states
        return JSONResponse([rid for rid, state in states.items() if state.entries])

    async def pause(self, request: Request) -> Response:
        body = await _body(request)
        if body is None or body.get("mode", "abort") not in ("abort", "retract", "in_place"):
            return invalid("body.mode: Input should be 'abort', 'retract' or 'in_place'")
        await self.manager.pause(body.get("mode", "abort"))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        if await _body(request) is None:
            return invalid("body: Field required")
        await self.manager.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, request: Request) -> Response:
        if await asyncio.wrap_future(self.thread.flush()):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed.\n", status_code=400)

    async def update(self, request: Request) -> Response:
        body = await _body(request)
        if body is None or not isinstance(body.get("model_path"), str):
            return invalid("body.model_path: Field required")
        if body.get("abort_all_requests"):
            self.manager.abort("", True)
        if self.manager.paused:
            return await self._update(body)
        async with self.manager.lock.writer():
            return await self._update(body)

    async def _update(self, body: dict[str, Any]) -> Response:
        if body.get("load_format") not in (None, "auto", "safetensors"):
            return result(False, "Failed to get model loader.", num_paused_requests=0)
        try:
            await asyncio.wrap_future(self.thread.load_folder(Path(body["model_path"])))
        except Exception as problem:
            text = f"Failed to get weights iterator: {problem}."
            return result(False, text, num_paused_requests=0)
        if body.get("weight_version") is not None:
            await asyncio.wrap_future(self.thread.set_version(body["weight_version"]))
        self.model_path = body["model_path"]
        if body.get("flush_cache", True) and not await asyncio.wrap_future(self.thread.flush()):
            text = "Weights were updated, but the cache was not flushed because requests are still "
            return result(False, text + "running or queued.", num_paused_requests=0)
        return result(True, "Succeeded to update model weights.", num_paused_requests=0)

    async def update_from_tensor(self, request: Request) -> Response:
        if not self.session:
            return result(False, f"update_weights_from_tensor {SESSION}")
        return result(False, "this contract server loads weights from disk only")

    async def begin(self, request: Request) -> Response:
        body = await _body(request)
        if body is None or body.get("selector", "all") not in ("target", "draft", "all"):
            return invalid("body.selector: Input should be 'target', 'draft' or 'all'")
        if self.session:
            text = "a weight-update session is already open; call end_weight_update() first"
            return result(False, text)
        self.session = True
        return result(True, "Success")

    async def end(self, request: Request) -> Response:
        if await _body(request) is None:
            return invalid("body: Field required")
        if not self.session:
            text = "no weight-update session is open; call begin_weight_update() first"
            return result(False, text)
        self.session = False
        return result(True, "Success")

    async def set_version(self, request: Request) -> Response:
        body = await _body(request)
        if body is None or not isinstance(body.get("new_version"), str):
            return invalid("body.new_version: Field required")
        if body.get("abort_all_requests", True):
            self.manager.abort("", True)
        version = body["new_version"]
        await asyncio.wrap_future(self.thread.set_version(version))
        return result(True, f"Weight version updated to {version}", new_version=version)

    async def check_weights(self, request: Request) -> Response:
        action = ((await _body(request)) or {}).get("action", "checksum")
        if action != "checksum":
            return result(False, f"Unsupported action={action!r}")
        sums = await asyncio.wrap_future(self.thread.checksums())
        whole = hashlib.sha256("".join(sums.values()).encode()).hexdigest()
        ranks = [{"checksums": sums, "per_gpu_checksum": whole, "parallelism_info": []}]
        return result(True, "Success.", ranks=ranks, per_engine_checksum=whole)

    async def abort(self, request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return invalid("body: Field required")
        rid, abort_all = body.get("rid") or "", bool(body.get("abort_all"))
        if rid or abort_all:
            self.manager.abort(rid, abort_all)
        return Response()

    async def generate(self, request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return invalid("body: Field required")
        for key in body.get("sampling_params") or {}:
            if key not in SAMPLING:
                names = ", ".join(f"`{name}`" for name in SAMPLING)
                text = f"unknown field `{key}`, expected one of {names}"
                return JSONResponse({"error": text}, status_code=400)
        if body.get("stream"):
            return StreamingResponse(self.stream(body), media_type="text/event-stream")
        return await self.whole(request, body)

    async def whole(self, request: Request, body: dict[str, Any]) -> Response:
        """All tokens in one answer. If the client is gone, the request is aborted."""
        events = self.manager.events(body)
        answer = asyncio.ensure_future(anext(events))
        gone = asyncio.create_task(disconnected(request))
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            answer.cancel()
        try:
            return JSONResponse(await answer)
        except asyncio.CancelledError:
            return Response(status_code=499)
        except BadRequestError as problem:
            return error(str(problem))
        finally:
            with contextlib.suppress(BadRequestError, RuntimeError):
                await events.aclose()

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        """Tokens as they come."""
        most = self.faults["error_after"]
        events = self.manager.events(body)
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    if most is not None and event["meta_info"]["completion_tokens"] >= most:
                        raise BadRequestError("the planted error")
                    yield f"data: {json.dumps(event)}\n\n"
        except BadRequestError as problem:
            kind = {"type": "invalid_request_error", "code": 400, "retryable": False}
            yield f"data: {json.dumps({'error': {'message': str(problem), **kind}})}\n\n"
        yield "data: [DONE]\n\n"


async def _body(request: Request) -> dict[str, Any] | None:
    """The JSON object of a request; None if there is none."""
    try:
        found = await request.json()
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def main() -> None:
    args = parser().parse_args()
    server = Server(args)
    uvicorn.run(server.app(), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
