"""The prefix cache and reuse of prompts: what is found and dropped, and that bits do not change."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.inference.engine import Engine
from slipstream.inference.engine.kv_rows import KVPrefix
from slipstream.inference.engine.prefix_cache import PrefixCache
from slipstream.inference.speculation.plan import DraftPlan
from slipstream.types import GenerateRequest, Generation, KVPolicy, StopReason
from tests.inference.engine.test_prefill import Listener
from tests.inference.engine.test_speculation import oracle_of
from tests.inference.helpers import (
    all_bits,
    bits,
    drain,
    make_decoder,
    make_engine,
    make_request,
    random_prompt,
    shared_decoder,
    spoil,
    trainer_log_probs,
    update_from,
)

SLOT_BYTES = 2 * 2 * 2 * 16 * 4


def kv(tokens: int) -> KVPrefix:
    """Keys and values that count up along the slots, in whole blocks of 32 slots."""
    slots = -(-tokens // 32) * 32
    numbers = torch.arange(float(slots)).expand(1, 2, 1, slots)[..., None]
    return KVPrefix((numbers.clone(),), tokens)


def found(cache: PrefixCache, context: list[int]) -> int:
    """The length of the prefix that is found."""
    prefix = cache.find(context)
    return 0 if prefix is None else prefix.length


def test_the_longest_common_prefix_is_found() -> None:
    cache = PrefixCache()
    first, second = list(range(40)), [*range(20), *range(50, 90)]
    cache.add(first, kv(40))
    cache.add(second, kv(60))
    assert found(cache, [*range(40), 7, 8]) == 40
    assert found(cache, [*range(37), 99, 98]) == 37
    assert found(cache, [*range(20), 50, 51, 0]) == 22
    assert found(cache, list(range(18))) == 17
    # The last token must be computed.
    assert found(cache, first) == 39
    assert found(cache, list(range(15))) == found(cache, list(range(1, 40))) == 0
    prefix = cache.find([*first, 3])
    assert prefix is not None
    assert torch.equal(prefix.parts[0], kv(40).parts[0])
    # The data are whole blocks of slots.
    shorter = cache.find([*range(30), 99, 98])
    assert shorter is not None
    assert (shorter.length, shorter.parts[0].shape[3]) == (30, 32)


def test_a_longer_context_replaces_its_prefix() -> None:
    cache = PrefixCache()
    cache.add(range(40), kv(40))
    cache.add(range(5), kv(5))
    assert cache.nbytes == 2 * 64 * 4
    cache.add(range(64), kv(64))
    assert len(cache) == 1
    assert cache.nbytes == 2 * 64 * 4
    cache.clear()
    assert (len(cache), cache.nbytes, cache._index) == (0, 0, {})


def test_the_least_recently_used_entry_is_dropped_first() -> None:
    cache = PrefixCache()
    for i in range(4):
        cache.add([i] * 20, kv(20))
    assert found(cache, [0] * 21) == 20
    cache.shrink(cache.nbytes - 1)
    assert [found(cache, [i] * 21) for i in range(4)] == [20, 0, 20, 20]
    cache.shrink(2 * 32 * 4)
    assert [found(cache, [i] * 21) for i in range(4)] == [0, 0, 0, 20]


def converse(
    engine: Engine, *, turns: int, conversations: int = 3, **params: Any
) -> list[tuple[Any, Generation]]:
    """Run conversations of several turns. Each turn repeats the turns before it and adds tokens."""
    contexts = [random_prompt(random.Random(i), 30 + 9 * i) for i in range(conversations)]
    done: list[tuple[Any, Generation]] = []
    for turn in range(turns):
        requests = [
            make_request(f"t{turn}-{i}", context, max_tokens=9 + i, **params)
            for i, context in enumerate(contexts)
        ]
        generations = engine.run(requests)
        done += zip(requests, generations, strict=True)
        for i, (context, generation) in enumerate(zip(contexts, generations, strict=True)):
            context += generation.token_ids + random_prompt(random.Random(100 * turn + i), 5 + i)
    return done


def test_turns_of_a_conversation_have_the_same_bits(dtype: torch.dtype) -> None:
    reference = converse(make_engine(dtype=dtype), turns=4)
    engine = make_engine(dtype=dtype, prefix_caching=True)
    reused = converse(engine, turns=4)
    assert all_bits([g for _, g in reused]) == all_bits([g for _, g in reference])
    contexts = sum(len(r.prompt_ids) for r, _ in reused)
    # A later turn computes only the last token of the response and the tokens added to it.
    fresh = sum(30 + 9 * i + 3 * (1 + 5 + i) for i in range(3))
    assert engine.stats().prompt_tokens == fresh
    assert engine.stats().reused_prompt_tokens == contexts - fresh
    for request, generation in reused:
        expected = trainer_log_probs(shared_decoder(), dtype, request, generation)
        assert generation.log_probs == expected


def test_prefixes_of_any_length_give_the_same_bits(dtype: torch.dtype) -> None:
    rng = random.Random(9)
    base = random_prompt(rng, 150)
    engine = make_engine(dtype=dtype, prefix_caching=True)
    engine.run([make_request("base", base, max_tokens=1)])
    cuts = [17, 64, 127, 128, 129, 149]
    requests = [
        make_request(f"c{cut}", base[:cut] + random_prompt(rng, 3 + cut % 40), max_tokens=5)
        for cut in cuts
    ]
    for i in range(3):
        requests.append(make_request(f"same{i}", requests[0].prompt_ids, max_tokens=5))
    done = engine.run(requests)
    assert all_bits(done) == all_bits(make_engine(dtype=dtype).run(requests))
    # A random token after the cut may equal the old one, which makes the prefix longer.
    assert 0 <= engine.stats().reused_prompt_tokens - sum(cuts) < 6


def test_a_long_suffix_is_prefilled_in_chunks() -> None:
    rng = random.Random(2)
    base = random_prompt(rng, 60)
    request = make_request("long", base + random_prompt(rng, 100), max_tokens=5)
    engine = make_engine(prefix_caching=True, max_prefill_tokens=32)
    engine.run([make_request("base", base, max_tokens=1)])
    before = engine.stats().prompt_tokens
    assert bits(engine.run([request])[0]) == bits(make_engine().run([request])[0])
    assert engine.stats().prompt_tokens - before == 100
    assert engine.stats().reused_prompt_tokens == 60


def test_aborted_requests_reuse_their_keys_and_values() -> None:
    request = make_request("r", random_prompt(random.Random(1), 40), max_tokens=20)
    (whole,) = make_engine().run([request])
    engine = make_engine(prefix_caching=True)
    engine.add(request)
    for _ in range(6):
        engine.step()
    (part,) = engine.abort()
    again = make_request("r", request.prompt_ids, prior=part.token_ids, max_tokens=13)
    (rest,) = engine.run([again])
    assert part.token_ids + rest.token_ids == whole.token_ids
    assert part.log_probs + rest.log_probs == whole.log_probs
    assert engine.stats().reused_prompt_tokens == 40 + 7 - 1


@pytest.mark.parametrize("policy", list(KVPolicy))
def test_an_update_clears_the_cache(policy: KVPolicy) -> None:
    prompt = random_prompt(random.Random(1), 40)
    engine = make_engine(make_decoder(0), prefix_caching=True)
    engine.run([make_request("a", prompt, max_tokens=3)])
    engine.add(make_request("across", prompt, max_tokens=6))
    engine.step()
    assert engine.stats().kv_bytes > 64 * SLOT_BYTES
    # The weights change although the version number stays.
    engine.update_weights(update_from(make_decoder(1), 0, kv_policy=policy))
    # Keys and values that two versions of the weights computed are not cached.
    while engine.has_work():
        engine.step()
    kept = policy is KVPolicy.RECOMPUTE
    assert (engine.stats().kv_bytes > 0) is kept
    request = make_request("b", [*prompt, 3], max_tokens=3)
    done = engine.run([request])
    assert all_bits(done) == all_bits(make_engine(make_decoder(1)).run([request]))


def test_the_cache_uses_only_the_free_part_of_the_budget() -> None:
    rng = random.Random(4)
    budget = 8 * 64 * SLOT_BYTES
    requests = [
        make_request(f"k{i}", random_prompt(rng, rng.randrange(20, 58)), max_tokens=5)
        for i in range(30)
    ]
    engine = make_engine(prefix_caching=True, kv_budget_bytes=budget)
    done, alone, together = list[Generation](), list[int](), list[int]()
    for request in requests[:15]:
        engine.add(request)
        while engine.has_work():
            done += engine.step()
            alone.append(engine.stats().kv_bytes)
    for request in requests[15:]:
        engine.add(request)
    while engine.has_work():
        done += engine.step()
        together.append(engine.stats().kv_bytes)
    assert all_bits(done) == all_bits(make_engine().run(requests))
    # One request at a time uses 4 of 8 rows and leaves the rest to the cache. Fifteen requests fill
    # the budget without the cache.
    assert 0.8 * budget < max(alone) <= budget
    assert max(together) == budget


def test_a_failed_request_is_not_cached() -> None:
    engine = make_engine(prefix_caching=True)
    engine.add(make_request("bad", [5] * 40, max_tokens=30))
    engine.step()
    spoil(engine, 0)
    (failed,) = engine.step()
    assert failed.stop_reason is StopReason.ERROR
    assert engine.stats().kv_bytes == 0


def test_requests_with_a_cached_prefix_are_drafted_for() -> None:
    reference = converse(make_engine(), turns=3)
    engine = make_engine(
        prefix_caching=True,
        proposer=oracle_of([g for _, g in reference]),
        plan=DraftPlan.chain(3),
    )
    done = converse(engine, turns=3)
    assert all_bits([g for _, g in done]) == all_bits([g for _, g in reference])
    assert engine.stats().accepted_tokens > 10
    # The proposer receives the features of the tokens after the cached prefix only.
    listener, whole = Listener(), Listener()
    converse(make_engine(prefix_caching=True, proposer=listener), turns=2)
    converse(make_engine(proposer=whole), turns=2)
    for name, expected in whole.features.items():
        features = listener.features[name]
        assert features is not None
        assert expected is not None
        start = 0 if name[1] == "0" else len(expected) - (1 + 5 + int(name[3]))
        assert torch.equal(features, expected[start:])


def test_without_prefix_caching_nothing_is_cached() -> None:
    engine = make_engine()
    converse(engine, turns=2)
    assert engine.stats().kv_bytes == engine.stats().reused_prompt_tokens == 0


def samples(prompts: int, each: int, length: int = 60) -> list[GenerateRequest]:
    """`each` samples of each prompt, prompt by prompt. No two samples of a prompt end in the same
    step."""
    return [
        make_request(f"p{p}s{s}", random_prompt(random.Random(p), length), max_tokens=5 + 2 * s + p)
        for p in range(prompts)
        for s in range(each)
    ]


@pytest.mark.parametrize(("groups", "stagger"), [(1, False), (2, True)])
def test_later_samples_reuse_the_prompt(dtype: torch.dtype, groups: int, stagger: bool) -> None:
    requests = samples(groups, 8)
    reference = make_engine(dtype=dtype).run(requests)
    whole, later = Listener(), Listener()
    make_engine(dtype=dtype, proposer=whole).run(requests)
    for proposer in (None, later):
        engine = make_engine(
            dtype=dtype, max_num_seqs=2, stagger_samples=stagger, proposer=proposer
        )
        assert all_bits(engine.run(requests)) == all_bits(reference)
        stats = engine.stats()
        first = 2 // groups  # samples of each prompt in the first prefill
        assert stats.shared_prompt_tokens == groups * (first - 1) * 60
        assert stats.prompt_tokens == groups * (60 + 8 - first)
        assert stats.reused_prompt_tokens == groups * (8 - first) * 59
        assert stats.kv_bytes == 0
        assert not engine._scheduler._prompts
    # The proposer receives the features of the reused prompt, too.
    for name, expected in whole.features.items():
        features = later.features[name]
        assert features is not None
        assert expected is not None
        assert torch.equal(features, expected)


def test_a_continued_sample_reuses_its_prompt() -> None:
    first, second, third = samples(1, 3)
    first = replace(first, prior_ids=(5, 6))
    second = replace(second, prior_ids=(7, 8, 9))
    whole, later = Listener(), Listener()
    reference = make_engine(proposer=whole).run([first, second, third])
    engine = make_engine(max_prefill_tokens=16, proposer=later)
    engine.add(first)
    done = []
    for _ in range(5):
        done += engine.step()
    engine.add(second)
    engine.add(third)
    done += drain(engine)
    assert all_bits(done) == all_bits(reference)
    assert engine.stats().reused_prompt_tokens == 60 + 59
    for name, expected in whole.features.items():
        assert torch.equal(later.features[name], expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", list(KVPolicy))
@pytest.mark.parametrize("stagger", [False, True])
def test_prompts_computed_by_older_weights_are_not_reused(policy: KVPolicy, stagger: bool) -> None:
    requests = samples(2 if stagger else 1, 4)
    engine = make_engine(make_decoder(), max_num_seqs=2, stagger_samples=stagger)
    for request in requests:
        engine.add(request)
    done: list[Generation] = []
    while not done:
        done += engine.step()
    assert len(engine._scheduler._prompts) == stagger
    assert engine.stats().reused_prompt_tokens == 0
    engine.update_weights(update_from(make_decoder(1), 1, kv_policy=policy))
    assert not engine._scheduler._prompts
    done += drain(engine)
    alone = make_engine(make_decoder(1))
    new = {g.request_id: g for g in done if [span.version for span in g.spans] == [1]}
    assert len(new) == len(requests) - 2
    for request in requests:
        if request.request_id in new:
            assert bits(alone.run([request])[0]) == bits(new[request.request_id])
    # With KEEP, the next sample of a prompt computes it again, and later samples reuse that. With
    # RECOMPUTE, a requeued sample computes it again.
    later = 4 + (policy is KVPolicy.RECOMPUTE) if stagger else 1
    assert engine.stats().reused_prompt_tokens == later * 59


def test_prompts_kept_for_waiting_samples_count_toward_the_budget() -> None:
    requests = samples(1, 3)
    budget = 128 * SLOT_BYTES
    engine = make_engine(kv_budget_bytes=budget, max_num_seqs=1, stagger_samples=True)
    for request in requests:
        engine.add(request)
    held = []
    while engine.has_work():
        engine.step()
        held.append(engine.stats().kv_bytes)
        assert held[-1] <= budget
    assert engine.stats().finished == 3
