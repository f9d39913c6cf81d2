"""Converts conversations to token ids, with spans per turn and a loss mask.

Works with any Hugging Face tokenizer whose chat template is prefix-preserving: the text of the
first turns must be a prefix of the text of the whole conversation. With loss on the last turn
alone, every template works. Pure functions; knows nothing of files or training. Called by `sft`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from slipstream.data.chat_template import ChatTemplateError, apply_chat_template
from slipstream.data.end_tokens import turn_end
from slipstream.data.messages import with_text
from slipstream.data.template_check import check_conversation_renders
from slipstream.errors import ConfigError, DataError
from slipstream.types import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SFTTruncation = Literal["error", "left", "right"]

_TURN = "assistant text"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """Tokens `[start, end)` of a conversation, which belong to one role.

    `role` is "prompt" for everything before the first assistant turn. Header tokens that the
    template writes before an assistant turn belong to the preceding span, as in a rollout. The loss
    covers `[start, loss_end)`. In an assistant turn it ends after the token that ends the turn
    (`end_tokens.turn_end`, else the end-of-sequence token), because a policy never samples the
    tokens that a template adds after it. Without loss `loss_end` equals `start`.
    """

    role: str
    start: int
    end: int
    loss_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedConversation:
    """A conversation as tokens. `spans` cover `ids` without gaps; `loss_mask` is equally long."""

    ids: list[int]
    loss_mask: list[float]
    spans: list[TurnSpan]


def compute_loss_mask(length: int, spans: Sequence[TurnSpan]) -> list[float]:
    """Return `length` entries: 1.0 for tokens in `[start, loss_end)` of a span, 0.0 elsewhere.

    Raises DataError for spans that are out of range, out of order, or overlap.
    """
    mask = [0.0] * length
    previous_end = 0
    for number, span in enumerate(spans):
        if not previous_end <= span.start <= span.loss_end <= span.end <= length:
            raise DataError(
                f"loss spans: span {number} ({span}) is out of order or out of range; spans must "
                f"follow each other inside 0 to {length} with start <= loss_end <= end"
            )
        mask[span.start : span.loss_end] = [1.0] * (span.loss_end - span.start)
        previous_end = span.end
    return mask


def tokenize_conversation(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    truncation: SFTTruncation = "error",
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    ignore_input_ids_mismatch: bool = False,
) -> TokenizedConversation:
    """Render and tokenize a conversation. Only assistant turns have loss.

    A message may have a key `loss_mask` (0 or 1, as in verl); 0 excludes an assistant turn from the
    loss. The ids are those of the whole text. If a token crosses the boundary of a turn, it is an
    error unless `ignore_input_ids_mismatch`; then turns are tokenized one by one, as in a rollout.
    `max_length` is in tokens. For a longer conversation, `truncation` keeps its end (`left`), keeps
    its start (`right`), or raises (`error`). Raises DataError that names the turn.
    """
    with_loss = _turns_with_loss(messages)
    messages = [with_text(m, f"conversation turn {turn}") for turn, m in enumerate(messages)]
    end = turn_end(tokenizer, template_kwargs)
    pieces = _pieces(messages, with_loss, tokenizer, tools, dict(template_kwargs or {}), end)
    check_conversation_renders(
        tokenizer, messages, "conversation", tools=tools, template_kwargs=template_kwargs
    )
    ids: list[int] = []
    spans: list[TurnSpan] = []
    encoded = _encode_pieces(pieces, tokenizer, ignore_mismatch=ignore_input_ids_mismatch)
    for piece, piece_ids in zip(pieces, encoded, strict=True):
        start = len(ids)
        ids.extend(piece_ids)
        loss = _loss_length(piece_ids, tokenizer, end) if piece.turn in with_loss else 0
        spans.append(TurnSpan(role=piece.role, start=start, end=len(ids), loss_end=start + loss))
    return _finish(ids, spans, max_length, truncation)


def tokenize_text_pair(
    prompt: str,
    response: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None = None,
    truncation: SFTTruncation = "error",
) -> TokenizedConversation:
    """Tokenize plain text without a chat template. The response and the end token have loss."""
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end-of-sequence token: set its eos_token")
    context = [int(i) for i in tokenizer(prompt)["input_ids"]]
    pieces = [_Piece("prompt", prompt, None), _Piece("assistant", response, 1)]
    _, answer = _encode_pieces(pieces, tokenizer, ignore_mismatch=True)
    target = [*answer, int(tokenizer.eos_token_id)]
    start, end = len(context), len(context) + len(target)
    spans = [
        TurnSpan(role="prompt", start=0, end=start, loss_end=0),
        TurnSpan(role="assistant", start=start, end=end, loss_end=end),
    ]
    return _finish([*context, *target], spans, max_length, truncation)


def _finish(
    ids: list[int], spans: list[TurnSpan], max_length: int | None, truncation: SFTTruncation
) -> TokenizedConversation:
    if truncation not in ("error", "left", "right"):
        raise ConfigError(f"unknown SFT truncation {truncation!r}; use error, left or right")
    conversation = TokenizedConversation(
        ids=ids, loss_mask=compute_loss_mask(len(ids), spans), spans=spans
    )
    if max_length is None:
        return conversation
    return _truncate(conversation, max_length, truncation)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Text of one role. `turn` is the index of the assistant message, else None."""

    role: str
    text: str
    turn: int | None


