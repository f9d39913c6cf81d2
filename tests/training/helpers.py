"""Small decoders and batches for tests of training."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from slipstream.models import Decoder, ModelConfig
from slipstream.training import OptimSettings, SingleProcessBackend
from slipstream.training.columns import rows_of_column, train_batch
from slipstream.types import TrainBatch, TrainRow

VOCAB = 64

T = TypeVar("T")


def tiny_decoder(*, seed: int = 0, layers: int = 2, max_positions: int = 512) -> Decoder:
    decoder = Decoder(
        ModelConfig(
            family="qwen3",
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_layers=layers,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            max_position_embeddings=max_positions,
        )
    )
    decoder.init_weights(seed)
    with torch.no_grad():
        # Large enough that the distributions are clearly not uniform.
        decoder.model.embed_tokens.weight.mul_(20)
    return decoder


def tiny_backend(decoder: Decoder | None = None, **settings: Any) -> SingleProcessBackend:
    settings.setdefault("optim", OptimSettings(lr=1e-3))
    settings.setdefault("max_tokens_per_micro_batch", 256)
    return SingleProcessBackend(decoder or tiny_decoder(), **settings)


def observe(backend: SingleProcessBackend, look: Callable[[TrainBatch], T]) -> list[T]:
    """A list to which the result of `look` is appended for each batch that `backend` gets."""
    found: list[T] = []
    original = backend.forward_backward

    def observed(batch: TrainBatch, *arguments: Any, **more: Any) -> Any:
        found.append(look(batch))
        return original(batch, *arguments, **more)

    backend.forward_backward = observed  # type: ignore[method-assign]
    return found


def rows_of(batch: TrainBatch) -> int:
    return len(batch)


def as_rows(batch: TrainBatch) -> list[TrainRow]:
    return [batch.row(index) for index in range(len(batch))]


def by_row(batch: TrainBatch, values_T: torch.Tensor) -> list[list[float]]:
    """A column as one list per row."""
    return [values.tolist() for values in rows_of_column(values_T, batch.starts)]


def make_row(rng: random.Random, length: int, *, prompt: int = 3, policy: bool = True) -> TrainRow:
    mask = [0.0] * prompt + [1.0] * (length - prompt)
    row = TrainRow(tokens=[rng.randrange(VOCAB) for _ in range(length)], loss_mask=mask)
    if policy:
        row.advantages = [rng.gauss(0, 1)] * length
        row.old_log_probs = [rng.uniform(-5, -2) for _ in range(length)]
        row.ref_log_probs = [rng.uniform(-5, -2) for _ in range(length)]
        row.rollout_log_probs = [rng.uniform(-5, -2) for _ in range(length)]
    return row


def make_batch(lengths: list[int], *, seed: int = 0, policy: bool = True) -> TrainBatch:
    return train_batch(make_rows(lengths, seed=seed, policy=policy))


def make_rows(lengths: list[int], *, seed: int = 0, policy: bool = True) -> list[TrainRow]:
    rng = random.Random(seed)
    return [make_row(rng, n, policy=policy) for n in lengths]


def gradients(backend: SingleProcessBackend) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in backend.decoder.named_parameters() if p.grad is not None}


def weights(backend: SingleProcessBackend) -> dict[str, torch.Tensor]:
    return backend.get_weights().wait()


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference divided by the norm, over all tensors together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[n].double() - b[n].double()).square().sum()) for n in a)
    size = sum(float(b[n].double().square().sum()) for n in b)
    return float((difference / size) ** 0.5)
