"""Token choice: exact distributions, both log-probs, greedy rows, and independence of rows."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import pytest
import torch

from slipstream.kernels import draw as kernel
from slipstream.sampling import choose, gumbel_noise, key_words
from slipstream.sampling.choose import (
    ELEMENTS_AT_ONCE,
    FEWEST_AT_ONCE,
    SamplingRows,
    draw,
    first_argmax,
)


@dataclass(frozen=True)
class Setting:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def make_rows(settings: list[Setting], *, first_key: int = 0) -> SamplingRows:
    words = [key_words(("t", first_key + i)) for i in range(len(settings))]
    return SamplingRows(
        keys_N2=torch.tensor(words, dtype=torch.int32),
        temperature_N=torch.tensor([s.temperature for s in settings]),
        top_k_N=torch.tensor([s.top_k for s in settings]),
        top_p_N=torch.tensor([s.top_p for s in settings], dtype=torch.float64),
        min_p_N=torch.tensor([s.min_p for s in settings], dtype=torch.float64),
        any_sampled=any(s.temperature > 0 for s in settings),
        any_greedy=any(s.temperature == 0 for s in settings),
        any_tempered=any(s.temperature not in (0, 1) for s in settings),
        any_truncated=any(s.truncates for s in settings),
    )


LOGITS = torch.tensor([1.0, 2.5, 2.5, -1.0, 0.5, 3.0])


def law_of(setting: Setting) -> list[float]:
    """Return the expected distribution, computed in plain Python."""
    weights = [math.exp(float(x) / setting.temperature) for x in LOGITS]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if setting.top_k > 0:
        order = order[: setting.top_k]
    mass = sum(weights[i] for i in order)
    cut, total = [], 0.0
    for i in order:
        if total / mass < setting.top_p and weights[i] >= setting.min_p * weights[order[0]]:
            cut.append(i)
        total += weights[i]
    mass = sum(weights[i] for i in cut)
    return [weights[i] / mass if i in cut else 0.0 for i in range(len(weights))]


SETTINGS = [
    Setting(),
    Setting(temperature=0.7),
    Setting(temperature=1.9),
    Setting(top_k=2),
    Setting(top_p=0.6),
    Setting(min_p=0.3),
    Setting(temperature=0.7, top_k=4, top_p=0.8),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sampled_tokens_follow_the_exact_distribution(setting: Setting) -> None:
    samples = 20_000
    rows = make_rows([setting] * 50)
    counts = torch.zeros(len(LOGITS))
    for start in range(0, samples // 50, 40):
        positions = torch.arange(start, start + 40).repeat_interleave(50)
        many = make_rows([setting] * 50)
        repeated = SamplingRows(
            keys_N2=many.keys_N2.repeat(40, 1),
            temperature_N=many.temperature_N.repeat(40),
            top_k_N=many.top_k_N.repeat(40),
            top_p_N=many.top_p_N.repeat(40),
            min_p_N=many.min_p_N.repeat(40),
            any_sampled=rows.any_sampled,
            any_greedy=rows.any_greedy,
            any_tempered=rows.any_tempered,
            any_truncated=rows.any_truncated,
        )
        choice = choose(LOGITS.expand(2000, -1), positions, repeated)
        counts += torch.bincount(choice.tokens, minlength=len(LOGITS))
    law = torch.tensor(law_of(setting))
    assert counts.sum() == samples
    assert counts[law == 0].sum() == 0
    live = law > 0
    statistic = float(((counts - samples * law)[live] ** 2 / (samples * law[live])).sum())
    freedom = int(live.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("setting", [*SETTINGS, Setting(temperature=0, top_k=3)], ids=str)
def test_both_log_probs_are_correct(setting: Setting) -> None:
    n = 64
    choice = choose(LOGITS.expand(n, -1), torch.arange(n), make_rows([setting] * n))
    full = torch.log_softmax(LOGITS / (setting.temperature or 1.0), -1)
    assert choice.log_probs.dtype == choice.sampling_log_probs.dtype == torch.float32
    assert torch.equal(choice.log_probs, full[choice.tokens])
    if setting.temperature == 0:
        assert choice.sampling_log_probs.tolist() == [0.0] * n
        return
    law = torch.tensor(law_of(setting), dtype=torch.float64).log()[choice.tokens]
    assert torch.allclose(choice.sampling_log_probs.double(), law, atol=1e-6, rtol=0)
    if not setting.truncates:
        assert torch.equal(choice.sampling_log_probs, choice.log_probs)


def test_greedy_chooses_the_lowest_id_among_the_largest_logits() -> None:
    logits = torch.tensor([[1.0, 7.0, 7.0, 0.0], [7.0, 7.0, 7.0, 7.0], [0.0, -1.0, 2.0, 2.0]])
    choice = choose(logits, torch.arange(3), make_rows([Setting(temperature=0)] * 3))
    assert choice.tokens.tolist() == [1, 0, 2]
    wide = torch.zeros(1, 40_000)
    wide[0, 12_345:12_400] = 1.0
    assert choose(wide, torch.arange(1), make_rows([Setting(temperature=0)])).tokens.tolist() == [
        12_345
    ]


def test_greedy_compares_logits_that_log_softmax_rounds_to_one_value() -> None:
    # The two largest logits have equal log-probs. Top-k must not decide between them either.
    high = 1.0
    logits = torch.full((1, 1000), -1.0)
    logits[0, 0] = high
    logits[0, 1] = torch.nextafter(torch.tensor(high), torch.tensor(2.0))
    log_probs = torch.log_softmax(logits, -1)
    assert log_probs[0, 0] == log_probs[0, 1]
    for setting in (Setting(temperature=0), Setting(temperature=0, top_k=1, top_p=0.01)):
        assert choose(logits, torch.arange(1), make_rows([setting])).tokens.tolist() == [1]


def test_a_sampled_token_is_the_argmax_of_log_probs_plus_noise() -> None:
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(1)) * 2
    positions = torch.tensor([0, 5, 17, 1000, 3])
    rows = make_rows([Setting()] * 5)
    scores = torch.log_softmax(logits, -1).double() + gumbel_noise(rows.keys_N2, positions, 300)
    assert torch.equal(choose(logits, positions, rows).tokens, scores.argmax(-1))


def test_mismatched_arguments_raise_an_error() -> None:
    logits, rows = torch.zeros(3, 5), make_rows([Setting()] * 3)
    with pytest.raises(ValueError, match=r"3 positions of torch\.int32"):
        draw(logits, torch.arange(3, dtype=torch.int32), rows)
    for ids in (torch.arange(4), torch.arange(5, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"5 columns, but ids of shape"):
            draw(logits, torch.arange(3), rows, ids_V=ids)
    with pytest.raises(ValueError, match=r"4 rows of scores, 3 positions of torch\.int64, 3 keys"):
        draw(torch.zeros(4, 5), torch.arange(3), rows)


@pytest.mark.parametrize("vocab", [1, 2, 100, 129, 5000])
@pytest.mark.parametrize("scale", [0.0, 1.0, 6.0, 60.0])
@pytest.mark.parametrize("cut", [False, True])
def test_draw_equals_the_argmax_over_all_noise(vocab: int, scale: float, cut: bool) -> None:
    generator = torch.Generator().manual_seed(vocab)
    rows = make_rows([Setting()] * 200)
    positions = torch.arange(200)
    scores = torch.randn(200, vocab, generator=generator) * scale
    if vocab > 100:
        scores[:, 7] = float("-inf")
    support = None
    wide = scores.double() + gumbel_noise(rows.keys_N2, positions, vocab)
    if cut:
        support = torch.rand(200, vocab, generator=generator) < 0.3
        support[:, -1] = True
        wide = wide.masked_fill(~support, float("-inf"))
    assert torch.equal(draw(scores, positions, rows, support), wide.argmax(-1))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_does_not_affect_others(bad: float) -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(1))
    positions, rows = torch.arange(4), make_rows([Setting()] * 4)
    before = choose(logits, positions, rows)
    logits[2, 200] = bad
    after = choose(logits, positions, rows)
    assert after.log_probs.isnan().tolist() == [False, False, True, False]
    assert 0 <= int(after.tokens[2]) < 300
    others = torch.tensor([0, 1, 3])
    assert torch.equal(after.tokens[others], before.tokens[others])
    assert torch.equal(after.log_probs[others], before.log_probs[others])


MIXED = [
    Setting(temperature=0),
    Setting(),
    Setting(temperature=0.7),
    Setting(top_p=0.8),
    Setting(temperature=1.3, top_k=9),
    Setting(min_p=0.1),
    Setting(temperature=0, top_p=0.5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", [[Setting()], MIXED], ids=["sampled", "mixed"])
def test_a_part_of_the_vocabulary_is_chosen_like_all_of_it_without_the_rest(
    dtype: torch.dtype, settings: list[Setting]
) -> None:
    # In float64, torch draws instead of the kernel.
    vocab, generator = 700, torch.Generator().manual_seed(3)
    ids = torch.randperm(vocab, generator=generator)[:300].sort().values
    rows, positions = make_rows([*settings, *settings, *settings]), torch.arange(3 * len(settings))
    logits = (torch.randn(len(positions), 300, generator=generator) * 3).to(dtype)
    wide = logits.new_full((len(positions), vocab), float("-inf")).index_copy_(1, ids, logits)
    expected = choose(wide, positions, rows)
    for each in (ids, ids.repeat_interleave(2)[::2]):
        found = choose(logits, positions, rows, each)
        assert torch.equal(found.tokens, expected.tokens)
        torch.testing.assert_close(found.log_probs, expected.log_probs)
        torch.testing.assert_close(found.sampling_log_probs, expected.sampling_log_probs)


@pytest.mark.parametrize("vocab", [48, 67, 1031])
def test_rows_of_mixed_settings_equal_single_rows(vocab: int) -> None:
    logits = torch.randn(len(MIXED), vocab, generator=torch.Generator().manual_seed(2)) * 3
    logits = logits.bfloat16().float()  # ties
    positions = torch.arange(len(MIXED)) * 13
    together = choose(logits, positions, make_rows(MIXED))
    for i, setting in enumerate(MIXED):
        alone = choose(logits[i : i + 1], positions[i : i + 1], make_rows([setting], first_key=i))
        assert alone.tokens[0] == together.tokens[i]
        assert alone.log_probs[0] == together.log_probs[i]
        assert alone.sampling_log_probs[0] == together.sampling_log_probs[i]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("setting", MIXED, ids=str)
def test_only_a_row_that_is_not_finite_has_nan_log_probs(bad: float, setting: Setting) -> None:
    logits = LOGITS.repeat(3, 1)
    logits[1, 2] = bad
    choice = choose(logits, torch.arange(3), make_rows([setting] * 3))
    assert choice.log_probs.isnan().tolist() == [False, True, False]
    assert 0 <= int(choice.tokens[1]) < len(LOGITS)


def test_first_argmax_returns_the_lowest_index_among_equals() -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0], [5.0, 5.0, 1.0], [float("-inf"), -3.0, -3.0]])
    assert first_argmax(scores).tolist() == [1, 0, 1]


def test_results_do_not_depend_on_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = make_rows([*SETTINGS, Setting(temperature=0.0), Setting()])
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(9) * 7
    whole = choose(logits, positions, rows)
    module = sys.modules["slipstream.sampling.choose"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for elements, fewest in ((1, 1), (3 * logits.shape[1], 1), (1, 4)):
        monkeypatch.setattr(module, "ELEMENTS_AT_ONCE", elements)
        monkeypatch.setattr(module, "FEWEST_AT_ONCE", fewest)
        parts = choose(logits, positions, rows)
        assert torch.equal(parts.tokens, whole.tokens)
        assert torch.equal(parts.log_probs, whole.log_probs)
        assert torch.equal(parts.sampling_log_probs, whole.sampling_log_probs)


@pytest.mark.parametrize(("threads", "together"), [(1, FEWEST_AT_ONCE), (6, 6)])
def test_rows_of_a_large_vocabulary_are_drawn_together(
    threads: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row at a time, a single thread would do all the work."""
    drawn, original = [], kernel.draw

    def recorded(*arguments: int) -> None:
        drawn.append(arguments[-2])
        original(*arguments)

    monkeypatch.setattr(kernel, "draw", recorded)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    rows = make_rows([Setting()] * (2 * together + 1))
    choose(torch.zeros(2 * together + 1, ELEMENTS_AT_ONCE), torch.arange(2 * together + 1), rows)
    assert drawn == [together, together, 1]
