"""The lookup task: problems, demonstrations that waste look-ups, and its tokenizer."""

from __future__ import annotations

from itertools import pairwise

import pytest

from slipstream.data.conversation import tokenize_conversation
from slipstream.data.lookup import NAMES, NOBODY, LookupTask, Problem, build_tokenizer, look_up
from slipstream.errors import ConfigError
from slipstream.rewards.lookup import compute_score

TABLE = {
    "ana": {"boss": "ben", "friend": NOBODY},
    "ben": {"boss": "cleo", "friend": "ana"},
    "cleo": {"boss": "ana", "friend": "ben"},
}


def test_the_path_follows_the_relations() -> None:
    problem = Problem("ana", ("boss", "boss"), TABLE)
    assert problem.text == "who is ana 's boss 's boss ?"
    assert (problem.path, problem.answer, problem.needed) == (("ana", "ben", "cleo"), "cleo", 2)


def test_a_missing_relation_ends_the_path() -> None:
    problem = Problem("ana", ("friend", "boss"), TABLE)
    assert (problem.answer, problem.needed) == (NOBODY, 1)


def test_the_tool_lists_all_relations_of_a_name() -> None:
    assert look_up(TABLE, "ben") == look_up(TABLE, " ben") == "ben : boss cleo , friend ana"
    assert look_up(TABLE, "zoe") == "no such name : zoe"


def test_problems_are_functions_of_seed_split_and_index() -> None:
    task = LookupTask(1)
    assert task.problem("train", 5) == LookupTask(1).problem("train", 5)
    others = [LookupTask(2).problem("train", 5), task.problem("train", 6)]
    others.append(task.problem("held_out", 5))
    assert task.problem("train", 5) not in others


def test_needed_look_ups_have_a_long_tail() -> None:
    needed = [LookupTask(0).problem("train", i).needed for i in range(400)]
    counts = [needed.count(n) for n in range(1, 6)]
    assert counts[0] > counts[2] > counts[4] > 10


def test_a_demonstration_is_right_unless_it_gives_up() -> None:
    patient = LookupTask(0, give_up=0.0)
    hasty = LookupTask(0, give_up=0.5)

    def accuracy(task: LookupTask) -> float:
        right = 0
        for i in range(200):
            text = task.demonstration("train", i)[-1]["content"]
            answer = task.problem("train", i).answer
            right += compute_score("lookup", text, answer)["acc"] == 1.0
        return right / 200

    assert accuracy(patient) == 1.0
    assert 0.4 < accuracy(hasty) < 0.9


def test_waste_adds_look_ups() -> None:
    def calls(waste: float) -> list[int]:
        task = LookupTask(0, waste=waste, give_up=0.0)
        return [
            sum(m["role"] == "tool" for m in task.demonstration("train", i)) for i in range(100)
        ]

    needed = [LookupTask(0).problem("train", i).needed for i in range(100)]
    assert calls(0.0) == needed
    assert sum(calls(0.5)) > 1.5 * sum(needed)


def test_demonstrations_have_a_limited_length() -> None:
    task = LookupTask(0, waste=0.9, give_up=0.0)
    lengths = [
        len(tokenize_conversation(task.demonstration("train", i), task.tokenizer).ids)
        for i in range(100)
    ]
    assert 250 < max(lengths) < 350


def test_only_the_turns_of_the_policy_have_loss() -> None:
    task = LookupTask(0)
    messages = task.demonstration("train", 0)
    conversation = tokenize_conversation(messages, task.tokenizer)
    lost = [i for i, mask in zip(conversation.ids, conversation.loss_mask, strict=True) if mask]
    text = task.tokenizer.decode(lost)
    turns = [m for m in messages if m["role"] == "assistant"]
    assert text.count("<end>") == len(turns)
    assert "<tool>" not in text
    assert text.startswith(turns[0]["content"])


def test_the_prompt_is_the_start_of_the_demonstration() -> None:
    task = LookupTask(0)
    prompt = task.prompt("train", 7)
    whole = task.tokenizer.apply_chat_template(task.demonstration("train", 7), return_dict=False)
    assert whole[: len(prompt.ids)] == prompt.ids
    assert len(prompt.ids) <= task.max_prompt_tokens()


@pytest.mark.parametrize("text", ["ana 's boss", "Hello, {x}\n\t~", "<user>hi<end>", "  ana  "])
def test_the_tokenizer_keeps_any_ascii_text(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) % 16 == 0


def test_a_call_is_few_tokens() -> None:
    tokenizer = build_tokenizer()
    call = '<tool_call>{"name": "look_up", "arguments": {"name": " ana"}}</tool_call>'
    assert len(tokenizer.encode(call)) == 5


@pytest.mark.parametrize(
    "options", [{"people": 2}, {"max_steps": 6}, {"waste": 1.0}, {"give_up": -0.1}, {"cost": 2.0}]
)
def test_impossible_parameters_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        LookupTask(0, **options)  # type: ignore[arg-type]


def test_a_name_is_always_the_same_token() -> None:
    task = LookupTask(0)
    for index in range(20):
        conversation = tokenize_conversation(task.demonstration("train", index), task.tokenizer)
        tokens = task.tokenizer.convert_ids_to_tokens(conversation.ids)
        # Only the tool's answers begin with a name.
        for before, token in pairwise(tokens):
            assert token not in NAMES or before == "<tool>"
