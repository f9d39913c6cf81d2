"""Rollout correction: values, loops in float64, and independence of order, padding and garbage."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms.correction import (
    RolloutCorrectionConfig,
    rollout_correction,
)
from slipstream.algorithms.correction.settings import RS_OPTIONS

P = "rollout_corr/"


def batch(rows: int = 5, length: int = 6, *, seed: int = 0, scale: float = 0.4) -> list[Tensor]:
    """(old, rollout, mask) in float64. The last row is empty; others have 1 to `length` targets."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, length, generator=generator, dtype=torch.float64)
    old = rollout + scale * torch.randn(rows, length, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[-1] = 0
    mask = (torch.arange(length) < lengths[:, None]).double()
    return [old, rollout, mask]


def by_hand(**keys: Any) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """The correction of rows with token ratios 2, 0.5, 4 and 0.5, masked, masked."""
    ratios = torch.tensor([[2.0, 0.5, 4.0], [0.5, 1.0, 1.0]], dtype=torch.float64)
    rollout = torch.full((2, 3), -1.0, dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    config = RolloutCorrectionConfig(**keys)
    return rollout_correction(rollout + ratios.log(), rollout, mask, config)


def rows(tensor: Tensor | None) -> list[float]:
    assert tensor is not None
    return [round(float(x), 9) for x in tensor.flatten()]


def test_weights_values() -> None:
    assert rows(by_hand(rollout_is="token", rollout_is_threshold=3)[0]) == [2, 0.5, 3, 0.5, 0, 0]
    icepop = by_hand(rollout_is="token", rollout_is_threshold="0.6_3")[0]
    assert rows(icepop) == [2, 0, 0, 0, 0, 0]
    assert rows(by_hand(rollout_is="sequence")[0]) == [2, 2, 2, 0.5, 0, 0]
    assert rows(by_hand(rollout_is="sequence", rollout_is_threshold=9)[0]) == [4, 4, 4, 0.5, 0, 0]
    token = by_hand(rollout_is="token", rollout_is_threshold=3, rollout_is_batch_normalize=True)
    assert rows(token[0]) == pytest.approx([2 / 1.5, 0.5 / 1.5, 2, 0.5 / 1.5, 0, 0])
    # Each sequence counts once: (2 + 0.5) / 2.
    sequence = by_hand(rollout_is="sequence", rollout_is_batch_normalize=True)
    assert rows(sequence[0]) == pytest.approx([1.6, 1.6, 1.6, 0.4, 0, 0])


@pytest.mark.parametrize(
    ("rollout_rs", "threshold", "kept"),
    [
        ("token", "0.6_3", [1, 0, 0, 0, 0, 0]),
        ("token_k1", "0.3_0.6", [1, 0, 0, 0, 0, 0]),  # of the inverse ratio: 0.5, 2, 0.25, 2
        ("token_k2", 0.25, [1, 1, 0, 1, 0, 0]),  # ln(2)^2 / 2 = 0.24
        ("token_k3", 0.2, [0, 1, 0, 1, 0, 0]),  # 1 - ln 2 = 0.31; -0.5 + ln 2 = 0.19
        ("sequence", "0.4_3", [0, 0, 0, 1, 0, 0]),
        ("seq_sum_k1", "0.2_1.9", [1, 1, 1, 0, 0, 0]),
        ("seq_sum_k2", 0.3, [0, 0, 0, 1, 0, 0]),
        ("geometric", 1.6, [1, 1, 1, 0, 0, 0]),  # 4^(1/3) = 1.59; 0.5
        ("seq_mean_k1", "0.6_1.9", [1, 1, 1, 0, 0, 0]),
        ("seq_mean_k3", 0.2, [0, 0, 0, 1, 0, 0]),
        ("seq_max_k2", 0.25, [0, 0, 0, 1, 0, 0]),
        ("seq_max_k3", 2.0, [1, 1, 1, 1, 0, 0]),  # 3 - ln 4 = 1.61
        ("token_k2,sequence", "0.25,1.9", [0, 0, 0, 0, 0, 0]),
    ],
)
def test_rejection_values(rollout_rs: str, threshold: float | str, kept: list[int]) -> None:
    weights, mask, metrics = by_hand(rollout_rs=rollout_rs, rollout_rs_threshold=threshold)
    assert weights is None
    assert rows(mask) == kept
    assert metrics[f"{P}rollout_rs_masked_fraction"] == pytest.approx(1 - sum(kept) / 4)
    sequences = ((0 in kept[:3]) + (kept[3] == 0)) / 2
    assert metrics[f"{P}rollout_rs_seq_masked_fraction"] == sequences


def test_veto_values() -> None:
    _, mask, metrics = by_hand(rollout_token_veto_threshold=0.4)
    assert rows(mask) == [1, 1, 1, 1, 0, 0]
    _, mask, metrics = by_hand(rollout_token_veto_threshold=0.51)
    assert rows(mask) == [0, 0, 0, 0, 0, 0]
    assert metrics[f"{P}rollout_is_veto_fraction"] == 1.0
    assert metrics[f"{P}rollout_is_catastrophic_token_fraction"] == 0.5
    # Ratios far below e^-20 also veto, because they are not clamped.
    old = torch.tensor([[-70.0, -1.0], [-1.0, -1.0]])
    config = RolloutCorrectionConfig(rollout_token_veto_threshold=1e-29)
    _, mask, _ = rollout_correction(old, torch.full((2, 2), -1.0), torch.ones(2, 2), config)
    assert mask.tolist() == [[0, 0], [1, 1]]


def test_only_rejected_tokens_get_weight_0() -> None:
    weights, mask, _ = by_hand(
        rollout_is="token", rollout_is_threshold=3, rollout_rs="token", rollout_rs_threshold="0.6_5"
    )
    assert rows(mask) == [1, 0, 1, 0, 0, 0]
    assert rows(weights) == [2, 0, 3, 0, 0, 0]


def clamped_exp(x: float) -> float:
    return math.exp(min(max(x, -20.0), 20.0))


def loops(old: Tensor, rollout: Tensor, mask: Tensor, high: float) -> dict[str, float]:
    """Off-policy metrics and metrics of truncated token weights, computed with loops."""
    ratios, used, kls, k3s, row_means, row_sums, train, sampled = ([] for _ in range(8))
    for b in range(len(mask)):
        rho = [float(old[b, t] - rollout[b, t]) for t in range(mask.shape[1]) if mask[b, t]]
        if not rho:
            continue
        ratios += [clamped_exp(x) for x in rho]
        used += [min(clamped_exp(x), high) for x in rho]
        kls += [-x for x in rho]
        k3s += [clamped_exp(x) - 1 - x for x in rho]
        row_means.append(sum(map(clamped_exp, rho)) / len(rho))
        row_sums.append(clamped_exp(sum(rho)))
        at = [t for t in range(mask.shape[1]) if mask[b, t]]
        train.append(-sum(float(old[b, t]) for t in at) / len(at))
        sampled.append(-sum(float(rollout[b, t]) for t in at) / len(at))

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    n, m = len(used), len(row_means)
    apart = [a - b for a, b in zip(train, sampled, strict=True)]
    center = mean(row_means)
    return {
        "rollout_is_mean": mean(ratios),
        "rollout_is_std": math.sqrt(sum((x - mean(used)) ** 2 for x in used) / n),
        "rollout_is_min": min(ratios),
        "rollout_is_max": max(ratios),
        "rollout_is_eff_sample_size": sum(used) ** 2 / (n * sum(x * x for x in used)),
        "rollout_is_ratio_fraction_high": sum(x > high for x in ratios) / n,
        "rollout_is_ratio_fraction_low": sum(x < 1 / high for x in ratios) / n,
        "rollout_is_seq_mean": center,
        "rollout_is_seq_std": math.sqrt(sum((x - center) ** 2 for x in row_means) / (m - 1)),
        "rollout_is_seq_min": min(row_means),
        "rollout_is_seq_max": max(row_means),
        "rollout_is_seq_max_deviation": max(abs(x - 1) for x in row_means),
        "rollout_is_seq_fraction_high": sum(x > high for x in row_means) / m,
        "rollout_is_seq_fraction_low": sum(x < 1 / high for x in row_means) / m,
        "training_ppl": mean([math.exp(x) for x in train]),
        "rollout_ppl": mean([math.exp(x) for x in sampled]),
        "training_log_ppl": mean(train),
        "rollout_log_ppl": mean(sampled),
        "kl": mean(kls),
        "k3_kl": mean(k3s),
        "log_ppl_diff": mean(apart),
        "log_ppl_abs_diff": mean([abs(x) for x in apart]),
        "log_ppl_diff_max": max(apart),
        "log_ppl_diff_min": min(apart),
        "ppl_ratio": mean([math.exp(x) for x in apart]),
        "chi2_token": mean([x * x for x in ratios]) - 1,
        "chi2_seq": mean([x * x for x in row_sums]) - 1,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_metrics_equal_loops(dtype: torch.dtype) -> None:
    old, rollout, mask = (x.to(dtype) for x in batch())
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.3)
    weights, _, metrics = rollout_correction(old, rollout, mask, config)
    expected = loops(old.double(), rollout.double(), mask, 1.3)
    assert metrics.keys() == {P + name for name in expected}
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for name, value in expected.items():
        assert metrics[P + name] == pytest.approx(value, rel=tolerance, abs=tolerance), name
    assert weights is not None
    assert weights.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("kind", ["token", "icepop", "sequence", "normalized"])
def test_weights_and_veto_equal_loops(kind: str) -> None:
    low, high, veto = 0.8, 1.2, 0.75
    config = RolloutCorrectionConfig(
        rollout_is="sequence" if kind == "sequence" else "token",
        rollout_is_threshold="0.8_1.2" if kind == "icepop" else high,
        rollout_is_batch_normalize=kind == "normalized",
        rollout_token_veto_threshold=veto,
    )
    vetoed = 0
    for seed in range(4):
        old, rollout, mask = batch(seed=seed)
        weights, new_mask, _ = rollout_correction(old, rollout, mask, config)
        assert weights is not None
        expected, kept = torch.zeros_like(old), torch.zeros_like(mask)
        used = []
        for b in range(len(mask)):
            at = [t for t in range(mask.shape[1]) if mask[b, t]]
            rho = {t: float(old[b, t] - rollout[b, t]) for t in at}
            keep = all(math.exp(x) >= veto for x in rho.values())
            vetoed += not keep
            for t in at:
                ratio = math.exp(sum(rho.values()) if kind == "sequence" else rho[t])
                one = min(ratio, high) if kind != "icepop" else ratio * (low <= ratio <= high)
                kept[b, t] = keep
                expected[b, t] = one
                used.append(one)
        if kind == "normalized":
            expected /= sum(used) / len(used)
        torch.testing.assert_close(weights, expected * kept, rtol=1e-12, atol=0)
        assert torch.equal(new_mask, kept)
    assert vetoed > 0


def loop_keep(option: str, rho: list[float], low: float, high: float) -> list[bool]:
    """Which tokens of one sequence are kept; bounds are ratios for `ratio` and `k1`."""
    level, statistic = RS_OPTIONS[option]
    values = []
    for x in rho:
        if statistic in ("ratio", "k1"):
            values.append(x if statistic == "ratio" else -x)
        else:
            values.append(x * x / 2 if statistic == "k2" else math.exp(x) - 1 - x)
    if statistic in ("ratio", "k1"):
        low, high = math.log(low), math.log(high)
    else:
        low = -math.inf
    match level:
        case "token":
            return [low <= v <= high for v in values]
        case "seq_sum":
            one = sum(values)
        case "seq_mean":
            one = sum(values) / len(values)
        case "seq_max":
            one = max(values)
    return [low <= one <= high] * len(values)


@pytest.mark.parametrize("option", RS_OPTIONS)
def test_rejection_equals_loops(option: str) -> None:
    kept, total = 0, 0
    ratios = RS_OPTIONS[option][1] in ("ratio", "k1")
    for seed in range(4):
        old, rollout, mask = batch(seed=seed)
        threshold: float | str = "0.8_1.2" if ratios else 0.05
        config = RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold=threshold)
        _, new_mask, metrics = rollout_correction(old, rollout, mask, config)
        for b in range(len(mask)):
            at = [t for t in range(mask.shape[1]) if mask[b, t]]
            rho = [float(old[b, t] - rollout[b, t]) for t in at]
            expected = loop_keep(option, rho, 0.8, 1.2 if ratios else 0.05) if at else []
            assert [bool(new_mask[b, t]) for t in at] == expected
            kept, total = kept + sum(expected), total + len(at)
        assert int((new_mask * (1 - mask)).sum()) == 0
        assert metrics[f"{P}rollout_rs_{option}_masked_fraction"] == pytest.approx(
            float(1 - new_mask.sum() / mask.sum())
        )
    assert 0 < kept < total


EVERYTHING = RolloutCorrectionConfig(
    rollout_is="sequence",
    rollout_is_threshold=1.5,
    rollout_is_batch_normalize=True,
    rollout_rs="token_k1,seq_mean_k3,seq_max_k2",
    rollout_rs_threshold="0.3_3,0.1,0.5",
    rollout_token_veto_threshold=0.4,
)


CORRECTIONS = {
    "everything": EVERYTHING,
    "token": RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=1.2),
    "icepop": RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold="0.8_1.2"),
    "geometric": RolloutCorrectionConfig(
        rollout_is="sequence", rollout_rs="geometric", rollout_rs_threshold=1.3
    ),
}


