"""Whether the engine and the trainer compute the same numbers here, on a model of two layers.

A rollout, the trainer's log-probs of it, an update, and the new weights in the engine: all that an
RL step computes, in a second once the kernels are compiled. Called by `doctor`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.errors import EngineError, TrainingError
from slipstream.inference.engine import Engine, EngineSettings
from slipstream.models.config import ModelConfig
from slipstream.models.decoder import Decoder
from slipstream.models.lora import copy_weights
from slipstream.models.numerics import rows_are_exact
from slipstream.training.columns import train_batch
from slipstream.training.compute_thread import ComputeThread
from slipstream.training.optim import OptimSettings
from slipstream.training.single import SingleProcessBackend
from slipstream.types import GenerateRequest, NoiseKey, SamplingParams, TrainBatch, TrainRow

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=64,
)
RESPONSES, TOKENS = 4, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """`differing` of `tokens` log-probs are not the same bits in engine and trainer, by at most
    `largest`, in `dtype` on `device`; `exact`: they are promised to be the same."""

    dtype: torch.dtype
    device: torch.device
    tokens: int
    differing: int
    largest: float
    exact: bool

    @property
    def passed(self) -> bool:
        return not (self.exact and self.differing)


def self_test(dtype: torch.dtype, device: torch.device, compute: ComputeThread) -> SelfTest:
    """Not for the event loop, nor for the compute thread itself. Raises EngineError and
    TrainingError where engine or trainer do not compute at all."""

    def make() -> tuple[SingleProcessBackend, Engine]:
        decoder, own = Decoder(MODEL), Decoder(MODEL)
        decoder.init_weights(0)
        copy_weights(decoder, own)
        backend = SingleProcessBackend(
            decoder, optim=OptimSettings(lr=1e-3), dtype=dtype, device=device, compute=compute
        )
        limit = MODEL.max_position_embeddings
        return backend, Engine(own.to(device), EngineSettings(max_model_len=limit, dtype=dtype))

    backend, engine = compute.run(make)
    apart: list[float] = []
    # Twice: before an update and after it.
    for version in range(2):
        batch = compute.run(partial(_rollout, engine, version))
        ours, theirs = backend.compute_log_probs(batch).wait(), batch.rollout_log_probs
        assert theirs is not None
        apart += (ours.double() - theirs.double())[batch.targets].abs().tolist()
        backend.forward_backward(batch).wait()
        metrics = backend.optim_step().wait()
        if not math.isfinite(metrics.get("actor/grad_norm", math.nan)):
            raise TrainingError("self-test: the gradient of a small model is not finite here")
        update = backend.publish()
        compute.run(partial(engine.update_weights, update))
    return SelfTest(
        dtype=dtype,
        device=device,
        tokens=len(apart),
        differing=sum(map(bool, apart)),
        largest=max(apart),
        exact=rows_are_exact(dtype, device),
    )


def _rollout(engine: Engine, version: int) -> TrainBatch:
    draw = random.Random(version)
    requests = [
        GenerateRequest(
            request_id=f"{version}-{row}",
            prompt_ids=tuple(draw.randrange(MODEL.vocab_size) for _ in range(3 + 5 * row)),
            params=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
            key=NoiseKey(seed=version, uid=str(row)),
        )
        for row in range(RESPONSES)
    ]
    rows = []
    for request, made in zip(requests, engine.run(requests), strict=True):
        if len(made.token_ids) != TOKENS:
            raise EngineError(
                f"self-test: {TOKENS} tokens were asked for and {len(made.token_ids)} came "
                f"({made.error or made.stop_reason})"
            )
        prompt = len(request.prompt_ids)
        rows.append(
            TrainRow(
                tokens=[*request.prompt_ids, *made.token_ids],
                loss_mask=[0.0] * prompt + [1.0] * TOKENS,
                rollout_log_probs=[0.0] * prompt + list(made.log_probs),
                uid=request.request_id,
            )
        )
    return train_batch(rows)
