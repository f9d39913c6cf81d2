"""The checks of a request to `/generate`, and what is filled in."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.sampling import BadRequestError, Checked, OutOfVocabularyError

from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

ALL = 1 << 30
"""`top_k` without a limit."""

SAMPLING: Mapping[str, Any] = {
    "n": 1,
    "max_new_tokens": 128,
    "min_new_tokens": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": ALL,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "sampling_seed": None,
    "stop": None,
    "stop_token_ids": None,
    "stop_regex": None,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "stream_interval": None,
    "logit_bias": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "beam_width": None,
    "watermark": None,
    "choice": None,
}
"""The fields of `sampling_params`, with SGLang's values for those that are missing or null."""

PREFERRED: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_p": 0.1}
"""`--preferred-sampling-params` of this server. They replace missing fields, so that a test notices
what a client leaves out."""

ONE_VALUE = (
    "n",
    "min_new_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "custom_params",
    "beam_width",
)
"""Fields for which this server has SGLang's default only."""

EPSILON = 1e-6
SUPPORT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted(Checked):  # type: ignore[misc]
    """A request that can run. `temperature` and `greedy` are what SGLang makes of the settings.
    `support`: the tokens of the truncated distribution are returned."""

    temperature: float
    greedy: bool
    support: bool


def wanted(
    body: Mapping[str, Any],
    rid: str,
    *,
    vocab_size: int,
    context_length: int,
    options: Mapping[str, Any],
) -> Wanted:
    """Check the body of a request. Raises BadRequestError and OutOfVocabularyError."""
    values = _values(body.get("sampling_params") or {})
    prompt = body.get("input_ids")
    if not isinstance(prompt, list) or not prompt or any(type(i) is not int for i in prompt):
        raise BadRequestError(
            "The engine initialized with skip_tokenizer_init=True cannot accept text prompts."
        )
    ids = body.get("token_ids_logprob") or []
    if any(not 0 <= i < vocab_size for i in ids):
        raise BadRequestError("token_ids_logprob contains out-of-vocabulary token id")
    support = bool(body.get("return_sampling_mask"))
    if body.get("sampling_logprobs_mode") is not None and not support:
        raise BadRequestError(
            "sampling_logprobs_mode can only be set when return_sampling_mask=true."
        )
    room = _room(len(prompt), values["max_new_tokens"], context_length)
    temperature, top_k = float(values["temperature"]), values["top_k"]
    if temperature < EPSILON:
        temperature, top_k = 1.0, 1
    if top_k == -1:
        top_k = ALL
    limit = options["sampling_mask_max_tokens"]
    if support and not 1 <= top_k <= limit:
        raise BadRequestError(
            "return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= "
            f"{limit}; got top_k={top_k}. Lower top_k or increase --sampling-mask-max-tokens."
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise OutOfVocabularyError
    seed = 42 if values["sampling_seed"] is None else values["sampling_seed"]
    if not options["enable_deterministic_inference"]:
        # Noise is that of the server.
        seed = int.from_bytes(os.urandom(7))
    params = SamplingParams(
        max_tokens=room,
        temperature=0.0 if top_k == 1 else temperature,
        top_k=top_k if top_k < vocab_size else -1,
        top_p=values["top_p"],
        min_p=values["min_p"],
        # `ignore_eos` ignores these, too.
        stop_token_ids=() if values["ignore_eos"] else tuple(values["stop_token_ids"] or ()),
        ignore_eos=values["ignore_eos"],
    )
    request = GenerateRequest(
        request_id=rid,
        prompt_ids=tuple(prompt),
        params=params,
        key=NoiseKey(seed=seed, uid=""),
    )
    return Wanted(
        request,
        body.get("cache_salt") or "",
        list(ids),
        body.get("top_logprobs_num") or 0,
        temperature=temperature,
        greedy=top_k == 1,
        support=support,
    )


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of `sampling_params`."""
    values = {**SAMPLING, **PREFERRED}
    values |= {name: SAMPLING[name] if v is None else v for name, v in given.items()}
    for name in ONE_VALUE:
        if values[name] != SAMPLING[name]:
            raise BadRequestError(f"this contract server has no {name}, got {values[name]!r}")
    _check_values(values)
    return values


def _room(count: int, most: int, context_length: int) -> int:
    """The largest number of new tokens after a prompt of `count` tokens."""
    if count >= context_length:
        raise BadRequestError(
            f"The input ({count} tokens) is longer than the model's context length "
            f"({context_length} tokens)."
        )
    if count + most > context_length:
        raise BadRequestError(
            "Requested token count exceeds the model's maximum context length of "
            f"{context_length} tokens."
        )
    # The scheduler keeps one token of the context free, and the request another one.
    if count >= context_length - 6:
        raise BadRequestError(
            f"Input length ({count} tokens) exceeds the maximum allowed length "
            f"({context_length - 6} tokens)."
        )
    return max(0, min(most, context_length - 2 - count))


def _check_values(values: Mapping[str, Any]) -> None:
    temperature = values["temperature"]
    if not math.isfinite(temperature) or temperature < 0:
        raise BadRequestError(
            f"temperature must be a non-negative finite number, got {temperature}."
        )
    if not 0 < values["top_p"] <= 1:
        raise BadRequestError(f"top_p must be in (0, 1], got {values['top_p']}.")
    if not 0 <= values["min_p"] <= 1:
        raise BadRequestError(f"min_p must be in [0, 1], got {values['min_p']}.")
    if values["top_k"] < 1 and values["top_k"] != -1:
        raise BadRequestError(f"top_k must be -1 (disable) or at least 1, got {values['top_k']}.")
    if values["max_new_tokens"] < 0:
        raise BadRequestError(f"max_new_tokens must be at least 0, got {values['max_new_tokens']}.")
    seed = values["sampling_seed"]
    if seed is not None and not -(2**63) <= seed <= 2**63 - 1:
        raise BadRequestError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}.")
    for name in ("stop", "stop_regex"):
        if values[name]:
            raise BadRequestError(
                f"{name}={values[name]!r} is unavailable when skip_tokenizer_init=True "
                "(requires tokenizer to decode tokens to text for matching)."
            )