@pytest.mark.parametrize("name", CORRECTIONS)
@given(
    seed=st.integers(0, 1000),
    order=st.permutations(range(5)),
    padding=st.integers(0, 3),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)
@settings(max_examples=25, deadline=None)
def test_order_padding_and_masked_values_do_not_matter(
    name: str, seed: int, order: list[int], padding: int, dtype: torch.dtype
) -> None:
    config, tolerance = CORRECTIONS[name], 1e-12 if dtype == torch.float64 else 1e-6
    old, rollout, mask = (values.to(dtype) for values in batch(seed=seed))
    weights, new_mask, metrics = rollout_correction(old, rollout, mask, config)
    assert weights is not None

    def spoilt(values: Tensor, garbage: float) -> Tensor:
        wide = torch.full((5, 6 + padding), garbage, dtype=values.dtype)
        wide[:, :6] = torch.where(mask != 0, values, garbage)
        return wide[order]

    wide_mask = torch.zeros(5, 6 + padding, dtype=mask.dtype)
    wide_mask[:, :6] = mask
    other = rollout_correction(
        spoilt(old, math.nan), spoilt(rollout, -math.inf), wide_mask[order], config
    )
    assert other[0] is not None
    torch.testing.assert_close(other[0][:, :6], weights[order], rtol=tolerance, atol=0)
    assert torch.equal(other[1][:, :6], new_mask[order])
    assert float(other[0][:, 6:].abs().sum() + other[1][:, 6:].sum()) == 0.0
    assert other[2] == pytest.approx(metrics, rel=tolerance, abs=tolerance)


