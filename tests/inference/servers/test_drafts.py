"""Draft heads in servers: updates, the check after them, counters and alarms."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from slipstream.errors import EngineError, RequestError
from slipstream.inference.servers import drafts as drafts_module
from slipstream.inference.servers.check import Verdict
from slipstream.inference.servers.drafts import DraftCheck, DraftFolder
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.vllm import VLLMServer
from slipstream.inference.servers.vllm_worker import checksum, tensors_of
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.files import load_draft_head
from slipstream.models.draft.model import DraftModel
from slipstream.types import Generation, StopReason, UpdateKind, VersionSpan, WeightUpdate
from tests.inference.contract import endless, gather, until
from tests.inference.helpers import make_engine
from tests.inference.servers.fleet import Fleet
from tests.inference.servers.local import plant
from tests.inference.servers.real import decoder, rpc

STEPS = 3

policy = partial(decoder, family="llama")
"""A policy for whose EAGLE heads vLLM has a class."""


def make_head(of: Decoder, seed: int = 0, scale: float = 1.0) -> DraftHead:
    """A head that drafts the last token again, which greedy responses often continue with. With a
    large `scale`, its drafts are arbitrary."""
    head = DraftHead(of.config)
    head.init_weights(seed, of)
    if scale != 1:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return head


def update_of(head: DraftModel, version: int) -> WeightUpdate:
    named = [(name, tensor.clone()) for name, tensor in head.state_dict().items()]
    return WeightUpdate(version=version, kind=UpdateKind.DRAFT, buckets=[named])


@pytest.fixture
def folder(tmp_path: Path) -> DraftFolder:
    return DraftFolder(make_head(policy(0)), tmp_path / "draft", torch.float32)


def test_a_folder_has_the_head_in_vllms_layout(folder: DraftFolder) -> None:
    head = make_head(policy(0))
    assert folder.method == "eagle"
    read = load_draft_head(folder.path, policy(0).config)
    for name, parameter in head.named_parameters():
        assert torch.equal(read.get_parameter(name), parameter)
    assert folder.stored.checksums == {n: checksum(p) for n, p in head.named_parameters()}


def test_an_update_replaces_the_file(folder: DraftFolder) -> None:
    new = make_head(policy(0), seed=1)
    stored = folder.write(update_of(new, 4))
    assert folder.version == 4
    found = dict(tensors_of(stored.path))
    assert found.keys() == dict(new.named_parameters()).keys()
    assert all(torch.equal(found[name], p) for name, p in new.named_parameters())
    assert stored.checksums == {name: checksum(p) for name, p in new.named_parameters()}


def test_a_wrong_update_is_refused_and_keeps_the_file(folder: DraftFolder) -> None:
    before = folder.file.read_bytes()
    good = update_of(make_head(policy(0), seed=1), 4)
    (bucket,) = good.buckets
    for wrong, match in (
        (replace(good, buckets=[bucket[1:]]), bucket[0][0]),
        (replace(good, buckets=[bucket], kind=UpdateKind.FULL), "draft weights"),
        (replace(good, buckets=[[*bucket, ("draft_tokens", torch.arange(3))]]), "vocabulary"),
    ):
        with pytest.raises(EngineError, match=match):
            folder.write(wrong)
        assert folder.file.read_bytes() == before
        assert folder.version == 0


def test_a_head_with_its_own_vocabulary_keeps_its_size(tmp_path: Path) -> None:
    of = decoder(0, num_layers=4)
    head = Eagle3Head(of.config, (1, 2, 3), [0, 2, 3, 9])
    head.init_weights(0, of)
    folder = DraftFolder(head, tmp_path / "draft", torch.float32)
    assert folder.method == "eagle3"
    other = Eagle3Head(of.config, (1, 2, 3), [0, 2, 3, 9])
    other.init_weights(1, of)
    folder.write(update_of(other, 1))
    read = load_draft_head(folder.path, of.config)
    assert read.tokens == (0, 2, 3, 9)
    assert torch.equal(read.get_parameter("lm_head.weight"), other.lm_head.weight)
    (bucket,) = update_of(other, 2).buckets
    without = [(name, tensor) for name, tensor in bucket if name != "draft_tokens"]
    with pytest.raises(EngineError, match="vocabulary"):
        folder.write(WeightUpdate(version=2, kind=UpdateKind.DRAFT, buckets=[without]))


def outputs(head: DraftModel, path: Path, noise: float = 0.0) -> dict[str, list[float]]:
    """What a server with `head` gives, with relative noise."""
    expected = DraftFolder(head, path, torch.float32).expected()
    generator = torch.Generator().manual_seed(0)
    return {
        name: (v + noise * v.norm() * torch.randn(v.shape, generator=generator)).tolist()
        for name, v in expected.items()
    }


@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_the_check_tells_which_head_a_server_has(tmp_path: Path, noise: float) -> None:
    of = policy(0)
    old, other = make_head(of, seed=1), make_head(of, seed=3)
    new = old.copy()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(1e-3 * torch.randn(parameter.shape))
    expected = {
        name: DraftFolder(head, tmp_path / name, torch.float32).expected()
        for name, head in (("old", old), ("new", new))
    }
    given = {
        name: outputs(head, tmp_path / f"{name}-given", noise)
        for name, head in (("old", old), ("new", new), ("other", other))
    }
    check = DraftCheck(torch.float32)
    assert check.decide(given["other"], expected["old"]).verdict is Verdict.WRONG
    assert check.decide(given["old"], expected["old"]).verdict is Verdict.NEW
    assert check.decide(given["old"], expected["new"]).verdict is Verdict.OLD
    assert check.decide(given["other"], expected["new"]).verdict is Verdict.WRONG
    # One layer of the old head among those of the new one.
    mixed = {**given["new"], "fc.weight": given["old"]["fc.weight"]}
    assert check.decide(mixed, expected["new"]).verdict is Verdict.WRONG
    assert check.decide(given["new"], expected["new"]).verdict is Verdict.NEW
    with pytest.raises(EngineError, match=r"fc\.weight"):
        check.decide({n: v for n, v in given["new"].items() if n != "fc.weight"}, expected["new"])


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path_factory.mktemp("fleet"), 2, make=policy, head=make_head, steps=STEPS)
    yield fleet
    fleet.close()


@pytest.fixture
def fleet(servers: Fleet) -> Fleet:
    servers.renew()
    for process in servers.processes:
        rpc(process, "slipstream_draft", True)
    return servers


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        with anyio.fail_after(60):
            return await work()

    return anyio.run(bounded)


def states(fleet: Fleet) -> list[dict[str, Any]]:
    return [rpc(process, "slipstream_draft")[0] for process in fleet.processes]


def greedy(fleet: Fleet, count: int) -> list[int]:
    """The greedy response of the trainer's policy, from the embedded engine."""
    return make_engine(fleet.policy).run([endless("a", count, temperature=0.0)])[0].token_ids


