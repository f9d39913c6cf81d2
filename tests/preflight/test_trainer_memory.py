"""Tests of the predicted memory of trainers against the measured memory of larger trainers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.config.load import load_config
from slipstream.models import decoder as decoders
from slipstream.models import functional
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.lora import LoraConfig, add_lora
from slipstream.preflight import trainer_memory
from slipstream.preflight.trainer_memory import MakeTrainer, logits_bytes, measure_trainer, one_step
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.optim import OptimizerName, OptimSettings
from slipstream.training.single import SingleProcessBackend

CPU = torch.device("cpu")

CONFIG = ModelConfig(
    family="qwen3",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=192,
    num_layers=5,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    eos_token_id=3,
)


def maker(
    optimizer: OptimizerName = "AdamW",
    dtype: torch.dtype = torch.float32,
    *,
    rank: int = 0,
    tokens: int = 8192,
) -> MakeTrainer:
    def make(config: ModelConfig, compute: ComputeThread, recompute: bool) -> SingleProcessBackend:
        def make_on_thread() -> SingleProcessBackend:
            decoder = Decoder(config)
            decoder.init_weights(0)
            if rank:
                add_lora(decoder, LoraConfig(rank=rank, alpha=rank))
            return SingleProcessBackend(
                decoder,
                optim=OptimSettings(lr=1e-3, optimizer=optimizer, weight_decay=0.0),
                dtype=dtype,
                gradient_checkpointing=recompute,
                max_tokens_per_micro_batch=tokens,
                compute=compute,
            )

        return compute.run(make_on_thread)

    return make


@pytest.mark.parametrize(
    ("optimizer", "dtype", "recompute", "rank"),
    [
        ("AdamW", torch.float32, False, 0),
        ("AdamW", torch.bfloat16, False, 0),
        ("Muon", torch.float32, False, 0),
        ("AdamW", torch.float32, True, 0),
        ("AdamW", torch.float32, False, 8),
    ],
)
@pytest.mark.parametrize(("rows", "length"), [(2, 16), (20, 200)])
def test_predicted_memory_matches_a_larger_trainer(
    optimizer: OptimizerName, dtype: torch.dtype, recompute: bool, rank: int, rows: int, length: int
) -> None:
    """With few tokens, most of the memory is gradients; with many tokens, it is activations."""
    make = maker(optimizer, dtype, rank=rank)
    predicted = measure_trainer(CONFIG, make, device=CPU, recomputes=recompute)
    small = replace(CONFIG, eos_token_id=None)
    found = one_step(small, make, CPU, rows=rows, length=length, recomputes=recompute)
    logits = logits_bytes(512, rows * length, chunk=512, keep=600_000_000)
    step = predicted.step(5, 512, rows * length, length, logits=logits)
    assert found.kept + step == pytest.approx(found.kept + found.peak, rel=0.15)
    assert predicted.kept.at(5, 512) == pytest.approx(found.kept, rel=0.02)


def test_several_micro_batches_need_memory_for_the_gradients_of_the_first() -> None:
    rows, length = 2, 256
    wide = replace(CONFIG, hidden_size=256, intermediate_size=1024, eos_token_id=None)
    predicted = measure_trainer(wide, maker(), device=CPU)
    logits = logits_bytes(512, length, chunk=512, keep=600_000_000)
    one, several = (
        predicted.step(5, 512, length, length, logits=logits, accumulates=accumulates)
        for accumulates in (False, True)
    )
    found = one_step(wide, maker(tokens=length), CPU, rows=rows, length=length)
    assert several == pytest.approx(found.peak, rel=0.1)
    assert one < 0.8 * found.peak


def test_predicted_memory_without_kernels_includes_attention_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the CPU kernels, as on a GPU, attention stores its scores."""
    for module in (decoders, functional):
        monkeypatch.setattr(module, "has_kernels", lambda *_: False)
    predicted = measure_trainer(CONFIG, maker(), device=CPU)
    small = replace(CONFIG, eos_token_id=None)
    for rows, length in ((12, 64), (2, 384)):
        found = one_step(small, maker(), CPU, rows=rows, length=length)
        logits = logits_bytes(512, rows * length, chunk=512, keep=600_000_000)
        step = predicted.step(5, 512, rows * length, length, logits=logits)
        assert found.kept + step == pytest.approx(found.kept + found.peak, rel=0.2)


