"""vLLM's own benchmark client, for `bench.vllm_overhead`. Runs in vLLM's environment.

Reads a JSON object `{url, model, prompts, tokens}` per line: token ids of prompts, and tokens per
response. Sends all requests at once, with the function that `vllm bench serve` uses, which streams
completions. Writes `{seconds, tokens}`, or `{error}`, per line.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp
from vllm.benchmarks.lib.endpoint_request_func import (
    RequestFuncInput,
    async_request_openai_completions,
)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    print(json.dumps({"ready": True}), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        # The server closes connections that were idle since the last round.
        connector = aiohttp.TCPConnector(limit=0, force_close=False)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            answer = await measure(session, json.loads(line))
        print(json.dumps(answer), flush=True)


async def measure(session: aiohttp.ClientSession, task: dict[str, Any]) -> dict[str, Any]:
    requests = [
        RequestFuncInput(
            prompt=prompt,
            api_url=task["url"] + "/v1/completions",
            prompt_len=len(prompt),
            output_len=task["tokens"],
            model=task["model"],
            # The server has no tokenizer, and these log-probs would need one.
            logprobs=None,
            ignore_eos=True,
            extra_body={"temperature": 1.0, "seed": number, "detokenize": False},
        )
        for number, prompt in enumerate(task["prompts"])
    ]
    started = time.perf_counter()
    answers = await asyncio.gather(
        *(async_request_openai_completions(request, session) for request in requests)
    )
    seconds = time.perf_counter() - started
    if failed := [answer.error for answer in answers if not answer.success]:
        return {"error": str(failed[0])[-400:]}
    return {"seconds": seconds, "tokens": sum(answer.output_tokens or 0 for answer in answers)}


if __name__ == "__main__":
    asyncio.run(serve())