async def responses(engine: ServedEngine, count: int, tokens: int = 60) -> list[Generation]:
    requests = [endless(f"r{i}", tokens, temperature=0.0) for i in range(count)]
    return list((await gather(engine, *requests)).values())


def test_servers_draft_and_count_what_the_embedded_engine_counts(fleet: Fleet) -> None:
    assert fleet.head is not None
    own = make_engine(
        fleet.policy,
        proposer=EagleProposer(fleet.head, dtype=torch.float32),
        plan=DraftPlan.chain(STEPS),
    )
    own.run([endless("a", 60, temperature=0.0)])
    expected = own.stats()

    async def work() -> tuple[list[Generation], Any]:
        drafts = fleet.drafts(lambda _: None)
        with fleet.engine(0, drafts=drafts) as engine:
            found = await responses(engine, 1)
            streamed = await engine.generate(endless("s", 60, temperature=0.0, stop=("none",)))
            return [*found, streamed], engine.stats()

    found, stats = run(work)
    for result in found:
        assert result.error is None
        assert result.token_ids == greedy(fleet, 60)
        assert result.spans == [VersionSpan(0, 0, 60)]
    assert expected.accepted_tokens > 0
    # Both requests had the same drafts, and one of them was streamed.
    assert stats.draft_tokens == 2 * expected.draft_tokens
    assert stats.head_draft_tokens == stats.draft_tokens
    assert stats.verifications == 2 * expected.verifications
    assert stats.accepted_tokens == 2 * expected.accepted_tokens
    assert stats.offered_depths == tuple(2 * n for n in expected.offered_depths)
    assert stats.accepted_depths == tuple(2 * n for n in expected.accepted_depths)
    assert stats.accept_length == pytest.approx(expected.accept_length)
    assert stats.plan == "3_1_4"


