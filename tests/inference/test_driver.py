"""When calls of `AsyncEngine.generate` reach the core; what they return is tested in `contract`."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from slipstream.errors import RequestError
from slipstream.inference.fake import FakeEngine, ScriptedCore
from slipstream.types import GenerateRequest, Generation, NoiseKey, SamplingParams

LONG = 6


class Recorded(ScriptedCore):
    """Records the requests of each step."""

    def __init__(self) -> None:
        super().__init__(lambda request: [1], vocab_size=8, max_model_len=64)
        self.steps: list[list[str]] = []

    def step(self) -> list[Generation]:
        self.steps.append(sorted(self._running))
        return super().step()


def request(name: str, tokens: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=(1,),
        params=SamplingParams(max_tokens=tokens),
        key=NoiseKey(seed=1, epoch=0, uid=name, index=0),
    )


@pytest.mark.parametrize("leads", [True, False])
def test_a_turn_that_is_answered_at_once_joins_the_next_step(leads: bool) -> None:
    """Even if its episode needs a few cycles of the event loop. Calls of the first turns start in
    different cycles, too."""
    core = Recorded()
    engine = FakeEngine(core)

    async def episode() -> None:
        await engine.generate(request("first", 2))
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        await engine.generate(request("second", 2))

    async def other() -> None:
        await anyio.lowlevel.checkpoint()
        await engine.generate(request("other", LONG))

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            for task in (episode, other) if leads else (other, episode):
                tasks.start_soon(task)

    anyio.run(run)
    first, second = ["first", "other"], ["other", "second"]
    assert core.steps == [first, first, second, second, ["other"], ["other"]]


@pytest.mark.parametrize("paused", [False, True])
def test_a_refused_request_ends_alone(paused: bool) -> None:
    """The core gets all requests in one call, but only the call of the refused one fails."""
    core = Recorded()
    engine = FakeEngine(core)
    results: list[str] = []

    async def one(name: str, tokens: int) -> None:
        try:
            results.append((await engine.generate(request(name, tokens))).request_id)
        except RequestError as error:
            results.append(f"refused: {error}")
            await engine.resume()

    async def run() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one, "before", LONG)
            tasks.start_soon(one, "too long", 1000)
            if paused:
                # The first calls wait for their step now.
                await anyio.lowlevel.checkpoint()
                await engine.pause()
            tasks.start_soon(one, "after", LONG)

    anyio.run(run)
    assert results[0].startswith("refused: request 'too long'")
    assert sorted(results[1:]) == ["after", "before"]
    assert core.steps == [["after", "before"]] * LONG
