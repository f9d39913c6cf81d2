"""verl's module `verl.utils.tokenizer`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slipstream.data.tokenizer import load_tokenizer

__all__ = ["hf_processor", "hf_tokenizer", "set_pad_token_id"]


def hf_tokenizer(
    name_or_path: str | Path,
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    **kwargs: Any,
) -> Any:
    """Return the tokenizer of a folder or of a Hugging Face name.

    With `correct_pad_token`, a tokenizer without a padding token pads with its end token.
    `correct_gemma2` is accepted and unused: end tokens come from the model's files. The only
    further keyword is `trust_remote_code`. Raises DataError if there is no tokenizer.
    """
    tokenizer = load_tokenizer(name_or_path, **kwargs)
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def hf_processor(name_or_path: str | Path, **kwargs: Any) -> Any:
    """Return None, as verl does for models that read only text. All models here read only text."""
    return None


def set_pad_token_id(tokenizer: Any) -> None:
    """Set the end token as the padding token of a tokenizer that has none."""
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
