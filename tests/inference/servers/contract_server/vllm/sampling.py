"""The checks of a request to `/inference/v1/generate`, and what is filled in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.types import GenerateRequest, NoiseKey, SamplingParams

NEUTRAL: Mapping[str, Any] = {
    "n": 1,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": [],
}
"""Fields for which this server has one value only, which is vLLM's default."""

FILLED_IN: Mapping[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 5,
    "min_p": 0.1,
    "ignore_eos": False,
    "stop_token_ids": [],
    "logprobs": None,
    "logprob_token_ids": None,
    "detokenize": True,
    "seed": None,
}
"""Values of fields that a request lacks. vLLM's are neutral unless the model's
`generation_config.json` has others. These are such others, so that a test notices what a client
leaves out."""

MOST_LOG_PROBS = 20
MOST_LOG_PROB_IDS = 128


class BadRequestError(Exception):
    """A request that is answered with 400."""


class OutOfVocabularyError(Exception):
    """A token id that vLLM's embedding does not have."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A request that can run. `top` is the number of entries in `top_logprobs`; None: no log-probs
    are returned."""

    request: GenerateRequest
    salt: str
    token_ids: list[int]
    top: int | None


def checked(body: Mapping[str, Any], name: str, *, vocab_size: int, max_model_len: int) -> Checked:
    """Check the body of a request. Raises BadRequestError and OutOfVocabularyError.

    vLLM ignores unknown fields of `sampling_params`. Here they are errors, so that a misspelled
    field is noticed.
    """
    given = body.get("sampling_params")
    if not isinstance(given, dict):
        raise BadRequestError("body.sampling_params: Field required")
    if unknown := set(given) - set(NEUTRAL) - set(FILLED_IN) - {"max_tokens"}:
        raise BadRequestError(f"unknown sampling_params: {', '.join(sorted(unknown))}")
    values = {**NEUTRAL, **FILLED_IN, **given}
    for field, only in NEUTRAL.items():
        if values[field] != only:
            raise BadRequestError(f"this server has no {field} but {only}, got {values[field]}")
    prompt = body.get("token_ids")
    if not isinstance(prompt, list) or not prompt or any(type(i) is not int for i in prompt):
        raise BadRequestError("token_ids must be a list of integers, at least one")
    if min(prompt) < 0:
        raise BadRequestError("token_ids must not contain negative values")
    if len(prompt) >= max_model_len:
        raise BadRequestError(f"{len(prompt)} tokens of input, of {max_model_len} in all")
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= 1024):
        raise BadRequestError("cache_salt must be a string of 1 to 1024 characters")
    _check_values(values, vocab_size)
    if max(prompt) >= vocab_size:
        raise OutOfVocabularyError
    # vLLM 0.32 cuts `max_tokens` on this route to what the context allows, without an error.
    room = max_model_len - len(prompt)
    most = given.get("max_tokens", room)
    if type(most) is not int or most < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {most}")
    temperature = values["temperature"]
    seed = int.from_bytes(os.urandom(7)) if values["seed"] is None else values["seed"]
    params = SamplingParams(
        max_tokens=min(most, room),
        temperature=max(temperature, 0.01) if temperature > 0 else 0.0,
        top_k=values["top_k"],
        top_p=values["top_p"],
        min_p=values["min_p"],
        stop_token_ids=tuple(values["stop_token_ids"]),
        ignore_eos=values["ignore_eos"],
    )
    request = GenerateRequest(
        request_id=name,
        prompt_ids=tuple(prompt),
        params=params,
        key=NoiseKey(seed=seed, uid=""),
    )
    return Checked(request, salt or "", values["logprob_token_ids"] or [], values["logprobs"])


def _check_values(values: Mapping[str, Any], vocab_size: int) -> None:
    if not 0 <= values["temperature"] <= 2:
        raise BadRequestError(f"temperature must be in [0, 2], got {values['temperature']}.")
    if not 0 < values["top_p"] <= 1:
        raise BadRequestError(f"top_p must be in (0, 1], got {values['top_p']}.")
    if values["top_k"] < -1:
        raise BadRequestError(f"top_k must be 0 (disable), or at least 1, got {values['top_k']}.")
    if not 0 <= values["min_p"] <= 1:
        raise BadRequestError(f"min_p must be in [0, 1], got {values['min_p']}.")
    if any(not 0 <= i < vocab_size for i in values["stop_token_ids"]):
        raise BadRequestError("stop_token_ids contain out-of-vocab token ids")
    count, ids = values["logprobs"], values["logprob_token_ids"]
    if count is not None and not 0 <= count <= MOST_LOG_PROBS:
        raise BadRequestError(f"Requested sample logprobs of {count}, at most {MOST_LOG_PROBS}")
    if ids is not None:
        if len(ids) > MOST_LOG_PROB_IDS or any(not 0 <= i < vocab_size for i in ids):
            raise BadRequestError("logprob_token_ids: too many, or out-of-vocab token ids")
        if count is not None and count != len(ids):
            raise BadRequestError("logprobs must equal len(logprob_token_ids)")
