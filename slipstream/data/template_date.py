"""Fixes the date that chat templates write, so that a resumed run has the same prompts.

Templates of Llama 3.1 to 3.3 and others call transformers' function `strftime_now`. Knows
tokenizers, not runs. Called with the date of a run's first start.
"""

from __future__ import annotations

import datetime
import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from transformers.utils.chat_template_utils import _compile_jinja_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLOCK = "strftime_now"
"""The only function of transformers' templates that depends on the time."""


def reads_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a chat template of the tokenizer asks for the time."""
    return any(_dated_templates(tokenizer))


def set_template_date(tokenizer: PreTrainedTokenizerBase, day: datetime.date | None = None) -> None:
    """Let the tokenizer's chat templates see `day`, at midnight, as the current time; None: now.

    This also holds for other tokenizers of this process with the same template text, because
    transformers compiles a template only once. So code of the user that calls
    `tokenizer.apply_chat_template` gets the same date.
    """
    for template in _dated_templates(tokenizer):
        variables = _compile_jinja_template(template).globals
        variables.pop(_CLOCK, None)  # transformers' own function is in the map below
        if day is not None:
            variables[_CLOCK] = functools.partial(_formatted, day)


def today() -> datetime.date:
    """Return the local date, as transformers' templates do."""
    return datetime.datetime.now().date()


def _formatted(day: datetime.date, form: str) -> str:
    return datetime.datetime.combine(day, datetime.time()).strftime(form)


def _dated_templates(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    found = getattr(tokenizer, "chat_template", None)
    for template in found.values() if isinstance(found, Mapping) else [found]:
        if isinstance(template, str) and _CLOCK in template:
            yield template