def test_a_head_is_replaced_while_requests_run(fleet: Fleet) -> None:
    for process in fleet.processes:
        plant(process, "delay", 1.0)
    notes: list[str] = []
    new = make_head(fleet.policy, seed=1)

    async def work() -> list[Generation]:
        with fleet.engine(0, 1, drafts=fleet.drafts(notes.append)) as engine:
            results: list[Generation] = []

            async def generate() -> None:
                results.extend(await responses(engine, 4))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(generate)
                await until(lambda: engine.stats().running == 4)
                await engine.update_drafter(update_of(new, 2))
                assert engine.stats().running == 4
                for process in fleet.processes:
                    plant(process, "delay", 0.0)
            assert engine.stats().version == 0
            return results

    results = run(work)
    assert all(r.token_ids == greedy(fleet, 60) and r.error is None for r in results)
    assert [(s["version"], s["on"]) for s in states(fleet)] == [(2, True)] * 2
    assert notes == []


def test_an_untrained_head_does_not_draft(fleet: Fleet) -> None:
    async def work() -> list[int]:
        counts = []
        with fleet.engine(0, drafts=fleet.drafts(lambda _: None, waits=True)) as engine:
            for version in (None, 0, 1):
                if version is not None:
                    await engine.update_drafter(update_of(make_head(fleet.policy), version))
                await responses(engine, 1)
                counts.append(engine.stats().draft_tokens)
        return counts

    start, resumed, trained = run(work)
    assert start == resumed == 0
    assert trained > 0


class Recorded(VLLMServer):
    """A client that records when it loads something."""

    events: list[str]

    async def load(self, path: Path) -> Any:
        self.events.append("policy begins")
        found = await super().load(path)
        await anyio.sleep(0.05)
        self.events.append("policy ends")
        return found

    async def load_draft(self, path: Path, version: int) -> Any:
        self.events.append("draft begins")
        found = await super().load_draft(path, version)
        await anyio.sleep(0.05)
        self.events.append("draft ends")
        return found


def test_policy_and_draft_head_are_loaded_one_after_the_other(fleet: Fleet) -> None:
    Recorded.events = []

    async def work() -> None:
        with fleet.engine(0, drafts=fleet.drafts(lambda _: None), client=Recorded) as engine:
            await responses(engine, 1, 2)
            Recorded.events.clear()
            async with anyio.create_task_group() as tasks:
                for version in (1, 2):
                    update = update_of(make_head(fleet.policy, seed=version), version)
                    tasks.start_soon(engine.update_weights, fleet.update(version))
                    tasks.start_soon(engine.update_drafter, update)

    run(work)
    begins, ends = Recorded.events[::2], Recorded.events[1::2]
    assert sorted(begins) == ["draft begins"] * 2 + ["policy begins"] * 2
    assert [event.replace("begins", "ends") for event in begins] == ends


def test_a_server_that_dies_gets_the_newest_head(fleet: Fleet) -> None:
    notes: list[str] = []

    async def work() -> tuple[list[Generation], int]:
        with fleet.engine(0, 1, drafts=fleet.drafts(notes.append)) as engine:
            await engine.update_drafter(update_of(make_head(fleet.policy, seed=1), 7))
            plant(fleet.processes[0], "die_after", 40)
            results = await responses(engine, 4)
            return results, engine.stats().accepted_tokens

    url = fleet.processes[0].url
    results, accepted = run(work)
    assert fleet.processes[0].url != url
    assert all(r.token_ids == greedy(fleet, 60) and r.error is None for r in results)
    assert [(s["version"], s["on"]) for s in states(fleet)] == [(7, True)] * 2
    assert accepted > 0
    assert notes == []


