"""Optimizers and learning rate schedules against torch, their states, and rejected settings."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from slipstream.errors import CheckpointError, ConfigError
from slipstream.training.muon import BatchedMuon
from slipstream.training.optim import OptimSettings, PolicyOptimizer, ScheduleName, lr_factor
from tests.training.helpers import tiny_decoder


def test_lr_factor_values() -> None:
    def cosine(step: int) -> float:
        return lr_factor(step, schedule="cosine", warmup_steps=4, total_steps=12, min_lr_ratio=0.2)

    assert [cosine(s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert cosine(4) == 1.0
    assert cosine(8) == pytest.approx(0.6)
    assert cosine(6) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert cosine(12) == pytest.approx(0.2)
    assert cosine(500) == pytest.approx(0.2)
    assert lr_factor(7, schedule="linear", total_steps=10) == pytest.approx(0.3)
    assert lr_factor(0, schedule="constant") == 1.0
    assert lr_factor(10**6, schedule="constant", warmup_steps=3) == 1.0


VERL_SCHEDULES: dict[str, Callable[[float], float]] = {
    # Factor by the share of the steps after warm-up, for 2 warm-up steps, 12 steps in total, and
    # min_lr_ratio=0.1. VERL's cosine is cos(2 pi num_cycles x) * 0.45 + 0.55.
    "constant": lambda x: 1.0,
    "cosine": lambda x: math.cos(math.pi * x) * 0.45 + 0.55,
    # Its wsd with lr_wsd_stable_steps_ratio=0.5: 5 steps at 1, then a cosine over 5 steps.
    "wsd": lambda x: 1.0 if x < 0.5 else 0.9 * (1 + math.cos(math.pi * (x - 0.5) / 0.5)) / 2 + 0.1,
}


@pytest.mark.parametrize("schedule", VERL_SCHEDULES)
def test_factors_with_offset_0_equal_a_torch_scheduler_with_the_formulas_of_verl(
    schedule: ScheduleName,
) -> None:
    def verl(step: int) -> float:
        return step / 2 if step < 2 else VERL_SCHEDULES[schedule]((step - 2) / (12 - 2))

    weight = nn.Parameter(torch.zeros(1))
    torch_optimizer = torch.optim.SGD([weight], lr=1e-6)
    scheduler = torch.optim.lr_scheduler.LambdaLR(torch_optimizer, verl)
    settings = OptimSettings(
        lr=1e-6,
        schedule=schedule,
        warmup_steps=2,
        total_steps=12,
        min_lr_ratio=0.1,
        stable_ratio=0.5,
        warmup_offset=0,
    )
    optimizer = PolicyOptimizer({"a": nn.Parameter(torch.zeros(1))}.items(), settings)
    for step in range(13):
        expected = scheduler.get_last_lr()[0]
        assert optimizer.learning_rates(step)["lr"] == pytest.approx(expected, rel=1e-9, abs=0)
        torch_optimizer.step()
        scheduler.step()


def test_cosine_starts_one_step_earlier_with_decay_offset_1() -> None:
    def factor(step: int, **offsets: int) -> float:
        return lr_factor(step, schedule="cosine", warmup_steps=3, total_steps=9, **offsets)

    shifted = [factor(s, warmup_offset=1, decay_offset=1) for s in range(8)]
    assert shifted == [factor(s + 1, warmup_offset=0) for s in range(8)]
    assert shifted[:3] == [1 / 3, 2 / 3, 1.0]


def test_cosine_with_one_cycle_returns_to_1() -> None:
    assert lr_factor(10, schedule="cosine", total_steps=10, num_cycles=1.0) == 1.0
    assert lr_factor(5, schedule="cosine", total_steps=10, num_cycles=1.0) == 0.0


def test_wsd_without_decay_steps_stays_at_1_until_the_end() -> None:
    def wsd(step: int) -> float:
        return lr_factor(step, schedule="wsd", total_steps=4, min_lr_ratio=0.2, stable_ratio=1.0)

    assert [wsd(s) for s in range(6)] == [1.0, 1.0, 1.0, 1.0, 0.2, 0.2]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stable_ratio": 1.5}, "stable_ratio=1.5"),
        ({"num_cycles": -1.0}, "num_cycles=-1.0"),
        ({"optimizer": "SGD"}, "unknown optimizer 'SGD'; known: AdamW, Muon"),
        ({"schedule": "step"}, "unknown schedule"),
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0"),
        ({"eps": 0.0}, "eps=0.0"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio=1.5"),
        ({"schedule": "cosine"}, "needs total_steps > warmup_steps"),
        ({"schedule": "linear", "total_steps": 5, "warmup_steps": 5}, "total_steps=5"),
    ],
)
def test_rejects_impossible_settings(options: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        OptimSettings(**{"lr": 1e-3, **options})  # type: ignore[arg-type]


def parameters(seed: int) -> dict[str, nn.Parameter]:
    g = torch.Generator().manual_seed(seed)
    shapes = {"a": (8, 8), "b": (8, 8), "wide": (4, 12), "tall": (12, 4), "tall2": (12, 4)}
    return {n: nn.Parameter(torch.randn(s, generator=g)) for n, s in shapes.items()}


def give_gradients(ours: dict[str, nn.Parameter], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    for parameter in ours.values():
        parameter.grad = torch.randn(parameter.shape, generator=g)


def fp32_newton_schulz(
    grad: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    a, b, c = coefficients
    tall = grad.shape[0] > grad.shape[1]
    x: torch.Tensor = grad.T if tall else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


@pytest.mark.parametrize(
    ("in_fp32", "dtype", "tolerance"),
    [(True, torch.float32, 2e-6), (False, torch.float32, 0.02), (False, torch.bfloat16, 0.01)],
)
def test_batched_muon_equals_torch_muon(
    monkeypatch: pytest.MonkeyPatch, in_fp32: bool, dtype: torch.dtype, tolerance: float
) -> None:
    if in_fp32:
        # torch iterates in bf16; for this comparison it runs in full precision.
        monkeypatch.setattr("torch.optim._muon._zeropower_via_newtonschulz", fp32_newton_schulz)
    ours, theirs = parameters(0), parameters(0)
    muon = BatchedMuon(ours, momentum=0.9, weight_decay=0.1, dtype=dtype)
    reference = torch.optim.Muon(theirs.values(), lr=0.05, momentum=0.9, weight_decay=0.1)

    for step in range(3):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        muon.step(0.05)
        reference.step()  # type: ignore[no-untyped-call]

    for name in ours:
        assert (ours[name] - theirs[name]).abs().max().item() < tolerance, name


def test_muon_state_continues_bitwise() -> None:
    straight, resumed = parameters(1), parameters(1)
    first = BatchedMuon(straight, momentum=0.9, weight_decay=0.0)
    for step in range(2):
        give_gradients(straight, step)
        first.step(0.05)
    second = BatchedMuon(resumed, momentum=0.9, weight_decay=0.0)
    second.load_state_dict(first.state_dict())
    with torch.no_grad():
        for name in resumed:
            resumed[name].copy_(straight[name])

    for muon, ours in ((first, straight), (second, resumed)):
        give_gradients(ours, 5)
        muon.step(0.05)

    for name in straight:
        assert torch.equal(straight[name], resumed[name])


def test_adamw_equals_torch_without_decay_on_norms() -> None:
    ours, theirs = tiny_decoder(), tiny_decoder()
    optimizer = PolicyOptimizer(
        ours.named_parameters(), OptimSettings(lr=0.01, weight_decay=0.3, warmup_steps=2)
    )
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    vectors = [p for p in theirs.parameters() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}],
        lr=0.01,
        fused=True,
    )

    for step in range(3):
        give_gradients(dict(ours.named_parameters()), step)
        give_gradients(dict(theirs.named_parameters()), step)
        for group in reference.param_groups:
            group["lr"] = 0.005 if step == 0 else 0.01
        optimizer.step(step)
        reference.step()

    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def test_muon_updates_only_the_matrices_of_layers() -> None:
    optimizer = PolicyOptimizer(
        tiny_decoder().named_parameters(), OptimSettings(lr=0.01, optimizer="Muon", muon_lr=0.02)
    )
    give_gradients(dict(optimizer._parameters), 0)
    optimizer.step(0)

    state = optimizer.state_dict()
    assert len(state["muon"]) == 2 * 7
    assert all(".self_attn." in n or ".mlp." in n for n in state["muon"])
    assert "model.embed_tokens.weight" in state["adamw"]
    assert "model.layers.0.self_attn.q_norm.weight" in state["adamw"]
    assert optimizer.learning_rates(0) == {"lr": 0.01, "muon_lr": 0.02}
    before = state["muon"]["model.layers.0.mlp.up_proj.weight"]["momentum_buffer"]
    assert before.shape == (64, 32)


def test_state_has_parameters_without_gradient() -> None:
    """Experts without tokens have no gradient; the state must still have all parameter names."""

    def update(optimizer: PolicyOptimizer, names: list[str]) -> None:
        for name, parameter in optimizer._parameters.items():
            parameter.grad = torch.ones_like(parameter) if name in names else None
        optimizer.step(0)

    def make() -> PolicyOptimizer:
        named = {name: nn.Parameter(torch.ones(2, 2)) for name in "ab"}
        return PolicyOptimizer(named.items(), OptimSettings(lr=0.01))

    first, again = make(), make()
    update(first, ["a"])
    state = first.state_dict()
    assert state["adamw"].keys() == {"a", "b"}
    assert not state["adamw"]["b"]["exp_avg"].any()
    assert torch.equal(first._parameters["b"], torch.ones(2, 2))
    update(again, ["a"])
    again.load_state_dict(state)
    for optimizer in (first, again):
        update(optimizer, ["a", "b"])
    for name, parameter in first._parameters.items():
        assert torch.equal(parameter, again._parameters[name])


def test_rejects_the_state_of_another_optimizer_or_model() -> None:
    adamw = PolicyOptimizer(tiny_decoder().named_parameters(), OptimSettings(lr=0.01))
    give_gradients(dict(adamw._parameters), 0)
    adamw.step(0)
    state = adamw.state_dict()
    muon = PolicyOptimizer(
        tiny_decoder().named_parameters(), OptimSettings(lr=0.01, optimizer="Muon", muon_lr=0.02)
    )
    deeper = PolicyOptimizer(tiny_decoder(layers=3).named_parameters(), OptimSettings(lr=0.01))

    with pytest.raises(CheckpointError, match=r"AdamW, .*Muon"):
        muon.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"parameter 'model\.layers\.2"):
        deeper.load_state_dict(state)
    state["adamw"]["model.norm.weight"]["exp_avg"] = torch.zeros(3)
    with pytest.raises(CheckpointError, match=r"adamw\.model\.norm\.weight\.exp_avg is .*\(3,\)"):
        adamw.load_state_dict(state)
