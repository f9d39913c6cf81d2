"""The engine `hf`: it samples the same tokens as the embedded engine."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream.errors import EngineError, RequestError
from slipstream.inference.hf import HFCore
from slipstream.models import Decoder
from slipstream.types import GenerateRequest, Generation, StopReason, WeightUpdate
from tests.inference.helpers import (
    VOCAB,
    decode,
    make_decoder,
    make_engine,
    make_request,
    mixed_requests,
    update_from,
)
from tests.inference.test_contract import hf_model


def make_core(decoder: Decoder, *, max_num_seqs: int = 256) -> HFCore:
    return HFCore(hf_model(decoder), max_model_len=128, max_num_seqs=max_num_seqs, decode=decode)


def run(core: HFCore, requests: Sequence[GenerateRequest]) -> dict[str, Generation]:
    for request in requests:
        core.add(request)
    done: list[Generation] = []
    while core.has_work():
        done += core.step()
    return {g.request_id: g for g in done}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_tokens_agree_with_the_embedded_engine(family: str) -> None:
    decoder = make_decoder(family=family, max_position_embeddings=128)
    requests = mixed_requests(12, longest=40, tokens=16, seed=11)
    core = make_core(decoder, max_num_seqs=5)
    by_hf = run(core, requests)
    for embedded in make_engine(decoder, max_model_len=128).run(requests):
        hf = by_hf[embedded.request_id]
        assert hf.token_ids == embedded.token_ids
        assert hf.stop_reason is embedded.stop_reason
        assert hf.text == embedded.text
        for a, b in (
            (hf.log_probs, embedded.log_probs),
            (hf.sampling_log_probs, embedded.sampling_log_probs),
        ):
            assert a == pytest.approx(b, abs=1e-4)


def test_generation_defaults_of_the_model_are_ignored() -> None:
    decoder = make_decoder()
    model = hf_model(decoder)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.eos_token_id = list(range(VOCAB))
    core = HFCore(model, max_model_len=128)
    request = make_request("d", max_tokens=20, temperature=0.0)
    assert run(core, [request])["d"].token_ids == make_engine(decoder).run([request])[0].token_ids


def test_an_update_that_does_not_fit_is_refused() -> None:
    core = make_core(make_decoder())
    update = update_from(make_decoder(1), 2)
    tensors = list(update.tensors())
    for bad, message in [
        (tensors[:-1], f"tensor {tensors[-1][0]} is missing"),
        ([*tensors, ("extra", torch.ones(2))], "tensor extra is unknown"),
        (
            [(tensors[0][0], tensors[0][1].double() * 1e300), *tensors[1:]],
            f"tensor {tensors[0][0]} is unknown, misshapen or not finite",
        ),
        ([(n, t[:1] if "embed" in n else t) for n, t in tensors], "misshapen"),
    ]:
        with pytest.raises(EngineError, match=message):
            core.update_weights(WeightUpdate(version=2, buckets=[bad]))
    assert core.stats().version == 0
    core.update_weights(WeightUpdate(version=2, buckets=[tensors]))
    request = make_request("n", max_tokens=12)
    assert (
        run(core, [request])["n"].token_ids
        == make_engine(make_decoder(1)).run([request])[0].token_ids
    )


def test_hidden_states_are_refused_and_the_error_names_the_engine_to_use() -> None:
    with pytest.raises(RequestError, match=r"rollout\.name=embedded"):
        make_core(make_decoder()).add(make_request("h", hidden=True))


def test_an_interrupted_batch_keeps_its_requests() -> None:
    decoder = make_decoder()
    core = make_core(decoder)
    requests = [make_request(f"i{i}", [3 + i] * (i + 1), max_tokens=10) for i in range(3)]
    reference = {g.request_id: g.token_ids for g in make_engine(decoder).run(requests)}
    for request in requests:
        core.add(request)
    core.interrupt(True)
    for _ in range(4):
        assert core.step() == []
    assert core.stats().generated_tokens == 12
    core.interrupt(False)
    assert [g.request_id for g in core.abort(["i1"])] == ["i1"]
    done = {g.request_id: g for g in core.step()}
    assert {n: g.token_ids for n, g in done.items()} == {
        n: t for n, t in reference.items() if n != "i1"
    }


def test_non_finite_logits_fail_only_their_request() -> None:
    decoder = make_decoder(tie_word_embeddings=False)
    with torch.no_grad():
        decoder.model.embed_tokens.weight[60] = float("inf")
    good = make_request("good", [3, 4], max_tokens=1)
    results = run(make_core(decoder), [make_request("bad", [60], max_tokens=4), good])
    assert results["bad"].stop_reason is StopReason.ERROR
    assert results["bad"].token_ids == []
    assert "not finite" in str(results["bad"].error)
    assert results["good"].token_ids == make_engine(decoder).run([good])[0].token_ids