def _turns_with_loss(messages: Sequence[Message]) -> set[int]:
    """Return the indices of the assistant messages with loss; validates roles and loss masks."""
    if not messages:
        raise DataError("conversation: no messages")
    out: set[int] = set()
    for turn, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise DataError(
                f"conversation turn {turn}: a message needs a text 'role', got {role!r}"
            )
        override = message.get("loss_mask")
        if override not in (None, 0, 1):
            raise DataError(f"conversation turn {turn}: loss_mask must be 0 or 1, got {override!r}")
        if role != "assistant" and override == 1:
            raise DataError(
                f"conversation turn {turn}: loss_mask 1 on a message with role {role!r}; only "
                "assistant turns can have loss"
            )
        if role == "assistant" and override != 0:
            out.add(turn)
    if messages[0]["role"] == "assistant":
        raise DataError(
            "conversation turn 0 is an assistant turn, so it has no prompt; "
            "start with a system or user message"
        )
    if not out:
        raise DataError(
            "conversation: no assistant turn has loss, so there is nothing to learn; "
            "add an assistant message or remove its loss_mask 0"
        )
    return out


def _pieces(
    messages: Sequence[Message],
    with_loss: Set[int],
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: dict[str, Any],
    turn_end: int | None,
) -> list[_Piece]:
    """Return the conversation's text, split wherever an assistant turn begins or ends.

    If the template changes earlier turns, the text is split only where a turn with loss begins or
    ends, and ends with the last of them.
    """
    plain = [{k: v for k, v in m.items() if k != "loss_mask"} for m in messages]

    def render(count: int, *, generation_prompt: bool) -> str:
        try:
            return str(
                apply_chat_template(
                    tokenizer,
                    plain[:count],
                    tools=list(tools) if tools else None,
                    tokenize=False,
                    add_generation_prompt=generation_prompt,
                    **template_kwargs,
                )
            )
        except ChatTemplateError as error:
            raise ChatTemplateError(
                f"the chat template failed on the first {count} messages ({error}); remove the "
                "conversation, or set actor_rollout_ref.model.custom_chat_template"
            ) from error

    turns = [turn for turn, m in enumerate(plain) if m["role"] == "assistant"]
    try:
        return _split(plain, turns, render)
    except _NotPrefixError as error:
        end = None if turn_end is None else str(tokenizer.convert_ids_to_tokens(turn_end))
        try:
            return _split(plain[: max(with_loss) + 1], sorted(with_loss), render, end)
        except _NotPrefixError:
            raise error from None


class _NotPrefixError(DataError):
    """The text of the first turns is not a prefix of a longer conversation's text."""


def _split(
    messages: Sequence[Message],
    turns: Sequence[int],
    render: Callable[..., str],
    turn_end: str | None = None,
) -> list[_Piece]:
    """Split the text where the assistant's `turns` begin and end.

    Text after `turn_end` in a turn, such as a newline or a token that ends the conversation, is not
    part of the turn. Raises _NotPrefixError if the template changes text before a turn.
    """
    pieces: list[_Piece] = []
    text = ""
    since = 0
    for turn in turns:
        opened = _extend(text, render(turn, generation_prompt=True), turn, "generation prompt")
        closed = _extend(opened, render(turn + 1, generation_prompt=False), turn, _TURN)
        if turn_end is not None and turn < turns[-1]:
            place = closed.rfind(turn_end, len(opened))
            closed = closed if place < 0 else closed[: place + len(turn_end)]
        if len(opened) > len(text):
            pieces.append(_Piece(_author(messages, since, turn), opened[len(text) :], None))
        pieces.append(_Piece("assistant", closed[len(opened) :], turn))
        text, since = closed, turn + 1
    if since < len(messages):
        last = len(messages) - 1
        whole = _extend(text, render(len(messages), generation_prompt=False), last, "text")
        pieces.append(_Piece(_author(messages, since, len(messages)), whole[len(text) :], None))
    return pieces


