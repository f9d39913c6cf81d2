"""Loss functions of a micro-batch: values, gradients, and independence of the split."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.algorithms import (
    Normalizers,
    PolicyLossConfig,
    agg_loss,
    register_policy_loss,
    registry,
)
from slipstream.errors import ConfigError, DataError
from slipstream.training.losses import (
    LossInputs,
    LossOutputs,
    policy_loss_fn,
    rollout_difference,
    sft_loss,
)


def make_inputs(
    log_probs: list[list[float]], mask: list[list[float]], **columns: Tensor
) -> LossInputs:
    lp = torch.tensor(log_probs, dtype=torch.float64, requires_grad=True)
    m = torch.tensor(mask, dtype=torch.float64)
    columns.setdefault("old_log_probs", lp.detach())
    columns.setdefault("entropy", torch.zeros_like(lp))
    return LossInputs(
        log_probs=lp,
        mask=m,
        normalizers=Normalizers.from_mask(m),
        num_targets=int((m != 0).sum()),
        **columns,
    )


def test_sft_loss_is_the_mean_negative_log_prob() -> None:
    inputs = make_inputs([[0.0, -1.0, -2.0], [0.0, -6.0, -9.0]], [[0, 1, 1], [0, 1, 0]])

    out = sft_loss()(inputs)

    assert out.loss.item() == pytest.approx(3.0)
    assert float(out.sums["sft/loss"]) == pytest.approx(3.0)
    out.loss.backward()  # type: ignore[no-untyped-call]
    assert inputs.log_probs.grad is not None
    expected = torch.tensor([[0, -1 / 3, -1 / 3], [0, -1 / 3, 0]], dtype=torch.float64)
    assert torch.allclose(inputs.log_probs.grad, expected, rtol=1e-12)


def test_sft_prefix_names_the_metrics() -> None:
    out = sft_loss(prefix="val")(make_inputs([[0.0, -1.0]], [[0, 1]]))
    assert set(out.sums) == {"val/loss", "val/entropy"}


def test_on_policy_gradient_is_the_advantage() -> None:
    advantages = torch.tensor([[0.0, 2.0, 2.0], [0.0, -1.0, 0.0]], dtype=torch.float64)
    inputs = make_inputs(
        [[0.0, -1.0, -2.0], [0.0, -6.0, 0.0]], [[0, 1, 1], [0, 1, 0]], advantages=advantages
    )

    out = policy_loss_fn()(inputs)
    out.loss.backward()  # type: ignore[no-untyped-call]

    assert out.loss.item() == pytest.approx(-(2 + 2 - 1) / 3)
    assert inputs.log_probs.grad is not None
    assert torch.allclose(inputs.log_probs.grad, -advantages / 3)
    assert float(out.sums["actor/ppo_kl"]) == 0.0
    assert float(out.sums["actor/pg_clipfrac"]) == 0.0


def test_entropy_and_kl_terms_match_a_computation_by_hand() -> None:
    inputs = make_inputs(
        [[0.0, -1.0]],
        [[0, 1]],
        advantages=torch.zeros(1, 2, dtype=torch.float64),
        ref_log_probs=torch.tensor([[0.0, -1.5]], dtype=torch.float64),
        entropy=torch.tensor([[0.0, 0.7]], dtype=torch.float64),
    )

    out = policy_loss_fn(
        entropy_coeff=0.1, use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="low_var_kl"
    )(inputs)

    k3 = math.exp(-0.5) - 1 + 0.5
    assert out.loss.item() == pytest.approx(-0.1 * 0.7 + 0.5 * k3)
    assert float(out.sums["actor/kl_loss"]) == pytest.approx(k3)
    assert float(out.sums["actor/entropy"]) == pytest.approx(0.7)
    assert out.maxima["actor/kl_coef"] == 0.5


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_loss_without_counts_does_not_depend_on_micro_batches(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_POLICY_LOSSES", dict(registry._POLICY_LOSSES))

    @register_policy_loss("as_in_verl_0_6")
    def plain(
        *, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **more: Any
    ) -> tuple[Tensor, dict[str, float]]:
        loss_mat = -advantages * log_prob
        return agg_loss(loss_mat, response_mask, more["loss_agg_mode"]), {}

    whole = make_inputs(
        [[0.0, -1.0, -2.0], [0.0, -6.0, -9.0], [0.0, -1.0, -1.0]],
        [[0, 1, 1], [0, 1, 0], [0, 0, 1]],
        advantages=torch.tensor([[0, 1, 1], [0, 2, 2], [0, -3, -3]], dtype=torch.float64),
    )
    loss = policy_loss_fn(loss_mode="as_in_verl_0_6", loss_agg_mode=mode, config=HORIZON[mode])
    parts = [
        replace(
            whole,
            **{
                name: getattr(whole, name)[row : row + 1]
                for name in ("log_probs", "mask", "old_log_probs", "advantages", "entropy")
            },
        )
        for row in range(3)
    ]
    expected = policy_loss_fn(loss_agg_mode=mode, config=HORIZON[mode])
    assert sum(loss(part).loss.item() for part in parts) == pytest.approx(loss(whole).loss.item())
    # On-policy, PPO's gradient is that of -A log_prob.
    by_parts, at_once = (
        torch.autograd.grad(total, whole.log_probs)[0]
        for total in (
            torch.stack([loss(part).loss for part in parts]).sum(),
            expected(whole).loss,
        )
    )
    torch.testing.assert_close(by_parts, at_once, rtol=1e-12, atol=1e-12)


HORIZON = {
    "token-mean": None,
    "seq-mean-token-mean": None,
    "seq-mean-token-sum-norm": PolicyLossConfig(loss_scale_factor=7.0),
}


def test_rollout_difference_metrics() -> None:
    lp = [[0.0, math.log(0.5), math.log(0.25)]]
    recorded = torch.tensor([[0.0, math.log(0.5), math.log(0.35)]], dtype=torch.float64)
    inputs = make_inputs(lp, [[0, 1, 1]], rollout_log_probs=recorded)

    out = rollout_difference(inputs)

    assert float(out.maxima["training/rollout_probs_diff_max"]) == pytest.approx(0.1)
    assert float(out.sums["training/rollout_probs_diff_mean"]) == pytest.approx(0.05)
    assert float(out.sums["training/rollout_log_probs_bitwise_equal"]) == 0.5


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"loss_mode": "nonsense"}, "unknown policy loss 'nonsense'"),
        ({"loss_agg_mode": "mean"}, "'mean' is not a valid"),
        ({"loss_mode": "dro"}, "dro_beta"),
        ({"kl_loss_type": "k4"}, "unknown kl penalty 'k4'"),
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "set actor.loss_scale_factor"),
    ],
)
def test_rejects_impossible_settings(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        policy_loss_fn(**options)  # type: ignore[arg-type]


def test_rejects_missing_columns() -> None:
    inputs = make_inputs([[0.0, -1.0]], [[0, 1]])
    with pytest.raises(DataError, match="needs advantages"):
        policy_loss_fn()(inputs)
    with pytest.raises(DataError, match="kl_loss_type=low_var_kl"):
        policy_loss_fn(use_kl_loss=True, kl_loss_type="full")(
            replace(inputs, advantages=torch.ones(1, 2))
        )
    with pytest.raises(DataError, match="reference log-probs"):
        policy_loss_fn(use_kl_loss=True)(replace(inputs, advantages=torch.ones(1, 2)))


def test_user_policy_loss_is_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_POLICY_LOSSES", dict(registry._POLICY_LOSSES))

    @register_policy_loss("test_training_double")
    def double(**given: object) -> tuple[Tensor, dict[str, float]]:
        log_prob = given["log_prob"]
        assert isinstance(log_prob, Tensor)
        return 2 * log_prob.sum(), {"actor/mine": 4.0}

    out = policy_loss_fn(loss_mode="test_training_double")(
        make_inputs([[0.0, -1.0]], [[0, 1]], advantages=torch.ones(1, 2))
    )

    assert out.loss.item() == -2.0
    assert out.sums["actor/mine"] == 4.0
    # Means are weighted to add up over micro-batches: this one has one of four tokens.
    norm = Normalizers(num_tokens=4, num_sequences=2, horizon=9)
    inputs = make_inputs([[0.0, -1.0]], [[0, 1]], advantages=torch.ones(1, 2))
    out = policy_loss_fn(loss_mode="test_training_double")(replace(inputs, normalizers=norm))
    assert out.sums["actor/mine"] == 1.0


def reference_policy_loss(rows: list[dict[str, list[float]]], agg: str, horizon: float) -> float:
    """PPO with dual clip, entropy bonus and k3 KL, token by token in Python floats."""
    low, high, dual, entropy_coeff, kl_coef = 0.2, 0.3, 3.0, 0.01, 0.2
    per_row: list[tuple[float, float]] = []
    for row in rows:
        total = weight = 0.0
        for lp, old, ref, adv, ent, m in zip(
            row["lp"], row["old"], row["ref"], row["adv"], row["ent"], row["mask"], strict=True
        ):
            if not m:
                continue
            ratio = math.exp(min(max(lp - old, -20.0), 20.0))
            loss = max(-adv * ratio, -adv * min(max(ratio, 1 - low), 1 + high))
            if adv < 0:
                loss = min(loss, -adv * dual)
            kl = math.exp(ref - lp) - (ref - lp) - 1
            total += m * (loss - entropy_coeff * ent + kl_coef * min(kl, 10.0))
            weight += m
        per_row.append((total, weight))
    tokens = sum(w for _, w in per_row)
    sequences = sum(1 for _, w in per_row if w)
    sums = sum(s for s, _ in per_row)
    return {
        "token-mean": sums / tokens,
        "token-sum": sums,
        "seq-mean-token-sum": sums / sequences,
        "seq-mean-token-mean": sum(s / w for s, w in per_row if w) / sequences,
        "seq-mean-token-sum-norm": sums / sequences / horizon,
    }[agg]


def _row(draw: st.DrawFn) -> dict[str, list[float]]:
    n = draw(st.integers(1, 6))

    def floats(low: float, high: float) -> list[float]:
        return draw(st.lists(st.floats(low, high), min_size=n, max_size=n))

    return {
        "lp": floats(-4, -0.01),
        "old": floats(-4, -0.01),
        "ref": floats(-4, -0.01),
        "adv": floats(-3, 3),
        "ent": floats(0, 4),
        "mask": draw(st.lists(st.sampled_from([0.0, 1.0]), min_size=n, max_size=n)),
    }


@st.composite
def _split_batches(draw: st.DrawFn) -> tuple[list[dict[str, list[float]]], list[list[int]]]:
    rows = [_row(draw) for _ in range(draw(st.integers(1, 6)))]
    rows[0]["mask"][0] = 1.0
    order = draw(st.permutations(range(len(rows))))
    cuts = sorted(draw(st.sets(st.integers(1, len(rows)), max_size=3)) | {len(rows)})
    parts = [list(order[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]
    return rows, [part for part in parts if part]


AGG_MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@settings(max_examples=60, deadline=None)
@given(case=_split_batches(), agg=st.sampled_from(AGG_MODES))
def test_any_split_gives_the_reference_loss_and_gradient(
    case: tuple[list[dict[str, list[float]]], list[list[int]]], agg: str
) -> None:
    rows, parts = case
    horizon = 7.0
    loss_fn = policy_loss_fn(
        loss_agg_mode=agg,
        config=PolicyLossConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, loss_scale_factor=horizon),
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.2,
    )
    norm = Normalizers(
        num_tokens=sum(sum(r["mask"]) for r in rows),
        num_sequences=sum(1 for r in rows if any(r["mask"])),
        horizon=1.0,
    )

    def evaluate(parts: list[list[int]]) -> tuple[float, dict[str, float], dict[int, Tensor]]:
        total, metrics, grads = 0.0, dict[str, float](), dict[int, Tensor]()
        for part in parts:
            width = max(len(rows[i]["lp"]) for i in part) + len(parts)

            def pad(name: str, part: list[int] = part, width: int = width) -> Tensor:
                out = torch.zeros(len(part), width, dtype=torch.float64)
                for b, i in enumerate(part):
                    out[b, : len(rows[i][name])] = torch.tensor(rows[i][name], dtype=torch.float64)
                return out

            lp = pad("lp").requires_grad_()
            out: LossOutputs = loss_fn(
                LossInputs(
                    log_probs=lp,
                    entropy=pad("ent"),
                    mask=pad("mask"),
                    old_log_probs=pad("old"),
                    ref_log_probs=pad("ref"),
                    advantages=pad("adv"),
                    normalizers=norm,
                    num_targets=1,
                )
            )
            out.loss.backward()  # type: ignore[no-untyped-call]
            assert lp.grad is not None
            total += out.loss.item()
            for name, value in out.sums.items():
                metrics[name] = metrics.get(name, 0.0) + float(value)
            for b, i in enumerate(part):
                grads[i] = lp.grad[b, : len(rows[i]["lp"])]
        return total, metrics, grads

    whole, whole_metrics, whole_grads = evaluate([list(range(len(rows)))])
    total, metrics, grads = evaluate(parts)

    expected = reference_policy_loss(rows, agg, horizon)
    assert total == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert whole == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert metrics == pytest.approx(whole_metrics, rel=1e-12, abs=1e-12)
    for i in grads:
        assert torch.equal(grads[i], whole_grads[i])
