"""Finds the token with which a chat template ends an assistant turn.

A base model's tokenizer often has a chat template whose turns end with another token than the
tokenizer's end-of-sequence token (`<|im_end|>` and `<|endoftext|>` in Qwen2.5). SFT teaches the
policy the template's token, so generation must stop at it, too. Knows tokenizers and templates, not
models. Called by `conversation` for loss masks, and by `build.policy` for the policy's end tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from slipstream.data.chat_template import ChatTemplateError, apply_chat_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_QUESTION, _ANSWER, _NEXT = "question 4171", "answer 8263", "question 5309"
"""Texts that no template contains."""

_found: WeakKeyDictionary[Any, dict[str, int | None]] = WeakKeyDictionary()
_told: set[str] = set()


def turn_end(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> int | None:
    """Return the id of the special token that ends an assistant turn of the chat template.

    Several special tokens may follow the text. The tokenizer's end-of-sequence token is preferred,
    and otherwise the last one that also follows a turn in the middle of a conversation. None
    without a template, and if no special token follows the text.
    """
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        return None
    key = repr((template, sorted((template_kwargs or {}).items())))
    known = _found.setdefault(tokenizer, {})
    if key not in known:
        known[key] = _turn_end(tokenizer, dict(template_kwargs or {}))
    return known[key]


def end_token_ids(
    tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """Return the tokenizer's end-of-sequence token and the chat template's `turn_end`.

    Logs a warning, once per template, if a template ends assistant turns without a special token.
    """
    eos, end = tokenizer.eos_token_id, turn_end(tokenizer, template_kwargs)
    template = str(tokenizer.chat_template)
    if tokenizer.chat_template and end is None and template not in _told:
        _told.add(template)
        log.warning(
            "the chat template ends an assistant turn without a special token, so a response "
            "ends only with the tokenizer's eos_token %r; if SFT with this template must teach "
            "the policy to stop, set actor_rollout_ref.model.custom_chat_template to a template "
            "that writes eos_token after the content of an assistant turn",
            tokenizer.eos_token,
        )
    return tuple(dict.fromkeys(int(i) for i in (eos, end) if i is not None))


def _turn_end(tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> int | None:
    turn = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
    following = [*turn, {"role": "user", "content": _NEXT}]
    last = _special_run(tokenizer, _after_answer(tokenizer, turn, template_kwargs))
    middle = _special_run(tokenizer, _after_answer(tokenizer, following, template_kwargs))
    if not last:
        return None
    # After the last turn, templates may write more than a policy generates: Phi-3's writes
    # `<|end|>` and `<|endoftext|>`, of which only the first follows the other turns.
    common = _common_prefix(last, middle) or last[:1]
    eos = tokenizer.eos_token_id
    return int(eos) if eos in common else common[-1]


def _after_answer(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], options: dict[str, Any]
) -> str:
    """Return the text between the assistant's answer and the next message, "" if there is none."""
    options = {"tokenize": False, "add_generation_prompt": False, **options}
    for before in ([], [{"role": "system", "content": "Be brief."}]):
        try:
            text = str(apply_chat_template(tokenizer, [*before, *messages], **options))
        except ChatTemplateError:
            continue  # some templates need a system message
        answer = text.rfind(_ANSWER)
        if answer >= 0:
            return text[answer + len(_ANSWER) :].partition(_NEXT)[0]
    return ""


def _special_run(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the first special tokens in `text` that follow each other directly."""
    ids = [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]] if text else []
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {int(i) for i, token in added.items() if token.special} | set(
        tokenizer.all_special_ids
    )
    # Some tokenizers mark their control tokens as added tokens only.
    for marked in (special, special | {int(i) for i in added}):
        start = next((place for place, i in enumerate(ids) if i in marked), None)
        if start is not None:
            end = next((n for n in range(start, len(ids)) if ids[n] not in marked), len(ids))
            return ids[start:end]
    return []


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> list[int]:
    common: list[int] = []
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        common.append(a)
    return common
