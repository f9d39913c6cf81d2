"""Tiny policies, engines and requests for the engine tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from slipstream.inference.engine import Engine, EngineSettings
from slipstream.inference.engine.kv_blocks import BlockStore
from slipstream.inference.speculation.plan import OFF, DraftPlan
from slipstream.inference.speculation.protocol import Proposer
from slipstream.inference.speculation.selector import StrategySelector
from slipstream.models import Decoder, ModelConfig
from slipstream.types import (
    GenerateRequest,
    Generation,
    KVPolicy,
    NoiseKey,
    SamplingParams,
    WeightUpdate,
)

VOCAB = 64
EOS = 2


def make_decoder(seed: int = 0, *, eos: int | None = None, **sizes: Any) -> Decoder:
    """A decoder whose next-token distributions are neither flat nor peaked."""
    values: dict[str, Any] = {
        "family": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2304,
        "eos_token_id": eos,
    }
    decoder = Decoder(ModelConfig(**{**values, **sizes}))
    decoder.init_weights(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return decoder


@cache
def shared_decoder(eos: int | None = None) -> Decoder:
    """A decoder that is shared by the tests that do not update weights."""
    return make_decoder(eos=eos)


def make_engine(
    decoder: Decoder | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    proposer: Proposer | None = None,
    plan: DraftPlan = OFF,
    selector: StrategySelector | None = None,
    aux_layers: tuple[int, ...] = (),
    **settings: Any,
) -> Engine:
    settings.setdefault("max_model_len", 2304)
    return Engine(
        decoder or shared_decoder(),
        EngineSettings(dtype=dtype, **settings),
        decode=decode,
        proposer=proposer,
        plan=plan,
        selector=selector,
        aux_layers=aux_layers,
    )


def decode(ids: list[int]) -> str:
    """Turn ids into text: token 0 is empty, tokens 1 to 26 are letters, the others digits."""
    return "".join("" if i == 0 else chr(96 + i) if i < 27 else str(i % 10) for i in ids)


def params(max_tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **more)


def make_request(
    name: str,
    prompt: Sequence[int] = (3, 4, 5),
    *,
    prior: Sequence[int] = (),
    hidden: bool = False,
    seed: int = 0,
    **settings: Any,
) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        prior_ids=tuple(prior),
        params=params(**settings),
        key=NoiseKey(seed=seed, uid=name),
        return_hidden_states=hidden,
    )


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def mixed_requests(
    count: int = 10, *, seed: int = 0, longest: int = 70, tokens: int = 30
) -> list[GenerateRequest]:
    """Requests with various prompt lengths, token limits and sampling settings.

    Prompts have fewer than `longest` tokens, responses fewer than `tokens`.
    """
    rng = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_p": 0.8},
        {"top_k": 5, "temperature": 1.3},
        {"min_p": 0.05},
    ]
    return [
        make_request(
            f"r{i}",
            random_prompt(rng, rng.randrange(1, longest)),
            max_tokens=rng.randrange(2, tokens),
            **kinds[i % len(kinds)],
        )
        for i in range(count)
    ]


Bits = tuple[list[int], list[float], list[float]]


def bits(generation: Generation) -> Bits:
    """The values of a generation that must be equal to the last bit."""
    return generation.token_ids, generation.log_probs, generation.sampling_log_probs


def all_bits(generations: Sequence[Generation]) -> dict[str, Bits]:
    """`bits` of several generations by request id."""
    return {g.request_id: bits(g) for g in generations}


def update_from(
    decoder: Decoder, version: int, *, kv_policy: KVPolicy = KVPolicy.KEEP
) -> WeightUpdate:
    """An update with the weights of `decoder`, in two buckets."""
    tensors = [(n, p.detach().clone()) for n, p in decoder.named_parameters()]
    half = len(tensors) // 2
    return WeightUpdate(
        version=version, buckets=[tensors[:half], tensors[half:]], kv_policy=kv_policy
    )


def drain(engine: Engine) -> list[Generation]:
    """Step until all requests have ended."""
    done = []
    while engine.has_work():
        done += engine.step()
    return done


def trainer_log_probs(
    decoder: Decoder, dtype: torch.dtype, request: GenerateRequest, generation: Generation
) -> list[float]:
    """Log-probs of the response tokens, from a padded forward pass without a KV cache as in
    training."""
    ids = [*request.prompt_ids, *request.prior_ids, *generation.token_ids]
    width = -(-len(ids) // 16) * 16
    row = torch.tensor(ids + [0] * (width - len(ids)))
    with torch.no_grad():
        packed = decoder.pack(dtype)
        hidden = packed.forward(row[None], torch.arange(width)[None]).final[0]
        logits = packed.lm_head(hidden).float()
        temperature = request.params.temperature or 1.0
        log_probs = torch.log_softmax(logits / torch.full((), temperature), -1)
    first = len(ids) - len(generation.token_ids)
    return [log_probs[t - 1, ids[t]].item() for t in range(first, len(ids))]


def spoil(engine: Engine, row: int) -> None:
    """Overwrite the keys and values of a row with NaN."""
    store = engine._scheduler.store
    assert isinstance(store, BlockStore)
    with torch.inference_mode():
        for block in store._rows[row]:
            store._memory[block].fill_(float("nan"))
