"""SFT samples have the right token ids and loss masks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from slipstream.data.countdown import CountdownTask
from slipstream.data.rows import count_rows
from slipstream.data.sft import (
    TurnSpan,
    compute_loss_mask,
    load_sft_samples,
    sft_samples,
    tokenize_conversation,
    tokenize_text_pair,
)
from slipstream.data.tokenizer import build_tokenizer
from slipstream.errors import ConfigError, DataError
from slipstream.types import Message, Status
from tests.data.helpers import (
    CHATML,
    STYLES,
    byte_tokenizer,
    char_tokenizer,
    ids,
    metaspace_tokenizer,
)

CHAT: list[Message] = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "bc"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e"},
    {"role": "tool", "content": "f"},
    {"role": "assistant", "content": "gh"},
]
TEXT = (
    "<s>system:S<e>\n<s>user:a<e>\n<s>assistant:bc<e>\n<s>user:d<e>\n<s>assistant:e<e>\n"
    "<s>tool:f<e>\n<s>assistant:gh<e>\n"
)


def with_loss(conversation: Any) -> str:
    """Return the characters with loss; `|` starts each run of them."""
    names = {128: "<s>", 129: "<e>"}
    out, inside = "", False
    for token, mask in zip(conversation.ids, conversation.loss_mask, strict=True):
        if mask and not inside:
            out += "|"
        inside = bool(mask)
        if mask:
            out += names.get(token) or chr(token)
    return out


def test_loss_covers_assistant_turns_up_to_their_end_token() -> None:
    conversation = tokenize_conversation(CHAT, char_tokenizer())
    assert conversation.ids == ids(TEXT)
    assert with_loss(conversation) == "|bc<e>|e<e>|gh<e>"
    assert [s.role for s in conversation.spans] == [
        "prompt",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    edges = [(s.start, s.end) for s in conversation.spans]
    assert edges[0][0] == 0
    assert edges[-1][1] == len(conversation.ids)
    assert all(a[1] == b[0] for a, b in itertools.pairwise(edges))


def test_loss_mask_0_excludes_a_message() -> None:
    chat = [dict(m) for m in CHAT]
    chat[2]["loss_mask"] = 0
    chat[4]["loss_mask"] = 1
    chat[1]["loss_mask"] = 0
    conversation = tokenize_conversation(chat, char_tokenizer())
    assert conversation.ids == ids(TEXT)
    assert with_loss(conversation) == "|e<e>|gh<e>"


def test_an_unanswered_last_turn_has_no_loss() -> None:
    conversation = tokenize_conversation(CHAT[:4], char_tokenizer())
    assert conversation.ids == ids(TEXT[: TEXT.index("<s>assistant:e")])
    assert with_loss(conversation) == "|bc<e>"
    assert conversation.spans[-1].role == "user"


def test_countdown_tokenizer_turns_have_loss() -> None:
    tokenizer = build_tokenizer()
    conversation = tokenize_conversation(
        [
            {"role": "user", "content": "1 2 3 ->5 :"},
            {"role": "assistant", "content": "answer 2 + 3"},
            {"role": "user", "content": "4 5 9 ->1 :"},
            {"role": "assistant", "content": "answer 5 - 4"},
        ],
        tokenizer,
    )
    assert conversation.loss_mask == [0.0] * 5 + [1.0] * 5 + [0.0] * 5 + [1.0] * 5
    assert conversation.ids[9] == conversation.ids[19] == tokenizer.eos_token_id


def test_compute_loss_mask_and_its_checks() -> None:
    first = TurnSpan(role="prompt", start=0, end=2, loss_end=0)
    second = TurnSpan(role="assistant", start=2, end=5, loss_end=4)
    assert compute_loss_mask(6, [first, second]) == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    for bad in (
        [second, first],
        [TurnSpan(role="assistant", start=2, end=7, loss_end=7)],
        [TurnSpan(role="assistant", start=2, end=4, loss_end=5)],
    ):
        with pytest.raises(DataError, match="out of order or out of range"):
            compute_loss_mask(6, bad)


def test_truncation_keeps_start_or_end() -> None:
    tokenizer = char_tokenizer()
    whole = tokenize_conversation(CHAT, tokenizer)
    length = len(whole.ids)
    right = tokenize_conversation(CHAT, tokenizer, max_length=length - 20, truncation="right")
    assert right.ids == whole.ids[:-20]
    assert right.loss_mask == whole.loss_mask[:-20]
    assert right.spans[-1].end == length - 20
    left = tokenize_conversation(CHAT, tokenizer, max_length=20, truncation="left")
    assert left.ids == whole.ids[-20:]
    assert left.loss_mask == whole.loss_mask[-20:]
    assert left.spans[0].start == 0
    exact = tokenize_conversation(CHAT, tokenizer, max_length=length)
    assert exact == whole
    # If an assistant turn is truncated, its remaining tokens keep their loss.
    cut = ids(TEXT).index(ord("b")) + 1
    assert (
        with_loss(tokenize_conversation(CHAT, tokenizer, max_length=cut, truncation="right"))
        == "|b"
    )


def test_truncation_is_validated() -> None:
    tokenizer = char_tokenizer()
    with pytest.raises(DataError, match=r"longer than max_length 10: raise sft\.max_length"):
        tokenize_conversation(CHAT, tokenizer, max_length=10)
    with pytest.raises(DataError, match="leaves no token with loss"):
        tokenize_conversation(CHAT, tokenizer, max_length=10, truncation="right")
    with pytest.raises(ConfigError, match="max_length 1"):
        tokenize_conversation(CHAT, tokenizer, max_length=1)
    with pytest.raises(ConfigError, match="unknown SFT truncation 'mid'"):
        tokenize_conversation(CHAT, tokenizer, truncation="mid")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ([{"content": "x"}], "turn 0: a message needs a text 'role', got None"),
        (CHAT[2:], "turn 0 is an assistant turn"),
        (CHAT[:2], "no assistant turn has loss"),
        ([*CHAT[:2], {**CHAT[2], "loss_mask": 0}], "no assistant turn has loss"),
        (
            [{**CHAT[1], "loss_mask": 1}, CHAT[2]],
            "turn 0: loss_mask 1 on a message with role 'user'",
        ),
        ([CHAT[1], {**CHAT[2], "loss_mask": 0.5}], "turn 1: loss_mask must be 0 or 1, got 0.5"),
    ],
)
def test_invalid_conversations_are_refused(messages: list[Message], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tokenize_conversation(messages, char_tokenizer())


def test_a_template_that_changes_earlier_turns_is_refused() -> None:
    """Some templates drop the reasoning of all assistant turns except the last."""
    forgetful = (
        "{% for m in messages %}<s>{{ m['role'] }}:"
        "{% if m['role'] == 'assistant' and not loop.last %}-{% else %}{{ m['content'] }}"
        "{% endif %}<e>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
    )
    tokenizer = char_tokenizer(forgetful)
    assert with_loss(tokenize_conversation(CHAT[:3], tokenizer)) == "|bc<e>"
    with pytest.raises(DataError, match=r"not prefix-preserving: with the generation .* turn 4"):
        tokenize_conversation(CHAT, tokenizer)


def test_a_generation_prompt_missing_in_turns_is_refused() -> None:
    thinking = CHATML.replace("<s>assistant:{%", "<s>assistant:<think>{%")
    with pytest.raises(DataError, match=r"with the assistant text of turn 2.*enable_thinking"):
        tokenize_conversation(CHAT, char_tokenizer(thinking))


class MergingTokenizer:
    """`char_tokenizer` with a token `:b`, which crosses the boundary of a turn."""

    def __init__(self) -> None:
        self._inner = char_tokenizer()
        self.eos_token_id = self._inner.eos_token_id

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner.apply_chat_template(*args, **kwargs)

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        out: list[int] = []
        for token in ids(text):
            if token == ord("b") and out and out[-1] == ord(":"):
                out[-1] = 500
            else:
                out.append(token)
        return {"input_ids": out}


def test_a_token_across_turns_is_refused_unless_allowed() -> None:
    tokenizer: Any = MergingTokenizer()
    with pytest.raises(DataError, match=r"part 0 .*'prompt'.*sft\.ignore_input_ids_mismatch"):
        tokenize_conversation(CHAT, tokenizer)
    allowed = tokenize_conversation(CHAT, tokenizer, ignore_input_ids_mismatch=True)
    assert allowed.ids == ids(TEXT)


def test_sft_samples_of_the_countdown_task() -> None:
    task, tokenizer = CountdownTask(seed=2), build_tokenizer()
    samples = list(sft_samples(task, tokenizer, 10, 5))
    assert [s.uid for s in samples] == [f"countdown/sft/train/{i}" for i in range(10, 15)]
    for index, sample in enumerate(samples, start=10):
        user, assistant = task.demonstration("train", index)
        assert tokenizer.decode(sample.tokens) == f"{user['content']} {assistant['content']} <eos>"
        # The prompt has the same tokens as in a rollout.
        assert sample.prompt_ids == task.prompt("train", index).ids
        assert sample.loss_mask == [0.0] * len(sample.prompt_ids) + [1.0] * sample.response_length
        assert sample.response == assistant["content"]
        assert sample.prompt == [user]
        assert sample.status is Status.COMPLETED
        assert sample.versions == [-1] * len(sample.tokens)
    assert list(sft_samples(task, tokenizer, 12, 1)) == samples[2:3]
    held_out = next(iter(sft_samples(task, tokenizer, 0, 1, split="held_out")))
    assert held_out.prompt_ids == task.prompt("held_out", 0).ids


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows))
    return path


def test_load_sft_samples_from_conversations_and_pairs(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        [
            {"messages": CHAT, "data_source": "chat"},
            {"prompt": CHAT[:2], "response": "bc"},
            {"prompt": "12", "response": "34"},
        ],
    )
    chat, pair, text = load_sft_samples(path, char_tokenizer())
    assert chat.tokens == ids(TEXT)
    assert (chat.uid, chat.data_source, chat.response) == ("a.jsonl:0", "chat", "gh")
    assert chat.prompt == CHAT[:2]
    assert sum(chat.loss_mask) == 8
    assert pair.tokens == chat.tokens[: len(pair.tokens)]
    assert pair.loss_mask == chat.loss_mask[: len(pair.tokens)]
    assert text.tokens == [*ids("1234"), 129]
    assert text.loss_mask == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert text.response == "34"


def test_load_sft_samples_reads_entries_of_columns(tmp_path: Path) -> None:
    rows = [{"extra": {"question": "12", "answer": {"text": "34"}}}]
    path = write(tmp_path / "a.jsonl", rows)
    keys: dict[str, Any] = {"prompt_key": "extra.question", "response_key": "extra.answer.text"}
    (plain,) = load_sft_samples(path, char_tokenizer(), **keys)
    assert plain.tokens == [*ids("1234"), 129]
    (wrapped,) = load_sft_samples(path, char_tokenizer(), wrap_prompts=True, **keys)
    assert wrapped.tokens == ids("<s>user:12<e>\n<s>assistant:34<e>\n")
    assert wrapped.loss_mask.count(1.0) == 3
    keys["response_key"] = "extra.answer.none"
    with pytest.raises(DataError, match=r"'extra.answer.none'"):
        load_sft_samples(path, char_tokenizer(), **keys)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_rows_are_counted_in_every_format(tmp_path: Path, suffix: str) -> None:
    path, rows = tmp_path / f"a{suffix}", [{"messages": CHAT[:3]}] * 3
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text(
            json.dumps(rows) if suffix == ".json" else "\n".join([json.dumps(rows[0])] * 3)
        )
    assert count_rows(path) == 3
    assert count_rows([path, str(path)]) == 6


def test_load_sft_samples_passes_tools_and_options_to_the_template(tmp_path: Path) -> None:
    template = "{{ (tools or []) | length }}{{ mode }}" + CHATML
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT, "tools": [tool]}])
    (sample,) = load_sft_samples(path, char_tokenizer(template), template_kwargs={"mode": "m"})
    assert sample.tokens == ids("1m" + TEXT)


def test_load_sft_samples_names_the_invalid_row(tmp_path: Path) -> None:
    tokenizer = char_tokenizer()

    def load(rows: list[dict[str, Any]], **options: Any) -> None:
        load_sft_samples(write(tmp_path / "a.jsonl", rows), tokenizer, **options)

    good = {"messages": CHAT}
    with pytest.raises(DataError, match=r"row 1 has no column 'prompt' \(columns found: q"):
        load([good, {"q": 1}])
    with pytest.raises(DataError, match=r"no column 'response'.*'messages' with a conversation"):
        load([{"prompt": "x"}])
    with pytest.raises(DataError, match="column 'response' must be text, got list"):
        load([{"prompt": CHAT[:2], "response": []}])
    with pytest.raises(DataError, match=r"a\.jsonl, row 1: conversation turn 0 is an assistant"):
        load([good, {"messages": CHAT[2:]}])
    with pytest.raises(DataError, match=r"a\.jsonl, row 0: conversation of \d+ tokens is longer"):
        load([good], max_length=5)


def test_text_pairs_need_an_end_token() -> None:
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        tokenize_text_pair("a", "b", tokenizer)


def learnt(conversation: Any, tokenizer: Any) -> list[str]:
    """Return the texts of the runs of tokens with loss."""
    runs: list[list[int]] = []
    before = 0.0
    for token, mask in zip(conversation.ids, conversation.loss_mask, strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return ["".join(tokenizer.convert_ids_to_tokens(run)) for run in runs]


def chat(*contents: str) -> list[Message]:
    """Return turns of user and assistant, in turn."""
    roles = itertools.cycle(["user", "assistant"])
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


@pytest.mark.parametrize("scheme", ["first", "always", "legacy"])
@pytest.mark.parametrize("style", ["zephyr", "mistral"])
def test_metaspace_tokenizers_have_the_ids_of_the_whole_text(scheme: str, style: str) -> None:
    tokenizer = metaspace_tokenizer(scheme, STYLES[style])
    turns = chat("say ab", "ab", "and a b", "a b")
    found = tokenize_conversation(turns, tokenizer)
    expected = tokenizer.apply_chat_template(turns, return_dict=False)
    assert found.ids == expected
    space = "\u2581" if style == "mistral" else ""  # the template's own space
    assert learnt(found, tokenizer) == [f"{space}ab</s>", f"{space}a\u2581b</s>"]
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    assert found.ids[: len(prompt)] == prompt
    assert found.loss_mask[len(prompt)] == 1.0
    assert sum(i == tokenizer.eos_token_id for i in found.ids) == (4 if style == "zephyr" else 2)


def test_the_first_word_of_a_turn_has_no_space_of_its_own() -> None:
    """By hand: the newline of the header is the byte token, and the turn's text follows it."""
    tokenizer = metaspace_tokenizer()
    found = tokenize_conversation(chat("ab", "ab"), tokenizer)
    header = "\u2581<|user|>"
    tokens = [*header, "<0x0A>", "ab", "</s>", "<0x0A>", *"<|assistant|>", "<0x0A>"]
    assert tokenizer.convert_ids_to_tokens(found.ids) == [*tokens, "ab", "</s>", "<0x0A>"]
    assert learnt(found, tokenizer) == ["ab</s>"]


