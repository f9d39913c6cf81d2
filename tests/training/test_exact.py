"""Log-probs are bitwise independent of micro-batches and padding, and equal to the engine's."""

from __future__ import annotations

import random

import pytest
import torch
from torch.nn import functional as F

from slipstream.models import Decoder, ModelConfig
from slipstream.models.numerics import pad_rows, rows_are_exact
from slipstream.training.columns import train_batch
from slipstream.types import TrainBatch
from tests.training.helpers import as_rows, by_row, make_row, tiny_backend, tiny_decoder


def wide_decoder(max_positions: int) -> Decoder:
    decoder = Decoder(
        ModelConfig(
            family="qwen3",
            vocab_size=96,
            hidden_size=192,
            intermediate_size=512,
            num_layers=2,
            num_heads=4,
            num_kv_heads=1,
            head_dim=48,
            max_position_embeddings=max_positions,
        )
    )
    decoder.init_weights(1)
    with torch.no_grad():
        decoder.model.embed_tokens.weight.mul_(20)
    return decoder


def log_probs(decoder: Decoder, batch: TrainBatch, **settings: object) -> list[list[float]]:
    backend = tiny_backend(decoder, **settings)
    out = by_row(batch, backend.compute_log_probs(batch).wait())
    backend.close()
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_do_not_depend_on_the_split(dtype: torch.dtype, temperature: float) -> None:
    rng = random.Random(0)
    rows = [make_row(rng, rng.randrange(5, 150), prompt=rng.randrange(1, 5)) for _ in range(14)]
    batch = train_batch(rows, temperature=temperature)
    # bf16 is emulated on many CPUs: a smaller model keeps the test short.
    decoder = wide_decoder(512) if dtype == torch.float32 else tiny_decoder()

    reference = log_probs(decoder, batch, dtype=dtype, max_tokens_per_micro_batch=100_000)

    for budget in (160, 333, 1000):
        assert (
            log_probs(decoder, batch, dtype=dtype, max_tokens_per_micro_batch=budget) == reference
        )
    chunked = log_probs(
        decoder, batch, dtype=dtype, max_tokens_per_micro_batch=1000, log_prob_chunk=20
    )
    assert chunked == reference
    assert all(row[0] == 0.0 for row in reference)


def test_long_contexts_do_not_depend_on_padding_or_other_rows(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    long, shorter = make_row(rng, 2000), make_row(rng, 1100)
    shorter.tokens[:700] = long.tokens[:700]
    if dtype == torch.float32:
        decoder = wide_decoder(2048)
    else:
        decoder = tiny_decoder(layers=1, max_positions=2048)

    together = log_probs(
        decoder,
        train_batch([long, shorter, make_row(rng, 40)]),
        dtype=dtype,
        max_tokens_per_micro_batch=6000,
    )
    alone = log_probs(decoder, train_batch([long]), dtype=dtype, max_tokens_per_micro_batch=2000)
    shorter_alone = log_probs(
        decoder, train_batch([shorter]), dtype=dtype, max_tokens_per_micro_batch=2000
    )

    assert together[0] == alone[0]
    assert together[1] == shorter_alone[0]
    # Rows with a common prefix have equal log-probs there.
    assert together[0][1:700] == together[1][1:700]


def test_log_probs_equal_the_engines_from_the_same_hidden_states(
    dtype: torch.dtype,
) -> None:
    rng = random.Random(2)
    batch = train_batch([make_row(rng, n) for n in (30, 77)], temperature=0.9)
    decoder = tiny_decoder()

    ours = log_probs(decoder, batch, dtype=dtype)

    with torch.no_grad():
        packed = decoder.pack(dtype)
        for row, got in zip(as_rows(batch), ours, strict=True):
            ids = torch.tensor(row.tokens + [0] * (-len(row.tokens) % 4))[None]
            hidden = packed.forward(ids, torch.arange(ids.shape[1])[None]).final[0]
            for t in range(3, len(row.tokens), 13):
                # One decode step has a single row, padded by the row rule.
                logits = packed.lm_head(pad_rows(hidden[t - 1 : t], 12))[:1].float()
                law = torch.log_softmax(logits / 0.9, -1)
                assert law[0, row.tokens[t]].item() == got[t]


@pytest.mark.usefixtures("without_kernels")
def test_exactness_of_torchs_matrix_products_is_measured() -> None:
    hidden = torch.randn(12, 192)
    weight = torch.randn(96, 192)
    same = torch.equal(F.linear(hidden, weight)[:4], F.linear(hidden[:4].clone(), weight))
    assert same or not rows_are_exact(torch.float32, torch.device("cpu"))


def test_kernels_are_exact_if_torchs_products_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for torchs in (False, True):
        monkeypatch.setattr("slipstream.models.numerics.products_are_exact", lambda so=torchs: so)
        assert rows_are_exact(torch.float32, cpu)
        assert rows_are_exact(torch.bfloat16, cpu)
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr("slipstream.models.numerics.kernels_supported", lambda: False)
            assert rows_are_exact(torch.float32, cpu) is torchs
    assert not rows_are_exact(torch.float32, torch.device("meta"))
