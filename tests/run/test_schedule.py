"""Results depend on the seed, and not on batch limit, memory or order of requests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from slipstream.build.engine import make_engine
from slipstream.cli import main
from slipstream.inference.driver import AsyncEngine
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.protocol import EngineStats
from slipstream.types import GenerateRequest, Generation
from tests.run.helpers import (
    ROLLOUT,
    assert_same_result,
    metrics_of,
    result_of,
    rl_only,
    write_reward,
)

SETTINGS = (
    "trainer.total_training_steps=2",
    "trainer.logger=[file]",
    "data.train_batch_size=4",
    f"{ROLLOUT}.n=2",
    "data.max_response_length=72",
)
REQUESTS = 8
"""Requests of an RL step."""


class Shuffled:
    """An engine whose requests arrive in random order."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._rng = random.Random(5)

    async def generate(self, request: GenerateRequest) -> Generation:
        await anyio.sleep(self._rng.uniform(0, 0.03))
        return await self._engine.generate(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Together(Shuffled):
    """An engine whose first step waits for all requests of an RL step."""

    arrived = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.key.namespace == "val":
            return await self._engine.generate(request)
        await anyio.sleep(self._rng.uniform(0, 0.03))
        self.arrived += 1
        if self.arrived % REQUESTS == 1:
            await self._engine.pause()
        async with anyio.create_task_group() as tasks:
            if self.arrived % REQUESTS == 0:
                tasks.start_soon(self._resume)
            generation = await self._engine.generate(request)
        return generation

    async def _resume(self) -> None:
        while self._engine.stats().waiting < REQUESTS:
            await anyio.lowlevel.checkpoint()
        await self._engine.resume()


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory, reward: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("usual") / "run"
    assert main(rl_only(folder, *SETTINGS, reward=reward)) == 0
    metrics = metrics_of(folder)
    assert sorted(metrics) == [1, 2]
    # Without gradients, nothing would be trained, and equality would show little.
    assert all(m["actor/grad_norm"] > 0 for m in metrics.values())
    for m in metrics.values():
        assert m["training/rollout_log_probs_bitwise_equal"] == 1.0
        assert m["training/rollout_probs_diff_max"] == 0.0
    return result_of(folder)


def run(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    reward: Path,
    overrides: Sequence[str],
    *,
    arrival: Callable[[AsyncEngine], Any] = lambda engine: engine,
) -> tuple[dict[str, Any], EngineStats]:
    engines: list[EmbeddedEngine] = []
    make = make_engine

    def observed(*arguments: Any, **more: Any) -> Any:
        engine = make(*arguments, **more)
        assert isinstance(engine, EmbeddedEngine)
        engines.append(engine)
        return arrival(engine)

    monkeypatch.setattr("slipstream.build.team.make_engine", observed)
    assert main(rl_only(folder, *SETTINGS, *overrides, reward=reward)) == 0
    return result_of(folder), engines[-1].stats()


@pytest.mark.parametrize("limit", [1, 7, 64])
def test_batch_limit_does_not_change_results(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reward: Path,
    usual: dict[str, Any],
    limit: int,
) -> None:
    result, stats = run(monkeypatch, tmp_path / "run", reward, [f"{ROLLOUT}.max_num_seqs={limit}"])
    assert stats.max_batch == min(limit, REQUESTS)
    assert_same_result(result, usual)


def test_order_of_arrival_does_not_change_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reward: Path, usual: dict[str, Any]
) -> None:
    result, _ = run(
        monkeypatch,
        tmp_path / "run",
        reward,
        [f"{ROLLOUT}.max_num_seqs=5"],
        arrival=Shuffled,
    )
    assert_same_result(result, usual)


def test_preemption_does_not_change_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reward: Path, usual: dict[str, Any]
) -> None:
    # A slot needs 2 layers x (keys, values) x 16 x 4 bytes = 256 bytes, and slots are allocated by
    # 64. Eight requests fit until one is longer than 64 tokens, then four.
    result, stats = run(
        monkeypatch,
        tmp_path / "run",
        reward,
        [f"{ROLLOUT}.kv_cache_bytes=150000"],
        arrival=Together,
    )
    assert stats.preempted > 0
    assert_same_result(result, usual)


def test_chunked_prefill_and_prefix_caching_do_not_change_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reward: Path, usual: dict[str, Any]
) -> None:
    settings = [
        f"{ROLLOUT}.max_num_batched_tokens=4",
        f"{ROLLOUT}.enable_prefix_caching=true",
        f"{ROLLOUT}.max_num_seqs=4",
    ]
    result, stats = run(monkeypatch, tmp_path / "run", reward, settings)
    assert stats.kv_bytes > 0
    assert_same_result(result, usual)


@pytest.mark.parametrize("tune", ["PREDEFINED", "COST"])
def test_drafts_do_not_change_results(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    reward: Path,
    usual: dict[str, Any],
    tune: str,
) -> None:
    settings = [
        "speculative.enable=true",
        "speculative.spec_strategy=history",
        "speculative.history.match_tokens=1",
        f"speculative.eagle.tune_algorithm={tune}",
        "speculative.eagle.spec_steps=3",
        "speculative.trace=true",
    ]
    result, stats = run(monkeypatch, tmp_path / "run", reward, settings)
    trace = (tmp_path / "run" / "speculation.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in trace]
    assert sum("plan" in event for event in events) == stats.decode_steps
    # With COST, such a short run of a tiny model may never draft.
    if tune == "PREDEFINED":
        assert stats.draft_tokens > stats.accepted_tokens > 0
    assert_same_result(result, usual)