def test_text_pairs_of_metaspace_tokenizers_have_the_ids_of_the_joined_text() -> None:
    tokenizer = metaspace_tokenizer()
    found = tokenize_text_pair("Q:", "ab", tokenizer)
    assert found.ids == [*tokenizer("Q:ab")["input_ids"], tokenizer.eos_token_id]
    assert learnt(found, tokenizer) == ["ab</s>"]
    # With a space in between, which the tokenizer joins to the next word.
    assert learnt(tokenize_text_pair("Q:", " ab", tokenizer), tokenizer) == ["\u2581ab</s>"]
    # Here a token crosses the boundary: a rollout would have tokenized the prompt alone.
    crossed = tokenize_text_pair("Qa", "b", tokenizer)
    assert tokenizer.convert_ids_to_tokens(crossed.ids) == ["<s>", *"\u2581Qab", "</s>"]


THINKING = byte_tokenizer(
    ["<|im_start|>", "<|im_end|>"], STYLES["forgets_thoughts"], eos_token="<|im_end|>"
)
LAST = "<think>\n\n</think>\n\nd<|im_end|>"


def decoded(conversation: Any) -> str:
    return str(THINKING.decode(conversation.ids))


@pytest.mark.parametrize("contents", [("a", "b", "c", "d"), ("a", "<think>x</think>b", "c", "d")])
def test_the_last_turn_alone_is_learnt_with_a_template_that_changes_earlier_turns(
    contents: tuple[str, ...], tmp_path: Path
) -> None:
    turns = chat(*contents)
    with pytest.raises(DataError, match=r"not prefix-preserving.*loss_mask 0"):
        tokenize_conversation(turns, THINKING)
    turns[1]["loss_mask"] = 0
    found = tokenize_conversation(turns, THINKING)
    plain = [{"role": m["role"], "content": m["content"]} for m in turns]
    assert found.ids == THINKING.apply_chat_template(plain, return_dict=False)
    kept = [i for i, m in zip(found.ids, found.loss_mask, strict=True) if m]
    assert THINKING.decode(kept) == LAST
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": plain[:3], "response": "d"}))
    (sample,) = load_sft_samples(path, THINKING)
    assert (sample.tokens, sample.loss_mask) == (found.ids, found.loss_mask)
    assert sample.prompt_ids == THINKING.apply_chat_template(
        plain[:3], add_generation_prompt=True, return_dict=False
    )


