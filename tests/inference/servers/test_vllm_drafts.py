"""Draft heads in real vLLM servers (`make peers`, `make test-peers`).

`python -m pytest tests/inference/servers/test_vllm_drafts.py -s` prints what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from slipstream.inference.servers import drafts as drafts_module
from slipstream.inference.servers.drafts import DraftFolder, ServedDrafts
from slipstream.inference.servers.engine import ServedEngine
from slipstream.inference.servers.process import ServerProcess
from slipstream.inference.servers.vllm import VLLMServer
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.models import Decoder
from slipstream.models.draft.eagle1 import DraftHead
from slipstream.models.draft.eagle3 import Eagle3Head
from slipstream.models.draft.model import DraftModel
from slipstream.types import Generation, UpdateKind, WeightUpdate
from tests.inference.contract import endless, gather, until
from tests.inference.helpers import EOS, VOCAB, make_engine, update_from
from tests.inference.servers.real import CLIENT, PYTHON, decoder, engine_on, launch, rpc

STEPS = 3
ROUNDS, SAMPLES = 40, 50
"""Requests, and samples of each, per frequency test."""

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs vLLM: make peers"),
]

MAKES = {
    "eagle": partial(decoder, family="llama"),
    "eagle3": partial(decoder, num_layers=4),
}


def make_head(policy: Decoder, seed: int = 0) -> DraftModel:
    """A head that drafts the last token again, which greedy responses often continue with."""
    head: DraftModel = DraftHead(policy.config)
    if policy.config.num_layers == 4:
        head = Eagle3Head(policy.config, (1, 2, 3))
    head.init_weights(seed, policy)
    return head


def update_of(head: DraftModel, version: int) -> WeightUpdate:
    named = [(name, tensor.clone()) for name, tensor in head.state_dict().items()]
    return WeightUpdate(version=version, kind=UpdateKind.DRAFT, buckets=[named])


class Served:
    """A server with a draft head of one kind."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.make = MAKES[kind]
        self.policy = self.make(0, eos=EOS)
        self.head = make_head(self.policy)
        self.folder = DraftFolder(self.head, folder / "draft", torch.float32)
        self.process = launch(
            folder,
            policy=self.policy,
            max_model_len=400,
            speculative_config={
                "method": kind,
                "model": str(self.folder.path),
                "num_speculative_tokens": STEPS,
            },
            per_request_spec_decode_metrics="detailed",
        )

    def drafts(self, notify: Callable[[str], None]) -> ServedDrafts:
        self.folder.write(update_of(self.head, 0))
        return ServedDrafts(self.folder, steps=STEPS, dtype=torch.float32, notify=notify)

    def engine(self, notify: Callable[[str], None]) -> ServedEngine:
        """An engine with the first policy and the first head."""
        rpc(self.process, "plant", "")
        return engine_on(
            self.process, policy=self.policy, max_model_len=400, drafts=self.drafts(notify)
        )

    def greedy(self, policy: Decoder) -> list[int]:
        return make_engine(policy).run([endless("a", 60, temperature=0.0)])[0].token_ids


def accept_length(policy: Decoder, head: DraftModel) -> float:
    """The accepted length of greedy responses in the embedded engine."""
    engine = make_engine(
        policy,
        proposer=EagleProposer(head, dtype=torch.float32),
        plan=DraftPlan.chain(STEPS),
    )
    engine.run([endless("a", 60, temperature=0.0)])
    return engine.stats().accept_length


@pytest.fixture(scope="module", params=["eagle", "eagle3"])
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    found = Served(request.param, tmp_path_factory.mktemp(request.param))
    yield found
    found.process.close()


def run(work: Callable[[], Any]) -> Any:
    async def bounded() -> Any:
        with anyio.fail_after(300):
            return await work()

    return anyio.run(bounded)


async def responses(engine: ServedEngine, count: int, tokens: int = 60) -> list[Generation]:
    requests = [endless(f"r{i}", tokens, temperature=0.0) for i in range(count)]
    return list((await gather(engine, *requests)).values())


