"""Renders chat templates, which come from a model's folder and can do anything but end well.

A template that fails raises `ChatTemplateError`, whatever it raised itself. A template that does
not end raises DataError: a loop is stopped by a limit on processor time, and what cannot be stopped
(a power of 10 million digits, a text that fills the memory) is found before by a trial in a process
with limits. Knows nothing of data sets. Called by whatever turns messages into tokens.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.deadlines import CpuLimitError, cpu_limit
from slipstream.errors import DataError, SlipstreamError
from slipstream.reading import reason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIMIT_S = 30.0
"""Seconds of processor time for one conversation. Ordinary templates need less than 0.01 s."""

MOST_CHARACTERS = 1_000_000
"""The longest templates of published models have about 20,000 characters."""

_TRIAL_S, _TRIAL_BYTES, _TRIAL_WALL_S = 20, 1 << 30, 600
_REMEDY = "set actor_rollout_ref.model.custom_chat_template to a Jinja template that works"
_LATE = 9

_TRIAL = f"""
import json, resource, sys
resource.setrlimit(resource.RLIMIT_CPU, ({_TRIAL_S}, {_TRIAL_S}))
resource.setrlimit(resource.RLIMIT_AS, ({_TRIAL_BYTES}, {_TRIAL_BYTES}))
import jinja2, jinja2.ext, jinja2.sandbox

class Generation(jinja2.ext.Extension):
    tags = {{"generation"}}
    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)

def fails(message):
    raise jinja2.TemplateError(message)

try:
    given = json.load(sys.stdin)
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False)
    environment.globals.update(raise_exception=fails, strftime_now=lambda form: form)
    template = environment.from_string(given["template"])
    for messages in given["conversations"]:
        for more in (True, False):
            try:
                template.render(
                    messages=messages, add_generation_prompt=more, tools=None,
                    bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>",
                )
            except MemoryError:
                raise
            except Exception:
                pass
except MemoryError:
    sys.exit({_LATE})
except Exception:
    pass
"""

_CONVERSATIONS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "1+1?"},
    ],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}],
]


class ChatTemplateError(DataError):
    """A chat template failed on a conversation."""


def check_chat_template(template: object, source: str) -> None:
    """Raise DataError if the template is not text, is too long, or does not end.

    `source` names the tokenizer in the message. A template that fails on the trial conversations is
    accepted: it may need others.
    """
    named = template if isinstance(template, Mapping) else {"chat_template": template}
    for name, text in named.items():
        if text is None:
            continue
        if not isinstance(text, str):
            raise DataError(
                f"{source}: chat_template is {type(text).__name__}, not text; {_REMEDY}"
            )
        if len(text) > MOST_CHARACTERS:
            raise DataError(
                f"{source}: chat_template has {len(text)} characters, more than "
                f"{MOST_CHARACTERS}; {_REMEDY}"
            )
        if not _ends(text):
            raise DataError(
                f"{source}: {name} does not end: rendering a short conversation takes more than "
                f"{_TRIAL_S} s or {_TRIAL_BYTES >> 30} GiB; {_REMEDY}"
            )


@functools.lru_cache(maxsize=64)
def _ends(template: str) -> bool:
    """Return whether the template renders short conversations within limits, or fails on them."""
    given = json.dumps({"template": template, "conversations": _CONVERSATIONS})
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-c", _TRIAL],
            input=given.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TRIAL_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    # A negative status is the signal that ended it.
    return ended.returncode not in (_LATE, -9, -24, -11)


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any], **options: Any
) -> list[int]:
    """Return the token ids of a conversation, with the generation prompt at its end.

    Raises the errors of `apply_chat_template`.
    """
    ids = apply_chat_template(
        tokenizer, messages, add_generation_prompt=True, tokenize=True, return_dict=False, **options
    )
    return [int(i) for i in ids]


def apply_chat_template(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Any], **options: Any
) -> Any:
    """Return `tokenizer.apply_chat_template(messages, **options)`.

    Raises ChatTemplateError if it fails, and DataError if it does not end.
    """
    try:
        with cpu_limit(LIMIT_S):
            return tokenizer.apply_chat_template(messages, **options)
    except SlipstreamError:
        raise
    except CpuLimitError as error:
        raise DataError(
            f"the chat template does not end: one conversation takes more than {LIMIT_S:g} s; "
            f"{_REMEDY}"
        ) from error
    except Exception as error:  # the template calls methods of values, which may raise anything
        raise ChatTemplateError(f"{reason(error)}") from error