def test_weights_and_adam_moments_need_12_bytes_per_parameter_and_gradients_4() -> None:
    found = measure_trainer(CONFIG, maker(), device=CPU)
    parameters = sum(p.numel() for p in Decoder(CONFIG).parameters())
    assert found.kept.at(5, 512) == pytest.approx(12 * parameters, rel=0.01)
    assert found.gradients.at(5, 512) == pytest.approx(4 * parameters, rel=0.01)


def test_logits_bytes_kept_for_the_backward_pass_are_limited() -> None:
    assert logits_bytes(1000, 100, chunk=512, keep=10**9) == 3 * 400_000
    assert logits_bytes(1000, 1000, chunk=100, keep=10**6) == 10**6 + 2 * 400_000


WIDE = replace(CONFIG, intermediate_size=640, eos_token_id=None)


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide starts early, so that wide trainers can be measured for comparison."""
    monkeypatch.setattr(trainer_memory, "MOST_WEIGHTS", 100_000)
    monkeypatch.setitem(trainer_memory._NARROW, "intermediate_size", (128, 192))


@pytest.mark.parametrize(("optimizer", "rank"), [("AdamW", 4), ("Muon", 0)])
@pytest.mark.usefixtures("low_limit")
def test_the_memory_of_wide_layers_is_extrapolated_from_narrow_ones(
    optimizer: OptimizerName, rank: int
) -> None:
    make, squares = maker(optimizer, rank=rank), optimizer == "Muon"
    assert len(trainer_memory.narrower(WIDE)) == 2
    found = measure_trainer(WIDE, make, device=CPU, squares=squares)
    measured = trainer_memory._measured(WIDE, make, CPU, False)
    for layers, words, tokens, length in ((5, 512, 320, 64), (40, 50_000, 4000, 200)):
        assert found.kept.at(layers, words) == pytest.approx(
            measured.kept.at(layers, words), rel=0.01
        )
        for part in ("forward", "gradients", "layer"):
            one, other = (
                getattr(m, part).at(layers, words, tokens, length) for m in (found, measured)
            )
            assert one == pytest.approx(other, rel=0.01), part
        # Muon's products of matrices are only in proportion.
        assert found.optimizer.at(layers, words) == pytest.approx(
            measured.optimizer.at(layers, words), rel=0.35 if squares else 0.01
        )


HUGE = 2**31 - 1


@pytest.mark.parametrize(
    "widths",
    [
        {"intermediate_size": 999_984},
        {"hidden_size": HUGE, "intermediate_size": HUGE},
        {"num_heads": 10**6, "num_kv_heads": 1},
        {"num_heads": 10**6, "num_kv_heads": 10**6, "head_dim": HUGE - 1},
        {"hidden_size": 3584, "intermediate_size": 18944, "num_heads": 28, "head_dim": 128},
    ],
)
def test_no_small_model_has_many_weights(widths: dict[str, int]) -> None:
    config = replace(CONFIG, max_position_embeddings=2**24, **widths)  # type: ignore[arg-type]
    narrow = trainer_memory.narrower(config)
    assert len(narrow) > 1
    # The number of weights is a product of two widths, like the memory.
    total = sum(share * small.layer_weights for share, small in narrow)
    assert total == pytest.approx(config.layer_weights, rel=1e-6)
    for small in (*(small for _, small in narrow), trainer_memory._in_proportion(config)):
        assert small.layer_weights <= trainer_memory.MOST_WEIGHTS


def test_the_table_of_many_positions_is_counted_and_not_made() -> None:
    ordinary = replace(CONFIG, max_position_embeddings=131_072)
    assert trainer_memory.rope_bytes(ordinary, torch.float32) == 0
    longer = replace(CONFIG, max_position_embeddings=131_072 + 1000)
    assert trainer_memory.rope_bytes(longer, torch.bfloat16) == 2 * 1000 * 16 * 2


@pytest.mark.parametrize("recipe", ["tiny", "quickstart", "quickstart_small", "long_tail"])
def test_models_of_the_recipes_are_measured_in_their_own_widths(recipe: str) -> None:
    init = load_config(recipe=recipe, notify=lambda text: None).actor_rollout_ref.model.init
    assert init is not None
    model = replace(
        CONFIG,
        hidden_size=init.hidden_size,
        intermediate_size=init.intermediate_size,
        num_heads=init.num_heads,
        num_kv_heads=init.num_kv_heads,
        head_dim=init.head_dim or init.hidden_size // init.num_heads,
    )
    assert trainer_memory.narrower(model) == [(1.0, model)]