def test_results_have_no_gradient_and_masks_may_have_weights() -> None:
    old, rollout, mask = batch()
    weights, new_mask, _ = rollout_correction(old.requires_grad_(), rollout, mask / 2, EVERYTHING)
    assert weights is not None
    assert not weights.requires_grad
    plain, plain_mask, _ = rollout_correction(old, rollout, mask, EVERYTHING)
    assert torch.equal(new_mask, plain_mask / 2)
    assert plain is not None
    assert torch.equal(weights, plain)


def test_nan_of_a_target_is_rejected() -> None:
    old, rollout, mask = batch()
    old[0, 0] = math.nan
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="token_k1", rollout_rs_threshold=1e6
    )
    weights, new_mask, _ = rollout_correction(old, rollout, mask, config)
    assert weights is not None
    assert float(new_mask[0, 0]) == float(weights[0, 0]) == 0.0
    assert bool(weights.isfinite().all())
    assert float(new_mask.sum()) == float(mask.sum()) - 1


def test_weights_that_are_all_zero_stay_zero() -> None:
    old = torch.full((1, 2), -1.0)
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold="2_3", rollout_is_batch_normalize=True
    )
    weights, _, metrics = rollout_correction(old, old, torch.ones(1, 2), config)
    assert rows(weights) == [0, 0]
    assert metrics[f"{P}rollout_is_eff_sample_size"] == 0.0
    assert metrics[f"{P}rollout_is_seq_std"] == 0.0