def test_what_follows_the_only_turn_with_loss_is_left_out_if_it_changes_that_turn() -> None:
    turns = chat("a", "b", "c", "d")
    turns[3]["loss_mask"] = 0
    found = tokenize_conversation(turns, THINKING)
    assert found.ids == THINKING.apply_chat_template(chat("a", "b"), return_dict=False)


def test_a_token_that_ends_only_the_conversation_is_not_part_of_a_turn() -> None:
    """As in Phi-3's template, which writes it after the last turn."""
    special = ["<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"]
    tokenizer = byte_tokenizer(special, STYLES["phi3"], eos_token="<|endoftext|>")
    turns = chat("a", "b", "c", "d")
    found = tokenize_conversation(turns, tokenizer)
    assert found.ids == tokenizer.apply_chat_template(turns, return_dict=False)
    assert learnt(found, tokenizer) == ["b<|end|>", "d<|end|>"]


def test_assistant_messages_of_a_prompt_have_no_loss_unless_they_say_so(tmp_path: Path) -> None:
    prompt = chat("a", "b", "c")
    path = tmp_path / "a.jsonl"
    for mask, expected in ((None, "|d<e>"), (0, "|d<e>"), (1, "|b<e>|d<e>")):
        prompt[1]["loss_mask"] = mask
        path.write_text(json.dumps({"prompt": prompt, "response": "d"}))
        (sample,) = load_sft_samples(path, char_tokenizer())
        found = type("Found", (), {"ids": sample.tokens, "loss_mask": sample.loss_mask})
        assert with_loss(found) == expected


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"messages": None}, "messages"),
        ({"prompt": None, "response": "a"}, "prompt"),
        ({"prompt": [{"role": "user", "content": "a"}], "response": None}, "response"),
        ({"messages": None, "prompt": None, "response": "a"}, "prompt"),
    ],
)
def test_a_column_of_null_is_named(row: Any, column: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=rf"a\.jsonl, row 0: column '{column}' is null"):
        load_sft_samples(path, char_tokenizer())
