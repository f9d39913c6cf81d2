"""The training benchmark with a toy model: its FLOPs computed by hand, and contents of a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.bench import train
from slipstream.bench.record import Spread
from slipstream.bench.shapes import SHAPES, make_decoder, matmul_parameters
from slipstream.bench.train import TrainBench, make_batch, profile, run, step_flops
from slipstream.errors import ConfigError

TOY = TrainBench(shape="tiny", rows=4, length=16, matmul_size=64, rounds=2)


def test_matmul_parameters_are_the_sizes_of_the_decoders_matrices() -> None:
    decoder = make_decoder("tiny", max_positions=16)
    matrices = {n: p.numel() for n, p in decoder.named_parameters() if p.ndim == 2}
    head = matrices.pop("model.embed_tokens.weight")
    assert matmul_parameters(SHAPES["tiny"]) == (sum(matrices.values()), head)


def test_flops_of_a_tiny_step_match_a_count_by_hand() -> None:
    # 3 layers of q|k|v 32 x 64, out 32 x 32 and MLP 3 x 32 x 64; head 32 x 64.
    layers, head = 3 * (32 * 64 + 32 * 32 + 3 * 32 * 64), 32 * 64
    # 4 rows; position t of 16 sees t keys, 136 pairs; 2 heads of 16 channels, 3 layers.
    attention = 4 * (4 * 136) * 32 * 3
    assert step_flops(TOY) == 6 * (64 * layers + 60 * head) + 3 * attention


def test_every_token_except_the_first_is_a_target() -> None:
    batch = make_batch(TOY)
    assert (batch.num_tokens, batch.num_target_tokens) == (64, 60)


@pytest.mark.parametrize("units", [False, True])
def test_a_row_has_rates_parts_and_shares_of_the_step(
    units: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "cpu_has_bf16_units", lambda: units)
    row = run(TOY)
    assert (row.benchmark, row.contender, row.dtype) == ("train", "slipstream", "float32")
    assert row.seconds.n == 2
    assert row.settings["rows"] == 4
    values = row.values
    spreads = {name: value for name, value in values.items() if isinstance(value, Spread)}
    assert all(spread.n == 2 and spread.min > 0 for spread in spreads.values())
    assert values["model_gflops_per_step"] == pytest.approx(step_flops(TOY) / 1e9)
    assert spreads["tokens_per_second"].max == pytest.approx(64 / row.seconds.min)
    parts = spreads["forward_backward_seconds"].min + spreads["optimizer_seconds"].min
    assert parts <= row.seconds.max
    assert {"share_of_matmul", "share_of_matmul_cpu"} <= spreads.keys()
    # One round's share is the step's rate over the product's.
    step, product = spreads["model_gflops_per_second"], spreads["matmul_gflops_per_second"]
    assert step.min / product.max <= spreads["share_of_matmul"].median <= step.max / product.min
    # A CPU without bf16 units emulates the product, which takes minutes.
    assert ("share_of_matmul_bf16" in spreads) is units


def test_the_profile_names_matrix_products() -> None:
    assert "aten::mm" in profile(TOY)


@pytest.mark.parametrize("name", ["rows", "length", "matmul_size", "rounds"])
def test_impossible_settings_are_refused_with_their_key(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0 must be at least 1"):
        replace(TOY, **{name: 0})  # type: ignore[arg-type]


def test_sequences_of_one_token_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"length=1 .* give at least 2"):
        TrainBench(length=1)
