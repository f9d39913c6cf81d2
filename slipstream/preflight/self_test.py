"""Tests whether engine and trainer compute the same log-probs, with a model of two layers.

The test does what an RL step does: a rollout, the trainer's log-probs of the sampled tokens, an
update, and sending the new weights to the engine. It needs about a second once the kernels are
compiled. Called by `doctor_checks`.
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
"""Responses of a rollout, and tokens of each response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfTest:
    """Result of the self-test in `dtype` on `device`.

    `differing` of `tokens` log-probs differ between engine and trainer, and `largest` is the
    largest absolute difference. `exact` is true if row identity holds for this dtype and device,
    so that no log-prob may differ.
    """

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
    """Run two rollouts, with an update after each, and compare log-probs of engine and trainer.

    Blocks, so do not call it on the event loop or on the compute thread. Raises EngineError if a
    response has too few tokens, and TrainingError if the gradient is not finite.
    """

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
    differences: list[float] = []
    # The first pass uses the initial weights, the second the weights after an update.
    for version in range(2):
        batch = compute.run(partial(_rollout, engine, version))
        trainer, rollout = backend.compute_log_probs(batch).wait(), batch.rollout_log_probs
        assert rollout is not None
        differences += (trainer.double() - rollout.double())[batch.targets].abs().tolist()
        backend.forward_backward(batch).wait()
        metrics = backend.optim_step().wait()
        if not math.isfinite(metrics.get("actor/grad_norm", math.nan)):
            raise TrainingError(
                f"self-test: the gradient of a model with {MODEL.num_layers} layers is not finite"
            )
        update = backend.publish()
        compute.run(partial(engine.update_weights, update))
    return SelfTest(
        dtype=dtype,
        device=device,
        tokens=len(differences),
        differing=sum(map(bool, differences)),
        largest=max(differences),
        exact=rows_are_exact(dtype, device),
    )


def _rollout(engine: Engine, version: int) -> TrainBatch:
    rng = random.Random(version)
    requests = [
        GenerateRequest(
            request_id=f"{version}-{row}",
            prompt_ids=tuple(rng.randrange(MODEL.vocab_size) for _ in range(3 + 5 * row)),
            params=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
            key=NoiseKey(seed=version, uid=str(row)),
        )
        for row in range(RESPONSES)
    ]
    rows = []
    for request, response in zip(requests, engine.run(requests), strict=True):
        if len(response.token_ids) != TOKENS:
            raise EngineError(
                f"self-test: a response has {len(response.token_ids)} tokens instead of {TOKENS} "
                f"({response.error or response.stop_reason})"
            )
        prompt = len(request.prompt_ids)
        rows.append(
            TrainRow(
                tokens=[*request.prompt_ids, *response.token_ids],
                loss_mask=[0.0] * prompt + [1.0] * TOKENS,
                rollout_log_probs=[0.0] * prompt + list(response.log_probs),
                uid=request.request_id,
            )
        )
    return train_batch(rows)
