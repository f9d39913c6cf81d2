"""A taskset of verifiers, whose harness runs in this process. Tests load it by its path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Chat", "People", "load_environment", "load_taskset"]

caught: list[Exception] = []
"""What a harness caught and outlived."""

QUESTION = "who is ana 's boss ?"
FUNCTION = {
    "name": "look_up",
    "description": "Look up a person.",
    "parameters": {"type": "object", "properties": {"name": {"type": "string"}}},
}
TOOL = {"type": "function", "function": FUNCTION}


class PersonData(vf.TaskData):  # type: ignore[misc]
    answer: str = ""
    fails: str = ""


class Person(vf.Task[PersonData]):  # type: ignore[misc]
    async def setup(self, trace: Any, runtime: Any) -> None:
        if self.data.fails == "setup":
            raise OSError("no room")

    @vf.reward(weight=0.5)
    async def right(self, trace: Any) -> float:
        if self.data.fails == "reward":
            raise ValueError("no answer")
        if self.data.fails == "sandbox":
            raise vf.SandboxError("the box is gone")
        return float(trace.last_reply == f"answer {self.data.answer}")

    @vf.reward
    async def length(self, trace: Any) -> float:
        return len(trace.last_reply) / 100

    @vf.metric
    async def turns(self, trace: Any) -> float:
        return float(trace.num_turns)


class People(vf.Taskset[Person]):  # type: ignore[misc]
    def load(self) -> Iterator[Person]:
        for index, answer in enumerate(["ben", "dan", "eva"]):
            data = PersonData(idx=index, prompt=QUESTION, answer=answer)
            yield Person(data, self.config.task)


class ChatConfig(vf.HarnessConfig):  # type: ignore[misc]
    how: str = ""
    """What the harness does otherwise."""
    turns: int = 2
    tool: bool = True


class Chat(vf.Harness[ChatConfig]):  # type: ignore[misc]
    """Executes calls of a tool, or asks again."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> Any:
        async with AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            try:
                await self._talk(client, ctx.model, data.prompt)
            except Exception as error:
                if self.config.how != "catch":
                    raise
                await asyncio.sleep(0.2)
                caught.append(error)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    async def _talk(self, client: Any, model: str, prompt: str) -> None:
        how = self.config.how
        messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
        options: dict[str, Any] = {"tools": [TOOL]} if self.config.tool else {}
        options |= {"n": 1, "seed": 3, "tool_choice": "auto", "max_completion_tokens": 50}
        if how == "hot":
            options["temperature"] = 0.1
        if how == "responses":
            await client.responses.create(model=model, input=prompt)
        if how == "stream":
            options["stream"] = True
        for turn in range(self.config.turns):
            create = client.chat.completions.create
            asked = range(2 if how == "twice" else 1)
            answers = await asyncio.gather(
                *(create(model=model, messages=messages, **options) for _ in asked)
            )
            answer = answers[0]
            said = answer.choices[0].message
            messages.append(said.model_dump(exclude_none=True))
            if how == "forget":
                messages[-1].pop("reasoning_content", None)
            if how == "change":
                messages[0]["content"] = "who is dan ?"
            if how == "raise":
                raise RuntimeError("the agent broke")
            if how == "sleep":
                await asyncio.sleep(60)
            if how == "rewrite":
                for call in messages[-1].get("tool_calls", ()):
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(arguments, separators=(",", ":"))
                messages[-1]["content"] = messages[-1]["content"] or None
            for call in said.tool_calls or []:
                name = json.loads(call.function.arguments)["name"]
                result = {"role": "tool", "tool_call_id": call.id, "content": f"{name} : boss ben"}
                messages.append(result)
            if self.config.tool and not said.tool_calls:
                break
            if not self.config.tool and turn == 0:
                parts = [{"type": "text", "text": "who is ben ?"}]
                messages.append({"role": "user", "content": parts})


def load_taskset() -> Any:
    return People(vf.TasksetConfig(id=__name__))


def load_environment(
    how: str = "", turns: int = 2, tool: bool = True, base: Any = None, **agent: Any
) -> Any:
    """An environment with this harness, derived from `base`."""
    harness = ChatConfig(id=__name__, how=how, turns=turns, tool=tool)
    kind = vf.SubprocessConfig()
    seat = vf.AgentConfig(harness=harness, runtime=kind, **agent)
    config = vf.SingleAgentEnvConfig(
        taskset=vf.TasksetConfig(id=__name__),
        agent=seat,
    )
    return (base or vf.SingleAgentEnv)(config)
