"""The contract server: vLLM's command line and HTTP routes.

python -m vllm.entrypoints.openai.api_server --model FOLDER --port 8000 ...
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import time
from argparse import BooleanOptionalAction
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

from slipstream.errors import RequestError
from slipstream.inference.engine import EngineSettings
from vllm.core import DEAD, Core, EngineDeadError, EngineThread, Job, Part, make_worker
from vllm.faults import Faults
from vllm.sampling import BadRequestError, Checked, OutOfVocabularyError, checked

PREFIX = "generate-tokens-"
GENERATE = "/inference/v1/generate"
SCALE_OUT = (GENERATE, "/inference/v1/abort_requests")
DEV_MODE = (
    "/collective_rpc",
    "/pause",
    "/resume",
    "/is_paused",
    "/reset_prefix_cache",
    "/update_weight_version",
    "/weight_info",
)
ALWAYS = ("/health", "/version", "/openapi.json", "/metrics")


def parser() -> argparse.ArgumentParser:
    """vLLM's options, as far as Slipstream gives them. Others are errors, as in vLLM."""
    found = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("model", "worker-extension-cls"):
        found.add_argument(f"--{name}")
    found.add_argument("--host", default="0.0.0.0")
    found.add_argument("--served-model-name")
    found.add_argument("--dtype", default="auto")
    found.add_argument("--logprobs-mode", default="raw_logprobs")
    found.add_argument("--generation-config", default="auto")
    found.add_argument("--gpu-memory-utilization", type=float)
    found.add_argument("--speculative-config", type=json.loads)
    found.add_argument(
        "--per-request-spec-decode-metrics",
        choices=("none", "summary", "detailed"),
        default="none",
    )
    for name, default in (("port", 8000), ("seed", 0), ("max-num-seqs", 256)):
        found.add_argument(f"--{name}", type=int, default=default)
    found.add_argument("--load-format", choices=("auto", "safetensors", "dummy"), default="auto")
    found.add_argument("--tensor-parallel-size", type=int, default=1)
    found.add_argument("--enable-chunked-prefill", action=BooleanOptionalAction, default=True)
    for name in ("max-model-len", "max-num-batched-tokens", "kv-cache-memory-bytes"):
        found.add_argument(f"--{name}", type=int)
    for name in ("skip-tokenizer-init", "enable-scale-out", "enforce-eager"):
        found.add_argument(f"--{name}", action=BooleanOptionalAction, default=False)
    found.add_argument("--enable-log-requests", action=BooleanOptionalAction, default=False)
    found.add_argument("--enable-prefix-caching", action=BooleanOptionalAction, default=True)
    return found


def problem(text: str, status: int = 400) -> JSONResponse:
    kind = {400: "BadRequestError", 403: "PermissionDeniedError"}.get(status, "InternalServerError")
    error = {"message": text, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)