FAULTS = {
    "skip_draft": (True, "0% of the change"),
    "random_draft": (True, "another head than draft head 2"),
    "draft_version": (1, "has draft head 1, but draft head 2"),
    "wrong_draft_sum": (True, r"fc\.weight of draft head 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_within_the_update(fleet: Fleet, fault: str) -> None:
    value, match = FAULTS[fault]
    notes: list[str] = []

    async def work() -> list[Generation]:
        with fleet.engine(0, 1, drafts=fleet.drafts(notes.append)) as engine:
            await engine.update_drafter(update_of(make_head(fleet.policy, seed=1), 1))
            assert notes == []
            plant(fleet.processes[1], fault, value)
            await engine.update_drafter(update_of(make_head(fleet.policy, seed=2), 2))
            return await responses(engine, 2)

    results = run(work)
    (note,) = notes
    assert fleet.processes[1].url in note
    assert fleet.processes[0].url not in note
    assert re.search(match, note), note
    assert "does not draft until" in note
    assert [s["on"] for s in states(fleet)] == [True, False]
    assert all(r.token_ids == greedy(fleet, 60) and r.error is None for r in results)


def test_a_head_that_was_replaced_from_outside_is_found_at_the_next_update(
    fleet: Fleet, tmp_path: Path
) -> None:
    notes: list[str] = []
    random = DraftFolder(
        make_head(fleet.policy, seed=9, scale=0.1), tmp_path / "random", torch.float32
    )

    async def work() -> None:
        with fleet.engine(0, 1, drafts=fleet.drafts(notes.append)) as engine:
            await engine.update_drafter(update_of(make_head(fleet.policy, seed=1), 1))
            rpc(fleet.processes[1], "slipstream_load_draft", str(random.file), 1)
            fleet.move(0.01)
            await engine.update_weights(fleet.update(1))

    run(work)
    (note,) = notes
    assert fleet.processes[1].url in note
    assert "another head than draft head 1" in note
    probes = [rpc(p, "slipstream_probe_draft")[0]["outputs"] for p in fleet.processes]
    assert probes[0] == probes[1]
    assert [s["on"] for s in states(fleet)] == [True, True]


def test_drafting_in_vain_is_switched_off_until_the_next_head(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts_module, "ALARM_DRAFTS", 40)
    # The vocabulary is so small that arbitrary drafts are accepted at times.
    monkeypatch.setattr(drafts_module, "ALARM_LENGTH", 1.15)
    notes: list[str] = []

    async def work() -> list[int]:
        counts = []
        with fleet.engine(0, drafts=fleet.drafts(notes.append)) as engine:
            for version, head in (
                (1, make_head(fleet.policy, seed=9, scale=3.0)),
                (2, make_head(fleet.policy)),
            ):
                await engine.update_drafter(update_of(head, version))
                for _ in range(3):
                    await responses(engine, 1)
                    counts.append(engine.stats().verifications)
        return counts

    first, second, third, *later = run(work)
    (note,) = notes
    assert fleet.processes[0].url in note
    assert "draft head 1" in note
    assert f"over {first} drafts" in note
    assert 40 <= first == second == third
    assert later[0] > third
    assert states(fleet)[0]["on"] is True


def test_what_vllm_cannot_do_with_drafts_is_refused(fleet: Fleet) -> None:
    async def work() -> None:
        request = endless("a", 4)
        request = replace(request, params=replace(request.params, min_p=0.1))
        drafts = fleet.drafts(lambda _: None)
        with fleet.engine(0, drafts=drafts) as engine, pytest.raises(RequestError, match="min_p=0"):
            await engine.generate(request)
        with fleet.engine(0) as engine, pytest.raises(EngineError, match="no draft head"):
            await engine.update_drafter(update_of(make_head(fleet.policy), 1))

    run(work)


def test_a_server_that_does_not_count_drafts_is_named(fleet: Fleet) -> None:
    class Silent(VLLMServer):
        async def _post(self, route: str, body: Any = None, **more: Any) -> Any:
            answer = await super()._post(route, body, **more)
            if isinstance(answer, dict):
                answer.pop("metrics", None)
            return answer

    async def work() -> Generation:
        with fleet.engine(0, drafts=fleet.drafts(lambda _: None), client=Silent) as engine:
            return await engine.generate(endless("a", 4))

    result = run(work)
    assert result.stop_reason is StopReason.ERROR
    assert "--per-request-spec-decode-metrics" in str(result.error)