def test_extreme_ratios_stay_finite() -> None:
    old, rollout = torch.tensor([[-1.0, -300.0]]), torch.tensor([[-300.0, -1.0]])
    config = RolloutCorrectionConfig(
        rollout_is="token", rollout_rs="token_k3", rollout_rs_threshold=1.0
    )
    _, new_mask, metrics = rollout_correction(old, rollout, torch.ones(1, 2), config)
    assert new_mask.tolist() == [[0, 0]]
    assert metrics[f"{P}rollout_is_max"] == pytest.approx(math.exp(20), rel=1e-5)
    finite = {name: value for name, value in metrics.items() if not name.endswith("ppl")}
    assert all(math.isfinite(value) for value in finite.values())


def test_rejects_invalid_input() -> None:
    old, rollout, mask = batch()
    config = RolloutCorrectionConfig(rollout_is="token")
    with pytest.raises(ValueError, match="use an engine that records them"):
        rollout_correction(old, None, mask, config)
    with pytest.raises(ValueError, match="empty response mask"):
        rollout_correction(old, rollout, torch.zeros_like(mask), config)
    with pytest.raises(
        ValueError, match=r"one shape \(B, T\), got \(5, 6\), \(5, 6\) and \(4, 6\)"
    ):
        rollout_correction(old, rollout, mask[:4], config)