class Server:
    """The routes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        dev_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        self.faults = Faults(dev_mode=dev_mode, scale_out=args.enable_scale_out)
        assert args.dtype in ("float32", "bfloat16"), args.dtype
        settings = EngineSettings(
            max_model_len=args.max_model_len,
            dtype=getattr(torch, args.dtype),
            max_num_seqs=args.max_num_seqs,
            prefix_caching=args.enable_prefix_caching,
            **(
                {"kv_budget_bytes": args.kv_cache_memory_bytes}
                if args.kv_cache_memory_bytes
                else {}
            ),
        )
        raw = args.logprobs_mode != "processed_logprobs"
        self.core = Core(
            Path(args.model),
            settings,
            raw=raw,
            faults=self.faults,
            speculation=args.speculative_config,
        )
        self.since = self.core.stats()
        if args.load_format == "dummy":
            self.core.randomize()
        self.thread = EngineThread(self.core, self.faults)
        module, _, name = (args.worker_extension_cls or "").rpartition(".")
        extension = getattr(importlib.import_module(module), name) if module else None
        self.worker = make_worker(extension, self.thread, self.core, self.faults)
        self.bare = make_worker(None, self.thread, self.core, self.faults)
        self.thread.start()

    def app(self) -> ASGIApp:
        gets: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/health": self.health,
            "/version": self.version,
            "/openapi.json": self.openapi,
            "/metrics": self.metrics,
            "/weight_info": self.weight_info,
            "/is_paused": self.is_paused,
        }
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            GENERATE: self.generate,
            "/inference/v1/abort_requests": self.abort,
            "/collective_rpc": self.rpc,
            "/pause": self.pause,
            "/resume": self.resume,
            "/reset_prefix_cache": self.reset,
            "/update_weight_version": self.set_version,
            "/test/plant": self.plant,
            "/test/renew": self.renew,
        }
        routes = [Route(path, work, methods=["GET"]) for path, work in gets.items()]
        routes += [Route(path, work, methods=["POST"]) for path, work in posts.items()]
        return self.guarded(Starlette(routes=routes, exception_handlers={500: failed}))

    def guarded(self, app: ASGIApp) -> ASGIApp:
        """Hide the routes that are switched off, and apply the faults of routes."""

        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "")
            answer: Response | None = None
            if path in DEV_MODE and not self.faults["dev_mode"]:
                answer = JSONResponse({"detail": "Not Found"}, status_code=404)
            elif path in SCALE_OUT and not self.faults["scale_out"]:
                answer = problem("Scale-out endpoints are disabled.", 403)
            elif path == self.faults["garbage"]:
                answer = PlainTextResponse("<html>welcome</html>")
            elif path == self.faults["hang"]:
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
            elif path == GENERATE and self.faults["drop"] > 0:
                self.faults.plant("drop", self.faults["drop"] - 1)
                # The connection is closed before the answer is complete.
                answer = Response(b"{", headers={"content-length": "10"})
            with contextlib.suppress(ClientDisconnect):
                await (answer or app)(scope, receive, send)

        return run

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self.thread.dead else 200)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self.faults["version"]})

    async def openapi(self, request: Request) -> Response:
        paths = [*ALWAYS]
        paths += DEV_MODE if self.faults["dev_mode"] else ()
        paths += SCALE_OUT if self.faults["scale_out"] else ()
        return JSONResponse({"openapi": "3.1.0", "paths": {path: {} for path in paths}})

    async def metrics(self, request: Request) -> Response:
        stats = self.core.stats()
        labels = f'{{engine="0",model_name="{self.args.served_model_name}"}}'
        values = {
            "vllm:prompt_tokens_total": stats.prompt_tokens - self.since.prompt_tokens,
            "vllm:generation_tokens_total": stats.generated_tokens - self.since.generated_tokens,
        }
        lines = [f"{name}{labels} {float(value)}" for name, value in values.items()]
        return PlainTextResponse("\n".join(lines) + "\n")

    async def weight_info(self, request: Request) -> Response:
        return JSONResponse({"weight_version": self.thread.label})

    async def is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self.thread.paused})

    async def renew(self, request: Request) -> Response:
        """Take back all faults, requests and caches, as for a new test."""
        self.faults.renew()
        self.since = self.core.stats()
        await asyncio.wrap_future(self.thread.abort(lambda job: True))
        await asyncio.wrap_future(self.thread.forget(True))
        await asyncio.wrap_future(self.thread.set_version("default"))
        return await self.resume(request)

    async def plant(self, request: Request) -> Response:
        body = await request.json()
        self.faults.plant(body["fault"], body["value"])
        self.thread.tokens = 0
        return JSONResponse({"planted": body["fault"]})

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return problem("Input should be 'abort', 'wait' or 'keep'")
        while mode == "wait" and not await asyncio.wrap_future(self.thread.idle()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.wrap_future(self.thread.pause(mode))
        if request.query_params.get("clear_cache", "true") == "true":
            # vLLM 0.32 drops keys and values of kept requests, too.
            await asyncio.wrap_future(self.thread.forget(True))
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        await asyncio.wrap_future(self.thread.resume())
        return JSONResponse({"status": "resumed"})

    async def reset(self, request: Request) -> Response:
        running = request.query_params.get("reset_running_requests") == "true"
        success = await asyncio.wrap_future(self.thread.forget(running))
        return JSONResponse({"success": success})

    async def set_version(self, request: Request) -> Response:
        body = await request.json()
        if not isinstance(body, dict) or not isinstance(body.get("new_version"), str):
            return problem("body.new_version: a string is required")
        await asyncio.wrap_future(self.thread.set_version(body["new_version"]))
        return JSONResponse({"success": True, "new_version": body["new_version"]})

    async def rpc(self, request: Request) -> Response:
        body = await request.json()
        if "method" not in body:
            return problem("Missing 'method' in request body")
        worker = self.worker if self.faults["extension"] else self.bare

        def call() -> Any:
            return getattr(worker, body["method"])(*body.get("args", ()), **body.get("kwargs", {}))

        try:
            result = await asyncio.wrap_future(self.thread.call(call))
        except EngineDeadError as error:
            return problem(str(error), 500)
        except Exception as error:
            return problem(
                f"Call to collective_rpc method failed: Worker failed with error '{error}', please "
                "check the stack trace above for the root cause",
                500,
            )
        if result is not None and not isinstance(result, dict | list):
            result = str(result)
        return JSONResponse({"results": [result]})

    async def abort(self, request: Request) -> Response:
        ids = (await request.json()).get("request_ids")
        if ids is None:
            return problem("Missing 'request_ids' in request body")
        self.thread.abort(lambda job: job.external in ids)
        return Response()

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        if body.get("model") not in (None, self.args.served_model_name or self.args.model):
            return problem(f"The model `{body['model']}` does not exist.", 404)
        name = PREFIX + str(body.get("request_id") or os.urandom(8).hex())
        try:
            found = checked(
                body,
                name,
                vocab_size=self.core.vocab_size,
                max_model_len=self.args.max_model_len,
            )
            if self.core.drafts is not None and found.request.params.min_p > 1e-5:
                raise BadRequestError(
                    "The min_p and logit_bias sampling parameters are not yet supported with "
                    "speculative decoding."
                )
            parts: asyncio.Queue[Part] = asyncio.Queue()
            loop = asyncio.get_running_loop()

            def receive(part: Part) -> None:
                loop.call_soon_threadsafe(parts.put_nowait, part)

            job = await asyncio.wrap_future(self.thread.add(found, name, receive))
        except (BadRequestError, RequestError) as error:
            return problem(str(error))
        except OutOfVocabularyError:
            # Without a tokenizer, vLLM 0.32 does not check ids, and its embedding fails.
            if not self.args.skip_tokenizer_init:
                return problem("Token id out of vocabulary")
            self.thread.call(self.thread.die)
            return problem(DEAD, 500)
        except EngineDeadError as error:
            return problem(str(error), 500)
        if body.get("stream"):
            usage = bool((body.get("stream_options") or {}).get("include_usage"))
            chunks = self.stream(name, job, found, parts, usage=usage)
            return StreamingResponse(chunks, media_type="text/event-stream")
        return await self.whole(request, name, job, found, parts)

    async def whole(
        self,
        request: Request,
        name: str,
        job: Job,
        found: Checked,
        parts: asyncio.Queue[Part],
    ) -> Response:
        """All tokens in one answer. If the client is gone, the request is aborted."""
        answer = asyncio.create_task(joined(parts))
        gone = asyncio.create_task(disconnected(request))
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not answer.done():
            self.thread.abort(lambda other: other is job)
        part = await answer
        if part.error is not None:
            return problem(part.error, 500)
        size, new = len(found.request.prompt_ids), len(part.token_ids)
        usage = {"prompt_tokens": size, "completion_tokens": new, "total_tokens": size + new}
        return JSONResponse(
            {
                "request_id": name,
                "model": self.args.served_model_name or self.args.model,
                "created": int(time.time()),
                "usage": usage,
                "metrics": self.draft_metrics(part),
                "prompt_logprobs": None,
                "output_mode": "tokens",
                "choices": [self.choice(part, found)],
            }
        )

    async def stream(
        self, name: str, job: Job, found: Checked, parts: asyncio.Queue[Part], *, usage: bool
    ) -> AsyncIterator[str]:
        """Tokens as they come. The last part has the weight versions. With `usage`, an event
        without choices follows, which has the numbers of tokens and the counts of drafts."""
        count, most = 0, self.faults["error_after"]
        try:
            part = Part()
            while part.finish_reason is None and part.error is None:
                part = await parts.get()
                count += len(part.token_ids)
                if most is not None and count >= most:
                    part.error = "the planted error"
                if part.error is not None:
                    error = {"message": part.error, "type": "InternalServerError", "code": 500}
                    yield f"data: {json.dumps({'error': error})}\n\n"
                    break
                chunk = {
                    "request_id": name,
                    "usage": None,
                    "output_mode": "tokens",
                    "choices": [self.choice(part, found)],
                }
                yield f"data: {json.dumps(chunk)}\n\n"
            if usage and part.error is None:
                last: dict[str, Any] = {
                    "request_id": name,
                    "choices": [],
                    "usage": {"completion_tokens": count},
                    "metrics": self.draft_metrics(part),
                }
                yield f"data: {json.dumps(last)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.thread.abort(lambda other: other is job)

    def draft_metrics(self, part: Part) -> dict[str, Any] | None:
        """The counts of drafts, at the end of a request."""
        level = self.args.per_request_spec_decode_metrics
        if level == "none" or part.drafts is None:
            return None
        hidden = () if level == "detailed" else ("per_step_accepted", "per_step_drafted")
        counts = {name: value for name, value in part.drafts.items() if name not in hidden}
        return {"speculative_decoding": counts}

    def choice(self, part: Part, found: Checked) -> dict[str, Any]:
        # `logprob_token_ids` without `logprobs` gives no log-probs on this route (vLLM 0.32).
        content = None if found.top is None else {"content": part.entries}
        choice = {
            "index": 0,
            "token_ids": part.token_ids,
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
            "logprobs": content,
            "sampling_mask": None,
            "routed_experts": None,
        }
        numbers = [int(number) for number in self.faults["version"].split(".")[:2]]
        if numbers >= [0, 28]:
            choice["weight_versions"] = part.weight_versions
        return choice


async def joined(parts: asyncio.Queue[Part]) -> Part:
    """One part of all parts."""
    whole = Part()
    while whole.finish_reason is None and whole.error is None:
        part = await parts.get()
        whole.token_ids += part.token_ids
        whole.entries += part.entries
        whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
        whole.weight_versions, whole.error = part.weight_versions, part.error
        whole.drafts = part.drafts
    return whole


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def failed(request: Request, error: Exception) -> Response:
    return problem(str(error), 500)


def main() -> None:
    args = parser().parse_args()
    server = Server(args)
    uvicorn.run(server.app(), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