def test_a_head_changes_speed_and_not_tokens(served: Served) -> None:
    """Also while the head is replaced, with the policy's next weights, and switched off. An EAGLE
    head uses the embedding and the LM head of the policy, so it needs the new ones."""
    notes: list[str] = []
    later = served.make(1, eos=EOS)
    second, third = make_head(served.policy, seed=1), make_head(later, seed=2)
    lengths: dict[str, float] = {}

    async def work() -> dict[str, list[Generation]]:
        engine, found = served.engine(notes.append), {}
        before = engine.stats()

        async def phase(name: str, update: WeightUpdate | None = None) -> None:
            nonlocal before
            found[name] = await responses(engine, 4)
            now = engine.stats()
            lengths[name], before = now.since(before).accept_length, now

        try:
            await phase("first head")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(phase, "replaced")
                await until(lambda: engine.stats().running == 4)
                await engine.update_drafter(update_of(second, 1))
            await phase("second head")
            await engine.update_weights(update_from(later, 1))
            await phase("next policy")
            await engine.update_drafter(update_of(third, 2))
            await phase("its head")
            rpc(served.process, "slipstream_draft", False)
            await phase("off")
        finally:
            engine.close()
        return found

    found = run(work)
    expected = {
        "first head": accept_length(served.policy, served.head),
        "second head": accept_length(served.policy, second),
        "next policy": accept_length(later, second),
        "its head": accept_length(later, third),
        "off": 1.0,
    }
    print({name: (round(lengths[name], 3), round(expected[name], 3)) for name in expected})
    old, new = served.greedy(served.policy), served.greedy(later)
    for name, results in found.items():
        wanted = new if name in ("next policy", "its head", "off") else old
        assert all(r.error is None and r.token_ids == wanted for r in results), name
    # The last drafts of a response differ: vLLM drafts beyond its end.
    assert {name: lengths[name] for name in expected} == pytest.approx(expected, rel=0.1)
    assert notes == []


def test_a_head_like_the_policy_does_not_become_a_part_of_it(served: Served) -> None:
    """A new EAGLE-3 head has the policy's LM head. If vLLM shared it, the next head would
    change the policy."""

    async def work() -> list[Generation]:
        engine = served.engine(lambda _: None)
        other = make_head(served.policy)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(-1.5)
        try:
            await engine.update_drafter(update_of(other, 1))
            return await responses(engine, 1)
        finally:
            engine.close()

    (result,) = run(work)
    expected = make_engine(served.policy).run([endless("a", 60, temperature=0.0)])[0]
    assert result.token_ids == expected.token_ids
    assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-4)


@torch.no_grad()
def next_logits(policy: Decoder, contexts: list[list[int]]) -> torch.Tensor:
    """(B, V): the logits after contexts of one length, in float64."""
    length = len(contexts[0])
    rows = torch.tensor(contexts)
    padded = torch.nn.functional.pad(rows, (0, -length % 16))
    positions = torch.arange(padded.shape[1]).expand(len(rows), -1)
    packed = policy.pack(torch.float32)
    final = packed.forward(padded, positions).final[:, length - 1]
    return packed.lm_head(final.contiguous()).double()


def marginals(policy: Decoder, prompt: list[int], temperature: float) -> list[torch.Tensor]:
    """The exact probabilities (V,) of the second and the third token after a prompt."""

    def after(contexts: list[list[int]]) -> torch.Tensor:
        return (next_logits(policy, contexts) / temperature).softmax(-1)

    tokens = range(VOCAB)
    first = after([prompt])[0]
    pairs = after([[*prompt, a] for a in tokens]) * first[:, None]
    third = after([[*prompt, a, b] for a in tokens for b in tokens])
    return [pairs.sum(0), (third * pairs.flatten()[:, None]).sum(0)]


def sampled(process: ServerProcess, prompt: list[int], temperature: float) -> torch.Tensor:
    """(2, V): how often each token was sampled as the second and the third one."""
    counts = torch.zeros(2, VOCAB, dtype=torch.float64)
    for round_ in range(ROUNDS):
        body = {
            "request_id": f"f{round_}",
            "token_ids": prompt,
            "sampling_params": {
                "n": SAMPLES,
                "max_tokens": 6,
                "temperature": temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "seed": 1000 * round_ + 7,
                "ignore_eos": True,
                "detokenize": False,
            },
        }
        answer = CLIENT.post(process.url + "/inference/v1/generate", json=body)
        answer.raise_for_status()
        for choice in answer.json()["choices"]:
            for place in range(2):
                counts[place, choice["token_ids"][1 + place]] += 1
    return counts


