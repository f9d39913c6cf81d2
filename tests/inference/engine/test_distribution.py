"""Compares frequencies of sampled sequences with exact probabilities, with and without drafts.

The probabilities are computed independently: transformers in float64 computes the logits, plain
Python computes softmax and top-p, and all sequences are enumerated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product
from random import Random

import pytest
import torch
from torch import Tensor

from slipstream.inference.engine import engine as engine_module
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import DraftBatch, DraftTree
from slipstream.models import Decoder
from slipstream.sampling.accept import accepted_path
from slipstream.sampling.noise import gumbel_noise
from tests.inference.helpers import make_decoder, make_engine, make_request
from tests.inference.test_contract import hf_model

V, LENGTH, SAMPLES = 5, 3, 20_000
PROMPT = (1, 3)
SIGNIFICANCE = 1e-4
"""A correct engine fails with one seed in 10,000; the seed is fixed."""

Tokens = tuple[int, ...]


@cache
def policy() -> Decoder:
    return make_decoder(vocab_size=V, max_position_embeddings=64)


@cache
def next_logits() -> dict[Tokens, list[float]]:
    """Logits after the prompt and each sequence of up to two tokens."""
    model = hf_model(policy()).double()
    found: dict[Tokens, list[float]] = {}
    for length in range(LENGTH):
        written = list(product(range(V), repeat=length))
        ids = torch.tensor([[*PROMPT, *tokens] for tokens in written])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, -1]
        found.update(zip(written, logits.tolist(), strict=True))
    return found


def next_probs(logits: Sequence[float], top_p: float) -> list[float]:
    """Next-token probabilities: softmax, cut to the smallest set of tokens that reaches `top_p`."""
    weights = [math.exp(x - max(logits)) for x in logits]
    probs = [w / sum(weights) for w in weights]
    kept, mass = set[int](), 0.0
    for token in sorted(range(V), key=lambda t: -probs[t]):
        if mass >= top_p:
            break
        kept.add(token)
        mass += probs[token]
    return [p / mass if t in kept else 0.0 for t, p in enumerate(probs)]


def exact(top_p: float) -> dict[Tokens, float]:
    """The probability of each sequence of `LENGTH` tokens."""
    return {
        tokens: math.prod(
            next_probs(next_logits()[tokens[:i]], top_p)[token] for i, token in enumerate(tokens)
        )
        for tokens in product(range(V), repeat=LENGTH)
    }


class Guesser:
    """A proposer that samples from the policy with the noise of each position, without top-p. 30 %
    of its drafts are random tokens."""

    def __init__(self) -> None:
        self.written: dict[str, list[int]] = {}
        self.rng = Random(0)

    def begin(
        self,
        request_id: str,
        prompt: Sequence[int],
        context: Sequence[int],
        features_TD: Tensor | None,
    ) -> None:
        self.written[request_id] = list(context[len(prompt) :])

    def propose(self, batch: DraftBatch, plan: DraftPlan) -> list[DraftTree]:
        ahead = [
            gumbel_noise(batch.rows.keys_N2, batch.positions_N + step, V)
            for step in range(plan.steps)
        ]
        noise = torch.stack(ahead, 1).tolist()
        pairs = zip(batch.request_ids, noise, strict=True)
        return batch.chains([self.guess(self.written[name], rows, plan) for name, rows in pairs])

    def guess(
        self, written: Sequence[int], noise: Sequence[Sequence[float]], plan: DraftPlan
    ) -> list[int]:
        drafts: list[int] = []
        while len(drafts) < plan.steps and len(written) + len(drafts) < LENGTH:
            logits, gumbel = next_logits()[(*written, *drafts)], noise[len(drafts)]
            scores = [x + g for x, g in zip(logits, gumbel, strict=True)]
            random_token = self.rng.random() < 0.3
            drafts.append(self.rng.randrange(V) if random_token else scores.index(max(scores)))
        return drafts

    def observe(
        self,
        request_ids: Sequence[str],
        tokens: Sequence[Sequence[int]],
        features_NWD: Tensor | None,
    ) -> None:
        for name, new in zip(request_ids, tokens, strict=True):
            self.written[name] += new

    def end(self, request_id: str) -> None:
        self.written.pop(request_id, None)

    def remember(self, prompt: Sequence[int], context: Sequence[int], known: int) -> None: ...


def sampled(top_p: float, *, drafts: int, samples: int = SAMPLES) -> Counter[Tokens]:
    """How often each sequence was sampled. Every sample has its own noise key."""
    plan = DraftPlan.chain(drafts)
    engine = make_engine(policy(), proposer=Guesser() if drafts else None, plan=plan)
    requests = [
        make_request(f"s{i}", PROMPT, max_tokens=LENGTH, top_p=top_p, ignore_eos=True, seed=7)
        for i in range(samples)
    ]
    # 500 at a time, because a queue of all samples is slow.
    parts = [engine.run(requests[i : i + 500]) for i in range(0, samples, 500)]
    if plan != OFF:
        # Decoding two tokens after the first one takes two steps; an accepted draft saves one.
        assert 0.6 < engine.stats().accepted_tokens / samples < 0.95
    return Counter(tuple(g.token_ids) for part in parts for g in part)


def p_value(counts: Counter[Tokens], probs: dict[Tokens, float]) -> float:
    """The p-value of Pearson's chi-squared test. Sequences that are expected fewer than five times
    are counted as one cell."""
    samples = counts.total()
    cells: list[tuple[float, float]] = []
    rare_seen = rare_expected = 0.0
    for tokens, p in probs.items():
        if p == 0:
            assert counts[tokens] == 0, f"{tokens} was sampled, but its probability is 0"
        elif samples * p < 5:
            rare_seen, rare_expected = rare_seen + counts[tokens], rare_expected + samples * p
        else:
            cells.append((counts[tokens], samples * p))
    if rare_expected:
        cells.append((rare_seen, rare_expected))
    chi = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(chi / 2, dtype=torch.float64)))


def test_p_values_match_chi_squared_tables() -> None:
    two: dict[Tokens, float] = {(0,): 0.5, (1,): 0.5}
    # One degree of freedom, chi-squared 2 * 31^2 / 500 = 3.844; tables have 5 % at 3.841.
    seen: Counter[Tokens] = Counter({(0,): 531, (1,): 469})
    assert p_value(seen, two) == pytest.approx(0.05, abs=1e-4)
    # Three degrees of freedom: 5 % at 7.815.
    four: dict[Tokens, float] = {(token,): 0.25 for token in range(4)}
    seen = Counter({(0,): 1000 + 62, (1,): 1000 - 62, (2,): 1000 + 7, (3,): 1000 - 7})
    assert p_value(seen, four) == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_exact_probabilities_add_up_to_one(top_p: float) -> None:
    probs = exact(top_p)
    assert sum(probs.values()) == pytest.approx(1, abs=1e-12)
    assert (min(probs.values()) == 0) is (top_p < 1)
    # Neither flat nor peaked, so that the test can distinguish distributions.
    assert 0.01 < max(probs.values()) < 0.5


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_sampled_frequencies_match_exact_probabilities(top_p: float, drafts: int) -> None:
    assert p_value(sampled(top_p, drafts=drafts), exact(top_p)) > SIGNIFICANCE


def test_biased_acceptance_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(0)

    def lenient(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
        """Accept half of the chains without comparing tokens."""
        if rng.random() < 0.5:
            return list(range(len(tokens)))
        return accepted_path(tokens, parents, chosen)

    monkeypatch.setattr(engine_module, "accepted_path", lenient)
    assert p_value(sampled(1.0, drafts=2), exact(1.0)) < SIGNIFICANCE