def _author(messages: Sequence[Message], since: int, turn: int) -> str:
    """Return the role of the text between two assistant turns: the role of its first message."""
    if since == 0:
        return "prompt"
    return str(messages[since]["role"]) if since < turn else "template"


def _extend(before: str, after: str, turn: int, what: str) -> str:
    if not after.startswith(before):
        common = next(
            (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
            min(len(before), len(after)),
        )
        # A generation prompt may open a block of reasoning that a turn without reasoning lacks.
        option = (
            "data.apply_chat_template_kwargs={enable_thinking: false} if the template has this "
            "option"
            if what == _TURN
            else "loss_mask 0 in all assistant messages but the last, which alone has loss then"
        )
        raise _NotPrefixError(
            f"chat template is not prefix-preserving: with the {what} of turn {turn} the text of "
            f"the earlier turns changes at character {common} ({before[common : common + 30]!r} "
            f"becomes {after[common : common + 30]!r}). Per-turn loss masks need a template that "
            "only appends (many templates drop reasoning from earlier turns): set "
            f"actor_rollout_ref.model.custom_chat_template, or {option}"
        )
    return after


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    # The template already wrote all special tokens.
    return [int(i) for i in tokenizer(text, add_special_tokens=False)["input_ids"]]


def _loss_length(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, turn_end: int | None
) -> int:
    """Return the length of an assistant turn up to the last token that ends it."""
    for end in (turn_end, tokenizer.eos_token_id):
        for place in range(len(ids) - 1, -1, -1):
            if end is not None and ids[place] == end:
                return place + 1
    return len(ids)


def _encode_pieces(
    pieces: Sequence[_Piece], tokenizer: PreTrainedTokenizerBase, *, ignore_mismatch: bool
) -> list[list[int]]:
    """Return the token ids of each piece, as in a rollout.

    They are the ids of the whole text, if no token crosses a boundary of pieces. Raises DataError
    otherwise, unless `ignore_mismatch`; then each piece is tokenized on its own.
    """
    whole = _encode(tokenizer, "".join(piece.text for piece in pieces))
    alone = [_encode(tokenizer, piece.text) for piece in pieces]
    if [i for ids in alone for i in ids] == whole:
        return alone
    # Metaspace tokenizers write a space before the first word of a text, so a piece has other ids
    # alone than within the text.
    found: list[list[int]] = []
    text, done = "", 0
    for piece in pieces:
        text += piece.text
        until = _encode(tokenizer, text)
        if until != whole[: len(until)]:
            break
        found.append(until[done:])
        done = len(until)
    if len(found) == len(pieces):
        return found
    if ignore_mismatch:
        return [alone[0], *(_encode_after_text(tokenizer, piece.text) for piece in pieces[1:])]
    raise DataError(
        f"tokenizing turn by turn differs from tokenizing the whole conversation in part "
        f"{len(found)} (role {pieces[len(found)].role!r}): a token crosses the boundary between "
        f"its end and the next part. Rollouts use the turn-by-turn ids; set "
        "sft.ignore_input_ids_mismatch=true to train on them"
    )


def _encode_after_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text that does not begin a conversation, if the tokenizer shows them."""
    before, both = _encode(tokenizer, "\n"), _encode(tokenizer, f"\n{text}")
    return both[len(before) :] if both[: len(before)] == before else _encode(tokenizer, text)


def _truncate(
    conversation: TokenizedConversation, max_length: int, truncation: SFTTruncation
) -> TokenizedConversation:
    if max_length < 2:
        raise ConfigError(
            f"max_length {max_length} must be at least 2: one token of context and one with loss"
        )
    length = len(conversation.ids)
    if length <= max_length:
        return conversation
    if truncation == "error":
        raise DataError(
            f"conversation of {length} tokens is longer than max_length {max_length}: raise "
            "sft.max_length, or remove such conversations"
        )
    low, high = (0, max_length) if truncation == "right" else (length - max_length, length)
    spans = []
    for span in conversation.spans:
        start, end = max(span.start, low), min(span.end, high)
        if start < end:
            loss_end = min(max(span.loss_end, start), end)
            spans.append(replace(span, start=start - low, end=end - low, loss_end=loss_end - low))
    mask = compute_loss_mask(max_length, spans)
    if not any(mask[1:]):
        raise DataError(
            f"truncating a conversation of {length} tokens to max_length {max_length} "
            f"({truncation}) leaves no token with loss: raise sft.max_length"
        )
    return TokenizedConversation(ids=conversation.ids[low:high], loss_mask=mask, spans=spans)
