"""The synchronous engine core: requests, stop conditions, memory, scheduling order and failures."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from slipstream.errors import ConfigError, EngineError, RequestError
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.engine.request import Running
from slipstream.types import Generation, StopReason, WeightUpdate
from tests.inference.helpers import (
    EOS,
    all_bits,
    bits,
    decode,
    drain,
    make_decoder,
    make_engine,
    make_request,
    mixed_requests,
    shared_decoder,
    spoil,
    update_from,
)

SLOT_BYTES = 2 * 2 * 2 * 16 * 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be at least 1"),
        ({"max_model_len": 0}, "max_model_len=0 must be at least 1"),
        ({"kv_budget_bytes": 0}, "kv_budget_bytes=0 must be at least 1"),
        ({"max_prefill_tokens": -1}, "max_prefill_tokens=-1 must be at least 1"),
        ({"dtype": torch.float16}, "float16 is not supported; choose one of float32, bfloat16"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    values = {"max_model_len": 8, "dtype": torch.float32, **settings}
    with pytest.raises(ConfigError, match=message):
        EngineSettings(**values)


def test_greedy_decoding_is_the_argmax_and_ignores_truncation() -> None:
    cuts: dict[str, Any] = {"top_k": 1, "top_p": 0.1, "min_p": 0.9}
    plain, cut = (
        make_engine().run([make_request("g", max_tokens=20, temperature=0.0, **more)])[0]
        for more in ({}, cuts)
    )
    assert plain.token_ids == cut.token_ids
    assert plain.sampling_log_probs == [0.0] * 20
    ids = [3, 4, 5, *plain.token_ids]
    with torch.no_grad():
        packed = shared_decoder().pack(torch.float32)
        hidden = packed.forward(
            torch.tensor([*ids, 0])[None], torch.arange(len(ids) + 1)[None]
        ).final[0]
        assert (hidden @ packed.lm_head.weight.T).argmax(-1)[2:-2].tolist() == plain.token_ids


def test_eos_as_first_token_frees_the_row_without_a_decode_step() -> None:
    # The prefill samples the first token, which is EOS.
    free = make_engine().run([make_request("x", max_tokens=1, temperature=0.0)])[0]
    decoder = make_decoder(eos=free.token_ids[0])
    engine = make_engine(decoder, max_num_seqs=1)
    for i in range(3):
        engine.add(make_request(f"e{i}", max_tokens=9, temperature=0.0))
    ended = engine.step()
    assert [g.token_ids for g in ended] == [free.token_ids] * 3
    assert {g.stop_reason for g in ended} == {StopReason.EOS}
    assert engine.stats().decode_steps == 0
    assert not engine.has_work()


def test_context_plus_max_tokens_may_reach_max_model_len() -> None:
    engine = make_engine(max_model_len=64)
    with pytest.raises(RequestError, match="64 tokens of context plus max_tokens=1 exceed"):
        engine.add(make_request("full", [3] * 64, max_tokens=1))
    assert engine.run([make_request("edge", [3] * 63, max_tokens=1)])[0].stop_reason is (
        StopReason.LENGTH
    )


def test_the_models_position_limit_bounds_max_model_len() -> None:
    engine = make_engine(make_decoder(max_position_embeddings=32), max_model_len=1000)
    with pytest.raises(RequestError, match="max_model_len=32"):
        engine.add(make_request("long", [3] * 30, max_tokens=3))


def test_a_request_beyond_the_kv_budget_is_refused() -> None:
    engine = make_engine(kv_budget_bytes=64 * SLOT_BYTES)
    with pytest.raises(RequestError, match=r"10 \+ 60 tokens do not fit the KV budget of 32768"):
        engine.add(make_request("big", [3] * 10, max_tokens=60))
    assert not engine.has_work()


BAD: list[tuple[str, dict[str, Any]]] = [
    ("the prompt is empty; it needs at least one token", {"prompt": ()}),
    (
        "2305 tokens of context plus max_tokens=1 exceed.*shorten the prompt",
        {"prompt": (3,) * 2305},
    ),
    ("token id 64 is outside the vocabulary of 64", {"prompt": (64,)}),
    ("max_tokens=0 must be at least 1", {"max_tokens": 0}),
    (r"temperature=-1\.0 must be 0 \(greedy\) or", {"temperature": -1.0}),
    (r"top_p=0\.0 must be in \(0, 1\] \(1 switches it off\)", {"top_p": 0.0}),
    ("1000 .* 1 tokens do not fit the KV budget.*kv_cache_bytes", {"prompt": (3,) * 1000}),
]


@pytest.mark.parametrize(("message", "settings"), BAD, ids=[message[:20] for message, _ in BAD])
def test_a_refused_request_changes_nothing(message: str, settings: dict[str, Any]) -> None:
    requests = [make_request(f"r{i}", [3 + i] * (30 + i), max_tokens=9) for i in range(3)]
    reference = make_engine().run(requests)
    engine = make_engine(max_prefill_tokens=16, kv_budget_bytes=4 * 128 * SLOT_BYTES)
    for request in requests:
        engine.add(request)
    done = engine.step() + engine.step() + engine.step()
    # Requests run, and a chunked prefill is unfinished.
    assert engine._scheduler.running
    assert engine._scheduler.partial is not None
    before = engine.stats()
    with pytest.raises(RequestError, match=f"request 'bad': {message}"):
        engine.add(make_request("bad", **{"max_tokens": 1, **settings}))
    assert engine.abort(["bad", "nobody"]) == []
    assert engine.stats() == before
    assert all_bits(done + drain(engine)) == all_bits(reference)


@pytest.mark.parametrize(
    ("dtype", "factor", "message"),
    [
        (torch.float32, 1e300, "has values beyond the range of float32"),
        (torch.bfloat16, 3.4e38, "has values beyond the range of bfloat16"),
        (torch.float32, None, "embed_tokens.weight appears more than once"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    dtype: torch.dtype, factor: float | None, message: str
) -> None:
    request = make_request("a", max_tokens=20)
    engine = make_engine(make_decoder(), dtype=dtype)
    before = engine.run([request])
    tensors = [(n, p.detach().double()) for n, p in make_decoder(1).named_parameters()]
    name, embedding = tensors[0]
    if factor is None:
        tensors.append((name, embedding))
    else:
        tensors[0] = (name, torch.full_like(embedding, factor))
    with pytest.raises(EngineError, match=f"version 5 refused, the weights in use stay.*{message}"):
        engine.update_weights(WeightUpdate(version=5, buckets=[tensors]))
    assert all_bits(engine.run([request])) == all_bits(before)


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_copy_weights_give_the_same_bits(dtype: torch.dtype) -> None:
    requests = mixed_requests(seed=3)
    found = []
    for one_copy in (False, True):
        engine = make_engine(make_decoder(), dtype=dtype, one_copy=one_copy)
        first = engine.run(requests)
        for request in requests:
            engine.add(request)
        partly = engine.step() + engine.step()
        engine.update_weights(update_from(make_decoder(1), 1))
        found.append((all_bits(first), all_bits(partly + drain(engine))))
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors[1:], "tensor model.embed_tokens.weight is missing"),
        (lambda tensors: [*tensors, tensors[0]], "embed_tokens.weight appears more than once"),
        (lambda tensors: [("odd", tensors[0][1])], "tensor odd is not part of this model"),
        (
            lambda tensors: [(tensors[0][0], tensors[0][1] * torch.nan), *tensors[1:]],
            "embed_tokens.weight has NaN or infinite values",
        ),
    ],
)
def test_a_failed_single_copy_update_reports_mixed_weights(change: Any, message: str) -> None:
    engine = make_engine(make_decoder(), one_copy=True)
    tensors = change([(n, p.detach()) for n, p in make_decoder(1).named_parameters()])
    update = WeightUpdate(version=5, buckets=[[named] for named in tensors])
    with pytest.raises(EngineError, match=f"version 5 failed .*mixture.*{message}"):
        engine.update_weights(update)


def test_a_budget_for_four_rows_serves_nine_requests_four_at_a_time() -> None:
    requests = [make_request(f"r{i}", [3 + i] * 50, max_tokens=10) for i in range(9)]
    engine = make_engine(kv_budget_bytes=4 * 64 * SLOT_BYTES)
    assert all_bits(engine.run(requests)) == all_bits(make_engine().run(requests))
    assert engine.stats().max_batch == 4


def test_kv_memory_is_released_when_the_engine_is_idle() -> None:
    engine = make_engine()
    engine.run([make_request("long", [3] * 300, max_tokens=30), make_request("short")])
    assert engine.stats().kv_bytes == 0
    engine.add(make_request("next", max_tokens=4))
    engine.step()
    assert engine.stats().kv_bytes == 64 * SLOT_BYTES
    engine.abort()
    assert engine.stats().kv_bytes == 0


def test_the_memory_of_a_long_request_can_hold_many_short_ones() -> None:
    # First, 4 rows of 256 slots fill the budget. Later, 16 rows of 64 slots must fit.
    engine = make_engine(kv_budget_bytes=4 * 256 * SLOT_BYTES)
    engine.add(make_request("long", [3] * 150, max_tokens=60))
    engine.add(make_request("stays", [3] * 3, max_tokens=30))
    engine.step()
    assert engine.abort(["long"])[0].stop_reason is StopReason.ABORT
    for i in range(15):
        engine.add(make_request(f"s{i}", [3 + i] * 3, max_tokens=5))
    done = {g.request_id: g for g in drain(engine)}
    assert engine.stats().max_batch == 16
    alone = make_engine().run([make_request("stays", [3] * 3, max_tokens=30)])[0]
    assert bits(done["stays"]) == bits(alone)


def test_the_newest_requests_are_preempted_and_arrival_order_is_kept() -> None:
    engine = make_engine(kv_budget_bytes=8 * 64 * SLOT_BYTES)
    # "a" ends first, so the last row moves to row 0.
    engine.add(make_request("a", [3] * 40, max_tokens=3))
    for i in range(1, 8):
        engine.add(make_request(f"b{i}", [3 + i] * 55, max_tokens=30))
    order = [g.request_id for g in drain(engine)]
    assert engine.stats().preempted == 3
    assert order[0] == "a"
    assert set(order[1:5]) == {"b1", "b2", "b3", "b4"}


def test_preemption_keeps_arrival_order() -> None:
    engine = make_engine()
    for i in range(4):
        engine.add(make_request(f"r{i}", max_tokens=6))
    engine.step()
    engine.preempt(["r0", "r2", "r1", "unknown"])
    engine.add(make_request("r4", max_tokens=6))
    scheduler = engine._scheduler
    assert [r.request_id for r in scheduler.waiting] == ["r0", "r1", "r2", "r4"]
    assert [scheduler.row(r) for r in scheduler.running] == [0]
    preempted = scheduler.waiting[0]
    with pytest.raises(ValueError, match="not in list"):
        scheduler.row(preempted)


def test_abort_of_running_waiting_and_preempted_requests() -> None:
    requests = mixed_requests(5, tokens=20)
    reference = all_bits(make_engine().run(requests))
    engine = make_engine(max_num_seqs=3)
    for request in requests:
        engine.add(request)
    ended = {g.request_id for g in engine.step()}
    assert not ended
    engine.preempt(["r1"])
    partial = engine.abort(["r1", "r4", "nobody", "r0"])
    assert [(g.request_id, len(g.token_ids)) for g in partial] == [("r0", 2), ("r1", 2), ("r4", 0)]
    assert partial[2].text == ""
    assert partial[2].spans == []
    rest = all_bits(drain(engine))
    assert rest == {name: reference[name] for name in ("r2", "r3")}
    assert engine.stats().aborted == 3
    assert engine.abort() == []


def test_max_prefill_tokens_limits_each_prefill() -> None:
    requests = [make_request(f"r{i}", [3 + i] * 30, max_tokens=3) for i in range(6)]
    engine = make_engine(max_prefill_tokens=64)
    widths: list[int] = []
    prefill = engine._runner.prefill

    def counting(store: Any, contexts: Any, rows: Any, sources: Any) -> torch.Tensor:
        widths.append(len(contexts))
        return prefill(store, contexts, rows, sources)

    engine._runner.prefill = counting  # type: ignore[method-assign]
    assert all_bits(engine.run(requests)) == all_bits(make_engine().run(requests))
    assert widths == [2, 2, 2]


def test_duplicate_ids_and_stop_strings_without_a_tokenizer_are_refused() -> None:
    settings = EngineSettings(max_model_len=64, dtype=torch.float32)
    engine = Engine(shared_decoder(), settings)
    engine.add(make_request("one"))
    with pytest.raises(RequestError, match=r"'one': .*request_id is already running"):
        engine.add(make_request("one"))
    with pytest.raises(RequestError, match=r"stop strings need .*tokenizer .*`decode`"):
        engine.add(make_request("two", stop=("x",)))
    assert drain(engine)[0].text == ""


def test_a_request_id_can_be_used_again_after_its_request() -> None:
    engine = make_engine()
    for _ in range(2):
        engine.add(make_request("one", max_tokens=4, ignore_eos=True))
        engine.step()
        engine.preempt(["one"])
        with pytest.raises(RequestError, match=r"'one': .*request_id is already running"):
            engine.add(make_request("one"))
        assert [len(g.token_ids) for g in drain(engine)] == [4]
    for steps in (0, 1):
        engine.add(make_request("one"))
        for _ in range(steps):
            engine.step()
        assert [g.request_id for g in engine.abort(["one"])] == ["one"]
    assert not engine.has_work()


def test_requests_of_one_batch_can_have_different_stop_strings() -> None:
    full = make_engine().run([make_request(f"s{i}", max_tokens=12) for i in range(4)])
    engine = make_engine()
    for i, generation in enumerate(full):
        engine.add(make_request(f"s{i}", max_tokens=12, stop=(decode(generation.token_ids[3:5]),)))
    done = {g.request_id: g for g in drain(engine)}
    for i, generation in enumerate(full):
        text, stop = decode(generation.token_ids), decode(generation.token_ids[3:5])
        assert done[f"s{i}"].stop_reason is StopReason.STOP_STRING
        assert done[f"s{i}"].text == text[: text.index(stop)]


def test_overflowing_logits_fail_only_their_request() -> None:
    decoder = make_decoder(tie_word_embeddings=False)
    with torch.no_grad():
        decoder.model.embed_tokens.weight[60] = float("inf")
    engine = make_engine(decoder)
    good = make_request("good", [3], max_tokens=1)
    alone = engine.run([good])[0]
    results = engine.run([make_request("bad", [60, 4], max_tokens=5), good])
    assert results[0].stop_reason is StopReason.ERROR
    assert results[0].token_ids == results[0].log_probs == []
    assert results[0].error is not None
    assert "logits at position 2 are not finite under policy version 0" in results[0].error
    assert results[1].stop_reason is StopReason.LENGTH
    assert bits(results[1]) == bits(alone)


def test_a_row_that_held_nan_is_cleared_for_the_next_request() -> None:
    # The bf16 kernels multiply slots that a row does not see by zero.
    engine = make_engine(dtype=torch.bfloat16)
    keeper = make_request("keeper", [9], max_tokens=40)
    following = make_request("next", [3] * 5, max_tokens=8)
    reference = make_engine(dtype=torch.bfloat16).run([following])[0]
    engine.add(make_request("bad", [5] * 40, max_tokens=30))
    engine.add(keeper)
    engine.step()
    # Keys and values of row 0 become NaN, so the logits of its request do, too.
    spoil(engine, 0)
    failed = engine.step()
    assert [(g.request_id, g.stop_reason) for g in failed] == [("bad", StopReason.ERROR)]
    assert len(failed[0].token_ids) == len(failed[0].log_probs) == 2
    # It gets the only free block.
    engine.add(following)
    done = {g.request_id: g for g in drain(engine)}
    assert bits(done["next"]) == bits(reference)
    assert done["keeper"].stop_reason is StopReason.LENGTH


def running(
    stop: tuple[str, ...], *, prior: tuple[int, ...] = (), max_tokens: int = 5000
) -> Running:
    request = make_request("r", prior=prior, stop=stop, max_tokens=max_tokens)
    return Running(request=request, key=(0, 0), eos_ids=frozenset({EOS}), context=[3, *prior])


def push_all(state: Running, ids: list[int], decode_text: Any = decode) -> Generation | None:
    for token in ids:
        state.push(token, -1.0, -1.0, 0, decode_text)
        if state.stop_reason is not None:
            return state.generation(decode_text)
    return None


def test_stop_strings_decode_only_a_short_tail() -> None:
    longest = 0

    def counting(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    assert push_all(running(("#",)), [7] * 2000, counting) is None
    assert longest < 20


@pytest.mark.parametrize("seed", range(4))
def test_stop_strings_are_found_as_in_the_whole_text(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        # Token 0 has no text, so a stop string can span many tokens.
        ids = [rng.choice([0, 0, 0, 1, 3, 4]) for _ in range(60)]
        stops = tuple(
            "".join(rng.choice("acd") for _ in range(rng.randrange(1, 6))) for _ in range(2)
        )
        text, expected = "", None
        for count in range(1, 61):
            text = decode(ids[:count])
            if any(s in text for s in stops):
                expected = (count, text[: min(text.find(s) for s in stops if s in text)])
                break
        got = push_all(running(stops), ids)
        assert (None if got is None else (len(got.token_ids), got.text)) == expected


def test_a_stop_string_may_begin_in_prior_tokens() -> None:
    ended = push_all(running(("abc",), prior=(8, 1, 2)), [3, 9])
    assert ended is not None
    assert ended.token_ids == [3]
    assert ended.text == ""
    # A stop string that ends in the prior tokens does not count.
    state = running(("ac",), prior=(1, 3))
    assert push_all(state, [4, 5]) is None
    again = push_all(state, [1, 3])
    assert again is not None
    assert again.text == "de"


def test_text_of_a_continuation_is_decoded_after_its_prior_tokens() -> None:
    def spaced(ids: list[int]) -> str:
        """Decode like tokenizers that put a space before each word but the first."""
        return " ".join(decode([i]) for i in ids)

    state = running((), prior=(1, 2), max_tokens=2)
    done = push_all(state, [3, 4], spaced)
    assert done is not None
    assert done.text == " c d"


def test_stop_reasons_have_priorities() -> None:
    request = make_request("o", stop_token_ids=(5,), stop=("b",), max_tokens=2)
    for token, reason in [(EOS, StopReason.EOS), (5, StopReason.STOP_TOKEN)]:
        state = Running(request=request, key=(0, 0), eos_ids=frozenset({EOS}), context=[3])
        done = push_all(state, [9, token])
        assert done is not None
        assert done.stop_reason is reason
    state = Running(request=request, key=(0, 0), eos_ids=frozenset(), context=[3])
    done = push_all(state, [9, 2])
    assert done is not None
    assert done.stop_reason is StopReason.STOP_STRING
    assert done.text == "i"


def test_decoding_on_one_thread_gives_the_same_tokens() -> None:
    events: list[bool] = []
    engine = make_engine(one_thread_below=2)
    engine.lent = events.append
    asked = [make_request(str(n), [1, 2, 3 + n], max_tokens=4 * n + 2) for n in range(5)]
    assert [g.token_ids for g in engine.run(asked)] == [
        g.token_ids for g in make_engine().run(asked)
    ]
    # True when two requests are left, False when none is left.
    assert events == [True, False]
    engine.run(asked[:1])
    assert events == [True, False] * 2
    engine.add(asked[1])
    engine.step()
    engine.abort()
    assert events == [True, False] * 3
