"""Heads published during a rollout are used at once, and do not change the policy."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

from slipstream.build import cotraining as build_cotraining
from slipstream.checkpoint.state import draft_folder
from slipstream.cli import main
from slipstream.deadlines import Deadlines
from slipstream.drafter import opportunistic
from slipstream.drafter.buffer import BufferedSequence, BufferSettings
from slipstream.drafter.collector import CollectorSettings
from slipstream.drafter.cotraining import CoTrainSettings
from slipstream.drafter.interval import head_writer
from slipstream.drafter.opportunistic import HeadInUse, OpportunisticTraining
from slipstream.drafter.sequences import VocabLayers
from slipstream.drafter.trainer import DraftTrainSettings
from slipstream.drafter.worker import SliceResult, WorkerSetup, _training
from slipstream.errors import CheckpointError, EngineError
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.metrics.loggers import read_jsonl
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.files import load_draft_head
from slipstream.models.draft.model import DraftModel
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.optim import OptimSettings
from slipstream.types import SamplingParams, WeightUpdate
from tests.drafter.helpers import new_head
from tests.inference.helpers import shared_decoder
from tests.run.helpers import policy, rl_only, write_reward
from tests.run.test_cotraining import LEARN, OPPORTUNISTIC, SETTINGS


class QuickWorker:
    """A fake worker with a new head at every request, trained on responses of policy `step - 1`."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._version = setup.version
        self._step = 0
        self.cpu_seconds = 0.0

    def learn(self, kept: Sequence[BufferedSequence], vocab: VocabLayers, step: int) -> None:
        self._step = step

    def results(self) -> list[SliceResult]:
        if not self._step:
            return []
        self._version += 1
        self.cpu_seconds += 0.5
        draw = torch.Generator().manual_seed(self._version)
        return [
            SliceResult(
                step=self._step,
                metrics={"drafter/loss": 1.0},
                version=self._version,
                trained_to=self._step - 1,
                weights={
                    name: w + torch.randn(w.shape, generator=draw) / 10
                    for name, w in self._setup.weights.items()
                },
                held_back=False,
                failure=None,
                cpu_seconds=0.5,
            )
        ]

    def wait_until_ready(self, seconds: float) -> bool:
        return True

    def stop(self) -> None:
        """Do nothing: no training is in progress."""

    def set_running(self, running: bool) -> None:
        """Do nothing: there is no process to stop or continue."""

    def close(self) -> None:
        """Do nothing: there is no process."""


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of running requests at each publication of a head."""
    running: list[int] = []
    update = EmbeddedEngine.update_drafter

    async def noted(self: EmbeddedEngine, new: WeightUpdate) -> None:
        running.append(self.stats().running)
        await update(self, new)

    monkeypatch.setattr(EmbeddedEngine, "update_drafter", noted)
    monkeypatch.setattr(opportunistic, "DraftWorker", QuickWorker)
    monkeypatch.setattr(opportunistic, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(build_cotraining, "usable_cores", lambda: 2)
    return running


def run(folder: Path, *settings: str, reward: Path) -> dict[int, dict[str, float]]:
    assert main(rl_only(folder, *SETTINGS, *settings, reward=reward)) == 0
    return dict(read_jsonl(folder / "metrics.jsonl"))


def test_head_published_during_a_rollout_changes_neither_rollouts_nor_policy_weights(
    tmp_path: Path, published: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = write_reward(tmp_path)
    monkeypatch.setattr(opportunistic, "_PUBLISH_SECONDS", 0.0)
    steps = run(tmp_path / "on", *LEARN, OPPORTUNISTIC, reward=reward)
    # Three heads are published between steps: none before step 1, which has no earlier responses.
    # All others are published during rollouts.
    assert steps[4]["drafter/publishes_in_rollouts"] == len(published) - 3 > 0
    assert sum(count > 0 for count in published) > 0
    assert steps[1]["rollout/used_idle_core_seconds"] == 0
    assert steps[1].get("drafter/staleness_versions") is None
    for n in (2, 3, 4):
        # Work before the rollout is not counted.
        assert 0 < steps[n]["rollout/used_idle_core_seconds"] < steps[n]["drafter/cpu_seconds"]
        # The worker was trained on the previous step, sampled by policy n - 2. The policy is n now.
        assert steps[n]["drafter/staleness_versions"] == 2
    assert steps[4]["drafter/cpu_seconds"] == 0.5 * steps[4]["drafter/version"]
    run(tmp_path / "off", reward=reward)
    ours, theirs = policy(tmp_path / "on", 4), policy(tmp_path / "off", 4)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for step in range(1, 5):
        name = f"rollouts/{step}.jsonl"
        assert (tmp_path / "on" / name).read_bytes() == (tmp_path / "off" / name).read_bytes()


def test_heads_are_published_in_rollouts_at_intervals(tmp_path: Path, published: list[int]) -> None:
    steps = run(tmp_path / "run", *LEARN, OPPORTUNISTIC, reward=write_reward(tmp_path))
    assert steps[4]["drafter/publishes_in_rollouts"] == 1
    assert len(published) == 1 + 3


def training(
    receive: Callable[[], Awaitable[None]],
    compute: ComputeThread,
    notify: Callable[[str], None] = lambda text: None,
) -> OpportunisticTraining:
    class Receiver:
        async def update_drafter(self, update: WeightUpdate) -> None:
            await receive()

    setup = worker_setup(new_head(shared_decoder()))
    made = OpportunisticTraining(
        setup,
        lambda: VocabLayers.of(shared_decoder(), torch.float32),
        [Receiver()],
        compute,
        notify=notify,
        deadlines=Deadlines(),
    )
    worker: Any = QuickWorker(setup)
    worker.learn([], None, 1)
    made._worker = worker
    return made


def worker_setup(head: DraftModel) -> WorkerSetup:
    return WorkerSetup(
        blank=head.blank(),
        weights={name: tensor.detach() for name, tensor in head.state_dict().items()},
        version=0,
        collector=CollectorSettings(
            params=SamplingParams(max_tokens=4), max_length=8, held_out=1, held_out_every=2
        ),
        buffer=BufferSettings(),
        train=CoTrainSettings(
            train=DraftTrainSettings(optim=OptimSettings(lr=0.0)),
            updates=1,
            batch_size=1,
            accept_depth=1,
            ema_decay=0.0,
        ),
    )


def test_a_restored_head_may_have_a_smaller_draft_vocabulary(tmp_path: Path) -> None:
    config = shared_decoder().config
    first, smaller = DraftHead(config, range(24)), DraftHead(config, range(3, 11))
    for head in (first, smaller):
        head.init_weights(1)
    setup = replace(
        worker_setup(first), train=replace(worker_setup(first).train, sizes_vocabulary=True)
    )
    state = {"used": dict(smaller.state_dict()), "version": 2, "trained_to": 5}
    used = HeadInUse(setup)
    used.load_state_dict(state)
    assert used.weights["draft_tokens"].tolist() == [*range(3, 11)]
    assert _training(used.setup).trainer.head.tokens == tuple(range(3, 11))
    head_writer(used.setup.blank, used.state_dict())(tmp_path)
    assert load_draft_head(draft_folder(tmp_path)).tokens == tuple(range(3, 11))
    with pytest.raises(CheckpointError, match="draft_tokens"):
        HeadInUse(worker_setup(first)).load_state_dict(state)


def test_errors_of_publishing_and_of_the_rollout_keep_their_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opportunistic, "_POLL_SECONDS", 0.0)

    async def refuse() -> None:
        raise EngineError("no such head")

    async def rollout(made: OpportunisticTraining, error: Exception | None) -> None:
        async with made.rollout(2):
            await anyio.sleep(0.02)
            if error is not None:
                raise error

    compute = ComputeThread()
    try:
        with pytest.raises(EngineError, match="no such head"):
            anyio.run(rollout, training(refuse, compute), None)
        with pytest.raises(ZeroDivisionError):
            anyio.run(rollout, training(anyio.lowlevel.checkpoint, compute), ZeroDivisionError())
    finally:
        compute.close()


def test_stuck_worker_and_engine_are_reported_and_not_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opportunistic, "_POLL_SECONDS", 0.0)
    monkeypatch.setattr(opportunistic, "_PUBLISH_SECONDS", 0.0)
    monkeypatch.setattr(opportunistic, "_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(QuickWorker, "wait_until_ready", lambda self, seconds: False)
    results = QuickWorker.results
    # There is one head, and publishing it is tried again.
    monkeypatch.setattr(QuickWorker, "results", lambda self: [] if self._version else results(self))
    said, again, asked = list[str](), anyio.Event(), list[int]()

    async def never() -> None:
        asked.append(1)
        if len(asked) > 1:
            again.set()
        await anyio.sleep_forever()

    async def rollout() -> None:
        async with training(never, compute, said.append).rollout(2):
            with anyio.fail_after(20):
                await again.wait()

    compute = ComputeThread()
    try:
        anyio.run(rollout)
    finally:
        compute.close()
    assert "has not started within" in said[0]
    assert "has not loaded a draft head" in said[1]


def test_publishing_completes_after_the_rollout_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opportunistic, "_POLL_SECONDS", 0.0)
    begun, ended = anyio.Event(), list[bool]()

    async def slowly() -> None:
        begun.set()
        for _ in range(5):
            await anyio.sleep(0.001)
        ended.append(True)

    compute = ComputeThread()

    async def rollout() -> None:
        async with training(slowly, compute).rollout(2):
            await begun.wait()

    try:
        anyio.run(rollout)
    finally:
        compute.close()
    assert ended == [True]