def p_value(counts: torch.Tensor, exact: torch.Tensor) -> float:
    """Of a chi-square test. Tokens that are expected less than 5 times count together."""
    total = counts.sum()
    common = exact * total >= 5
    seen = torch.cat([counts[common], counts[~common].sum()[None]])
    wanted = torch.cat([exact[common], exact[~common].sum()[None]]) * total
    if wanted[-1] < 1:
        # Next to nothing is expected there: it joins the last one.
        seen = torch.cat([seen[:-2], seen[-2:].sum()[None]])
        wanted = torch.cat([wanted[:-2], wanted[-2:].sum()[None]])
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor(float(len(seen) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("mended", [True, False])
def test_drafts_keep_the_distribution(served: Served, temperature: float, mended: bool) -> None:
    prompt = list(endless("a", 1).prompt_ids)
    engine = served.engine(lambda _: None)
    run(lambda: responses(engine, 1, 2))
    engine.close()
    if not mended:
        rpc(served.process, "plant", "released_sampling")
    counts = sampled(served.process, prompt, temperature)
    rpc(served.process, "plant", "")
    exact = marginals(served.policy, prompt, temperature)
    found = [p_value(c, e) for c, e in zip(counts, exact, strict=True)]
    print(f"T={temperature:g}, mended {mended}: p = {', '.join(f'{p:.3g}' for p in found)}")
    if mended:
        assert min(found) > 1e-3
    else:
        assert min(found) < 1e-6


def test_log_probs_of_given_tokens_beside_requests_with_drafts(served: Served) -> None:
    contexts, tokens = [[3, 4, 5], [9, 8]], [[1, 2, 3], [7, 8, 9]]

    async def work() -> list[list[float]]:
        engine = served.engine(lambda _: None)
        client = VLLMServer(served.process.url, drafts=True)
        found: list[list[float]] = []

        async def busy() -> None:
            while not found:
                await responses(engine, 4, 300)

        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(busy)
                await until(lambda: engine.stats().running == 4)
                found += await client.log_probs(contexts, tokens, "0")
        finally:
            engine.close()
        return found

    found = run(work)
    for context, ids, values in zip(contexts, tokens, found, strict=True):
        row = next_logits(served.policy, [context])[0].log_softmax(-1)
        assert values == pytest.approx(row[ids].tolist(), abs=1e-4)


@pytest.mark.parametrize("params", [{"top_k": 5}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.9}])
def test_truncated_sampling_with_drafts(served: Served, params: dict[str, Any]) -> None:
    """`top_k` alone ends a server as vLLM 0.32 releases it."""

    async def work() -> list[Generation]:
        engine = served.engine(lambda _: None)
        try:
            requests = [endless(f"r{i}", 40, **params) for i in range(8)]
            return list((await gather(engine, *requests)).values())
        finally:
            engine.close()

    for result in run(work):
        assert result.error is None
        context = [*endless("a", 1).prompt_ids]
        for token, given in zip(result.token_ids, result.log_probs, strict=True):
            row = next_logits(served.policy, [context])[0].log_softmax(-1)
            rank = int((row > row[token]).sum())
            assert rank < params.get("top_k", VOCAB)
            assert given >= float(row[token]) - 1e-4
            context.append(token)
    assert served.process.alive


FAULTS = {
    "": None,
    "skip_draft": "0% of the change",
    "random_draft": "another head than draft head 2",
    "version": "has draft head 9, but draft head 2",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found_within_the_update(served: Served, fault: str) -> None:
    notes: list[str] = []

    class Mislabelled(VLLMServer):
        async def load_draft(self, path: Path, version: int) -> Any:
            other = 9 if fault == "version" and version == 2 else version
            return await super().load_draft(path, other)

    async def work() -> list[Generation]:
        rpc(served.process, "plant", "")
        engine = engine_on(
            served.process,
            policy=served.policy,
            max_model_len=400,
            drafts=served.drafts(notes.append),
            client=Mislabelled,
        )
        try:
            await engine.update_drafter(update_of(make_head(served.policy, seed=1), 1))
            rpc(served.process, "plant", fault if fault != "version" else "")
            await engine.update_drafter(update_of(make_head(served.policy, seed=2), 2))
            return await responses(engine, 2)
        finally:
            rpc(served.process, "plant", "")
            engine.close()

    results = run(work)
    print(f"{fault or 'no fault'}: {notes}")
    assert all(r.token_ids == served.greedy(served.policy) for r in results)
    state = rpc(served.process, "slipstream_draft")[0]
    if fault:
        (note,) = notes
        assert str(FAULTS[fault]) in note
        assert served.process.url in note
        assert state["on"] is False
    else:
        assert notes == []
        assert (state["on"], state["version"]) == (True, 2)


def test_drafting_in_vain_is_switched_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts_module, "ALARM_DRAFTS", 100)
    # The vocabulary is so small that arbitrary drafts are accepted at times.
    monkeypatch.setattr(drafts_module, "ALARM_LENGTH", 1.15)
    notes: list[str] = []

    async def work() -> tuple[int, int]:
        engine = served.engine(notes.append)
        random = make_head(served.policy)
        with torch.no_grad():
            for parameter in random.parameters():
                parameter.normal_(std=3)
        try:
            await engine.update_drafter(update_of(random, 1))
            await responses(engine, 4)
            first = engine.stats().verifications
            await responses(engine, 2)
            return first, engine.stats().verifications
        finally:
            engine.close()

    first, second = run(work)
    print(notes)
    (note,) = notes
    assert served.process.url in note
    assert "draft head 1" in note
    assert first == second
