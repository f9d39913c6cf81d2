"""The lossless check with a toy model, and planted bugs that it must detect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream import cli
from slipstream.bench.lossless import check as lossless_check
from slipstream.bench.lossless import workloads
from slipstream.bench.lossless.check import different, total
from slipstream.bench.lossless.targets import Target, brief_head, own_texts, random_target
from slipstream.bench.lossless.workloads import LosslessBench
from slipstream.bench.record import ResultRow
from slipstream.bench.speculation import drafters
from slipstream.errors import ConfigError
from slipstream.inference.engine import engine as engine_module
from slipstream.inference.engine.kv_cache import KVStore
from slipstream.inference.engine.runner import Runner
from slipstream.inference.engine.verification import Verification
from slipstream.inference.speculation.eagle import EagleProposer
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.models import Decoder
from slipstream.models.decoder import HiddenStates, supports_varlen
from slipstream.models.quantized import why_not_quantized
from slipstream.sampling.choose import Choice, SamplingRows
from tests.inference.helpers import make_decoder, make_engine, make_request

PERIOD = 5


@cache
def toy() -> Target:
    return random_target("tiny")


def bench(tokens: int = 800, dtype: torch.dtype = torch.float32) -> LosslessBench:
    return LosslessBench(
        target=toy(), tokens=tokens, dtype=dtype, batch=8, mean_tokens=24, long_context=200
    )


def value(row: ResultRow, name: str) -> float:
    found = row.values[name]
    assert isinstance(found, float | int)
    return found


def test_drafts_change_no_bit(dtype: torch.dtype) -> None:
    lines: list[str] = []
    rows = lossless_check.run(bench(800 if dtype == torch.float32 else 1, dtype), lines.append)
    expected = list(workloads.PROPOSERS)
    if not supports_varlen(toy().decoder.config, dtype, torch.device("cpu")):
        expected.remove(workloads.COPY)
        assert "quantized copy: not checked, because" in lines[0]
    assert [row.contender for row in rows] == expected
    assert different(rows) == 0
    for row in rows:
        assert value(row, "tokens") >= (800 if dtype == torch.float32 else 400)
        assert row.dtype == str(dtype).removeprefix("torch.")
        # Equality says little without these events.
        for event in lossless_check.EVENTS:
            # History and a quantized copy draft only chains.
            chains = row.contender in ("seeded history", "quantized copy")
            never = event == "siblings" and chains
            never |= event == "renewed" and row.contender != workloads.RENEWED
            assert (value(row, event) > 0) is not never, event
        assert value(row, "aborted") == value(row, "resumed")
        # The EAGLE-3 head is untrained.
        least = 1.0 if row.contender == "eagle3 head" else 1.5
        # The copy is right more often than the heads.
        most = 5.0 if row.contender == workloads.COPY else 4.0
        assert least < value(row, "accept_length") < most
        assert value(row, "largest_batch") == 8
        assert value(row, "longest_context") > 200
    assert sum("tokens identical" in line for line in lines) % len(expected) == 0
    assert "tokens identical" in lines[-1]


@pytest.mark.parametrize("name", ["draft vocabulary", "quantized copy", "union"])
def test_drafts_change_no_bit_with_a_vocabulary_of_49152(name: str) -> None:
    target = random_target("wordy")
    if name == workloads.COPY and why_not_quantized(
        target.decoder.config, torch.bfloat16, torch.device("cpu")
    ):
        pytest.skip("no compiled kernels here")
    assert target.decoder.config.vocab_size == 49_152
    (row,) = lossless_check.run(
        LosslessBench(
            target=target,
            tokens=1,
            dtype=torch.bfloat16,
            batch=8,
            mean_tokens=24,
            long_context=200,
            proposers=[name],
        )
    )
    assert different([row]) == 0
    assert value(row, "tokens") > 400
    assert value(row, "accepted") > 50


def one_proposer(name: str) -> list[ResultRow]:
    rare = LosslessBench(
        target=toy(),
        tokens=1,
        batch=8,
        mean_tokens=24,
        long_context=20,
        proposers=[name],
    )
    return lossless_check.run(rare)


def test_accepting_drafts_without_comparing_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    # The engine accepts every draft without comparing it with the policy's token.
    monkeypatch.setattr(
        engine_module, "accepted_path", lambda tokens, parents, chosen: list(range(len(tokens)))
    )
    assert different(one_proposer("lying oracle")) > 50


def test_noise_of_the_wrong_position_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    # Only the verification of drafts uses the noise of the next position.
    choose, decode = Runner.choose, Runner.decode
    width = 1

    def watched(self: Runner, store: KVStore, step: Verification) -> HiddenStates:
        nonlocal width
        width = step.ids_BT.shape[1]
        return decode(self, store, step)

    def shifted(self: Runner, hidden_ND: Tensor, positions_N: Tensor, rows: SamplingRows) -> Choice:
        return choose(self, hidden_ND, positions_N + (width > 1), rows)

    monkeypatch.setattr(Runner, "decode", watched)
    monkeypatch.setattr(Runner, "choose", shifted)
    rows = one_proposer("lying oracle")
    assert different(rows) > 50


def test_every_bit_of_a_token_counts() -> None:
    ids, full, law = [3, 4, 5], [-1.0, -2.0, -3.0], [-0.5, -1.0, -1.5]
    other = [-2.0, -2.0000000000000004, -2.0]
    assert lossless_check.identical_tokens((ids, full, law), (ids, full, law)) == 3
    assert lossless_check.identical_tokens((ids, full, law), ([3, 4, 6], full, law)) == 2
    assert lossless_check.identical_tokens((ids, full, law), (ids, full, other)) == 0
    assert lossless_check.identical_tokens((ids, full, law), (ids[:2], full[:2], law[:2])) == 2


@cache
def periodic() -> tuple[Decoder, Sequence[Sequence[int]]]:
    """A policy that repeats its tokens with the period `PERIOD`, and its texts.

    The next token does not follow from the last one alone, so a draft head needs the earlier ones.
    """
    decoder = make_decoder(tie_word_embeddings=False)
    decoder.init_weights(0)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=5e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        ids = torch.randint(64, (32, PERIOD), generator=generator).repeat(1, 7)[:, :32]
        packed = decoder.pack(torch.float32)
        hidden = packed.forward(ids, torch.arange(32).expand(32, -1)).final[:, PERIOD - 1 : -1]
        loss = F.cross_entropy(packed.lm_head(hidden.flatten(0, 1)), ids[:, PERIOD:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    prompts = torch.randint(64, (48, PERIOD), generator=generator).tolist()
    requests = [
        make_request(f"t{i}", prompt, max_tokens=91, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    done = make_engine(decoder).run(requests)
    return decoder, [[*r.prompt_ids, *g.token_ids] for r, g in zip(requests, done, strict=True)]


def test_stale_keys_of_the_draft_head_lower_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, texts = periodic()
    head = brief_head(decoder, texts, steps=500, lr=3e-3)
    requests = [
        make_request(f"s{i}", texts[i][:12], seed=1, max_tokens=60, ignore_eos=True)
        for i in range(16)
    ]
    plain = make_engine(decoder).run(requests)

    def accept_length() -> float:
        proposer = drafters.CountingProposer(EagleProposer(head, dtype=torch.float32))
        engine = make_engine(decoder, proposer=proposer, plan=DraftPlan.chain(3))
        done = engine.run(requests)
        assert [g.token_ids for g in done] == [g.token_ids for g in plain]
        return 1 + engine.stats().accepted_tokens / proposer.verifications

    right = accept_length()
    propose = EagleProposer.propose

    def stale(self: EagleProposer, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        trees = propose(self, batch, plan)
        for row in self._rows.values():
            row.cached += plan.steps - 1
        return trees

    monkeypatch.setattr(EagleProposer, "propose", stale)
    assert right > 1.9
    assert accept_length() < right - 0.15


def test_the_seeded_history_is_wrong_at_the_given_rate() -> None:
    request = make_request("h", (1, 2, 3))
    known = {"h": [5, 6, 7, 8, 9]}
    right = drafters.history_of([request], known, vocab_size=10, lies=0.0)
    right.begin("now", request.prompt_ids, [1, 2, 3, 5, 6])
    assert right.drafts("now", 3) == [7, 8, 9]
    wrong = drafters.history_of([request], known, vocab_size=10, lies=1.0)
    wrong.begin("now", request.prompt_ids, [1, 2, 3, 6, 7])
    assert wrong.drafts("now", 3) == [8, 9, 0]


def test_own_texts_have_the_given_length_and_are_reproducible() -> None:
    texts = own_texts(toy().decoder, count=3, length=9)
    assert [len(text) for text in texts] == [9, 9, 9]
    assert texts == own_texts(toy().decoder, count=3, length=9)


def test_random_policies_have_the_requested_entropy() -> None:
    # An estimate from samples at temperature 1, so the bounds are loose.
    requests = [
        make_request(f"n{i}", text[:8], max_tokens=40, ignore_eos=True)
        for i, text in enumerate(toy().texts)
    ]
    done = make_engine(toy().decoder, max_model_len=64).run(requests)
    log_probs = torch.tensor([g.log_probs for g in done])
    assert 1 < -float(log_probs.mean()) < 2.5


def test_the_command_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = LosslessBench

    def smaller(*, target: Target, tokens: int, dtype: torch.dtype) -> LosslessBench:
        return small(target=target, tokens=tokens, dtype=dtype, batch=4, mean_tokens=8)

    monkeypatch.setattr(workloads, "LosslessBench", smaller)
    file = tmp_path / "rows.json"
    line = ["bench", "lossless", "--shape", "tiny", "--tokens", "9", "--json", str(file)]
    assert cli.main(line) == 0
    content = json.loads(file.read_text())
    rows = content["rows"]
    assert content["tokens"] == content["identical"] == sum(r["values"]["tokens"] for r in rows)
    assert content["accepted"] == sum(r["values"]["accepted"] for r in rows) > 0
    assert [row["contender"] for row in rows] == list(workloads.PROPOSERS)
    assert all(row["values"]["tokens"] == row["values"]["identical"] > 0 for row in rows)
    assert "0 differ in id or log-probs" in capsys.readouterr().out
    monkeypatch.setattr(lossless_check, "identical_tokens", lambda left, right: 0)
    assert cli.main(line) == 1


def test_a_check_without_a_model_is_refused_with_the_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", "lossless", "--shape"]) == 2
    assert "add --policy DIR" in capsys.readouterr().err


def test_impossible_settings_are_refused_with_their_key() -> None:
    with pytest.raises(ConfigError, match="tokens=0 must be at least 1"):
        LosslessBench(target=toy(), tokens=0)
    assert total([], "tokens") == 0
