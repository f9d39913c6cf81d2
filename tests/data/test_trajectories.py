"""Records of finished trajectories, and the samples that are made of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.sft import load_sft_samples
from slipstream.data.trajectories import (
    read_trajectories,
    read_trajectory,
    to_sample,
    to_sft,
)
from slipstream.errors import DataError
from slipstream.types import PlacedReward, Sample, Segment, Status, VersionSpan
from tests.data.agent_records import TOOLS, conversation, record, with_tokens, write
from tests.data.helpers import char_tokenizer


def shape(sample: Sample) -> list[tuple[str, list[int], list[float], list[float]]]:
    return [(s.role, s.ids, s.loss_mask, s.log_probs) for s in sample.segments]


def test_a_turn_whose_prompt_begins_with_all_tokens_continues_the_sample() -> None:
    sample = to_sample(read_trajectory(with_tokens()), group_index=4, index=1)
    assert shape(sample) == [
        ("prompt", [1, 2], [0.0, 0.0], [0.0, 0.0]),
        ("assistant", [3, 4], [1.0, 1.0], [-0.5, -0.25]),
        ("tool", [5, 6], [0.0, 0.0], [0.0, 0.0]),
        ("assistant", [7], [1.0], [-0.125]),
    ]
    assert sample.versions == [-1, -1, 0, 0, -1, -1, 3]
    assert sample.sampling_log_probs == sample.rollout_log_probs
    assert (sample.reward, sample.group_index, sample.index) == (1.0, 4, 1)
    assert (sample.branch, sample.parent, sample.uid) == (0, None, "ana")
    assert sample.prompt == conversation()[:1]


def test_a_turn_with_another_prompt_begins_a_branch_and_is_trained_on_once() -> None:
    made = with_tokens()
    made["messages"][3]["prompt_token_ids"] = [1, 2, 3, 9]
    first, second = to_sample(read_trajectory(made)).branches
    assert shape(first) == [
        ("prompt", [1, 2], [0.0] * 2, [0.0] * 2),
        ("assistant", [3, 4], [1.0, 1.0], [-0.5, -0.25]),
    ]
    assert shape(second) == [
        ("prompt", [1, 2, 3, 9], [0.0] * 4, [0.0] * 4),
        ("assistant", [7], [1.0], [-0.125]),
    ]
    assert (second.branch, second.parent, second.reward) == (1, 0, 1.0)
    assert [m["role"] for m in second.prompt if isinstance(m, dict)] == [
        "user",
        "assistant",
        "tool",
    ]


def test_a_turn_can_continue_an_earlier_branch() -> None:
    def turn(prompt: list[int], token: int) -> dict[str, Any]:
        fields = {"prompt_token_ids": prompt, "token_ids": [token], "logprobs": [-1.0]}
        return {"role": "assistant", "content": "a", **fields}

    user = {"role": "user", "content": "q"}
    main, other, again = turn([1], 2), turn([8], 9), turn([1, 2, 3], 4)
    samples = to_sample(
        read_trajectory({"messages": [user, main, other, again], "reward": 0})
    ).branches
    assert [sample.tokens for sample in samples] == [[1, 2, 3, 4], [8, 9]]
    assert [sample.loss_mask for sample in samples] == [[0.0, 1.0, 0.0, 1.0], [0.0, 1.0]]
    assert [segment.role for segment in samples[0].segments][2] == "user"


def test_messages_that_the_policy_did_not_write_have_no_loss() -> None:
    made = with_tokens()
    made["messages"][1]["loss_mask"] = 0
    sample = to_sample(read_trajectory(made))
    assert sample.loss_mask == [0.0] * 6 + [1.0]
    # An example in the prompt has no tokens of its own.
    shown = [{"role": "user", "content": "e"}, {"role": "assistant", "content": "f"}]
    made = with_tokens()
    made["messages"] = shown + made["messages"]
    assert to_sample(read_trajectory(made)).tokens == [1, 2, 3, 4, 5, 6, 7]


def test_names_of_engines_for_tokens_are_known() -> None:
    made = with_tokens()
    message = made["messages"][1]
    message["prompt_ids"] = message.pop("prompt_token_ids")
    message["response_token_ids"] = message.pop("token_ids")
    message["log_probs"] = message.pop("logprobs")
    assert to_sample(read_trajectory(made)) == to_sample(read_trajectory(with_tokens()))


def test_a_row_for_sft_has_the_conversation_without_tokens(tmp_path: Path) -> None:
    row = to_sft(read_trajectory(with_tokens(metadata={"a": 1})))
    assert row == to_sft(read_trajectory(record()))
    assert row["tools"] == TOOLS
    assert [sorted(message) for message in row["messages"]] == [
        ["content", "role"],
        ["content", "role", "tool_calls"],
        ["content", "role", "tool_call_id"],
        ["content", "role"],
    ]
    assert "tools" not in to_sft(read_trajectory(record(tools=None)))
    # The last turn alone is text in this template.
    plain = {"messages": [conversation()[0], conversation()[3]]}
    path = write(tmp_path / "out.jsonl", to_sft(read_trajectory(plain)))
    (sample,) = load_sft_samples(path, char_tokenizer())
    assert sample.response == "answer dan"


def test_status_comes_from_the_record_or_the_last_response() -> None:
    assert read_trajectory(record()).status is Status.COMPLETED
    assert read_trajectory(record(status="failed")).status is Status.FAILED
    cut = record()
    cut["messages"][3]["finish_reason"] = "length"
    assert read_trajectory(cut).status is Status.TRUNCATED
    assert to_sft(read_trajectory(cut))["messages"] == to_sft(read_trajectory(record()))["messages"]


def test_files_hold_lines_or_lists(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.jsonl", record(reward=0.5), {"conversations": conversation()})
    (tmp_path / "b.json").write_text(json.dumps([record(reward=2)]))
    (tmp_path / "c.json").write_text(json.dumps(record(reward=3)))
    found = read_trajectories([lines, tmp_path / "b.json", tmp_path / "c.json"])
    assert [one.reward for one in found] == [0.5, None, 2.0, 3.0]
    assert [one.where for one in found] == [
        f"{lines}:1",
        f"{lines}:2",
        f"{tmp_path / 'b.json'}, record 1",
        f"{tmp_path / 'c.json'}, record 1",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no trajectories; give a JSON Lines file with one trajectory per line"),
        ("\n\n", "has no trajectories; give"),
        ('{"messages": 1}\n{"a', ":1: 'messages': must be a non-empty list of messages, got 1"),
        ("\n{", ":2: invalid JSON at line 1, column 2"),
        ("[1]", ":1: must be a JSON object, got [1]; give a JSON Lines file"),
        ('"text"', ":1: must be a JSON object, got 'text'"),
        (
            '{"message": []}',
            ":1: has neither 'messages' nor 'conversations' (fields found: message",
        ),
        ('{"messages": "\\ud800"}', ":1: '\\ud800' has a lone surrogate"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_trajectories([path])
    assert str(caught.value).startswith(str(path))


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff")
    with pytest.raises(DataError, match="it is not UTF-8 text"):
        read_trajectories([tmp_path / "a.jsonl"])
    with pytest.raises(DataError, match="No such file or directory; give a JSON Lines file"):
        read_trajectories([tmp_path / "none.jsonl"])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"reward": "1"}, "f:1: 'reward' must be a finite number, got '1'; correct it"),
        ({"reward": True}, "f:1: 'reward' must be a finite number, got True"),
        ({"reward": float("nan")}, "f:1: 'reward' must be a finite number, got nan"),
        ({"reward": 10**400}, "f:1: OverflowError"),
        ({"group": [1]}, "f:1: 'group' must be text or an integer, got [1]"),
        ({"metadata": "x"}, "f:1: 'metadata' must be an object, got 'x'"),
        ({"status": "pending"}, "f:1: the status 'pending' is unknown; use one of completed, "),
        ({"tools": {}}, "f:1: 'tools' must be a list of objects, got {}"),
    ],
)
def test_wrong_fields_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read_trajectory(record(**more), "f:1")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logprobs": [-1.0]}, "2 'token_ids' but 1 'logprobs'; record both of the same response"),
        ({"logprobs": [-1.0, 0.5]}, "a log-prob is 0.5, but the natural logarithm"),
        ({"logprobs": [-1.0, float("nan")]}, "log-probs must be a finite number, got nan"),
        ({"logprobs": [-1.0, None]}, "log-probs must be a finite number, got None"),
        (
            {"logprobs": {"content": None}},
            "'logprobs' must be a list of numbers, or an object with",
        ),
        ({"logprobs": 3}, "log-probs must be a list of numbers, got 3"),
        ({"token_ids": [3, -4]}, "'token_ids' must be token ids of at least 0, got -4"),
        ({"token_ids": [3, None]}, "'token_ids' must be token ids of at least 0, got None"),
        ({"token_ids": "ab"}, "'token_ids' must be a list of token ids, got 'ab'"),
        ({"token_ids": []}, "'token_ids' is empty; remove the message"),
        ({"prompt_token_ids": [1, 2.0]}, "'prompt_token_ids' must be token ids of at least 0, got"),
        ({"version": -1}, "'version' must be an integer of at least 0, got -1"),
    ],
)
def test_wrong_tokens_are_refused(fields: dict[str, Any], message: str) -> None:
    made = with_tokens()
    made["messages"][1] |= fields
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        read_trajectory(made, "f:1")
    assert str(caught.value).startswith("f:1: 'messages', message 1:")


def test_log_probs_may_be_above_zero_by_rounding() -> None:
    made = with_tokens()
    made["messages"][1]["logprobs"] = [0.0, 2e-7]
    sample = to_sample(read_trajectory(made))
    assert sample.rollout_log_probs[2:4] == [0.0, 2e-7]


def test_a_message_without_tokens_after_one_with_tokens_is_refused() -> None:
    made = with_tokens()
    made["messages"][3] = {"role": "assistant", "content": "answer dan"}
    with pytest.raises(DataError, match="message 3 has no 'token_ids', but an earlier message has"):
        read_trajectory(made)
    made["messages"][3]["loss_mask"] = 0
    assert to_sample(read_trajectory(made)).tokens == [1, 2, 3, 4]


def without(*names: str) -> dict[str, Any]:
    made = with_tokens()
    for name in names:
        del made["messages"][1][name]
    return made


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (record, "f:1: no assistant message has 'token_ids', 'logprobs' and 'prompt_token_ids'"),
        (lambda: without("logprobs"), "f:1, message 1: 'logprobs' missing, which --to rl needs"),
        (
            lambda: without("token_ids", "prompt_token_ids"),
            "f:1, message 1: 'prompt_token_ids' and 'token_ids' missing, which --to rl needs",
        ),
        (lambda: {**with_tokens(), "reward": None}, "f:1: --to rl needs a 'reward'; add it, or"),
    ],
)
def test_rl_says_what_is_missing_and_that_sft_works(
    make: Callable[[], dict[str, Any]], message: str
) -> None:
    trajectory = read_trajectory(make(), "f:1")
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        to_sample(trajectory)
    assert str(caught.value).endswith("or use --to sft")
    assert to_sft(trajectory) == to_sft(read_trajectory(record()))


def dump(**more: Any) -> dict[str, Any]:
    """A line of a rollout dump: an episode of two turns."""
    return {
        "input": "who",
        "messages": [{"role": "user", "content": "who"}],
        "output": "a<tool>b",
        "text": "a b",
        "score": 0.5,
        "step": 7,
        "uid": "u",
        "group": 3,
        "index": 1,
        "status": "truncated",
        "failure": None,
        "prompt_ids": [1, 2],
        "response_ids": [3, 4, 5, 6],
        "loss_mask": [1.0, 0.0, 0.0, 1.0],
        "log_probs": [-0.5, -0.25, 0.0, 0.0],
        "segments": [
            {"role": "assistant", "tokens": 2, "spans": [[0, 1, 4], [1, 2, 5]]},
            {"role": "tool", "tokens": 1, "spans": []},
            {"role": "assistant", "tokens": 1, "spans": [[0, 1, 5]]},
        ],
        "versions": [4, 5],
        "episode": {
            "turns": 2,
            "calls": 1,
            "rewards": [{"name": "tool", "value": 0.25, "branch": 0, "place": 1}],
        },
        **more,
    }


def test_a_rollout_dump_becomes_its_sample_again() -> None:
    trajectory = read_trajectory(dump())
    sample = to_sample(trajectory, group_index=0, index=2)
    first = Segment(
        role="assistant",
        ids=[3, 4],
        loss_mask=[1.0, 0.0],
        log_probs=[-0.5, -0.25],
        sampling_log_probs=[-0.5, -0.25],
        spans=[VersionSpan(4, 0, 1), VersionSpan(5, 1, 2)],
    )
    assert sample.segments[:2] == [Segment.given("prompt", [1, 2]), first]
    # A sampled token keeps its loss though its log-prob is 0, like those of a tool.
    assert sample.loss_mask == [0.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert sample.versions == [-1, -1, 4, 5, -1, 5]
    assert sample.episode is not None
    assert sample.episode.rewards == [PlacedReward(3, "tool", 0.25)]
    assert (sample.status, sample.reward, sample.index) == (Status.TRUNCATED, 0.5, 2)


def test_attempts_at_one_prompt_in_one_step_are_a_group() -> None:
    def group(**more: Any) -> Any:
        return read_trajectory(dump(**more)).group

    assert group() == group(index=0, score=1)
    assert len({group(), group(step=8), group(uid="v"), group(prompt_ids=[1])}) == 4


def test_a_rollout_of_one_turn_is_a_conversation() -> None:
    row = to_sft(read_trajectory(dump(episode=None)))
    assert row == {"messages": [*dump()["messages"], {"role": "assistant", "content": "a b"}]}
    begun = [*dump()["messages"], {"role": "assistant", "content": "I "}]
    row = to_sft(read_trajectory(dump(episode=None, messages=begun)))
    assert row["messages"][1:] == [{"role": "assistant", "content": "I a b"}]
    shown = [*dump()["messages"], {"role": "assistant", "content": "I"}, *dump()["messages"]]
    row = to_sft(read_trajectory(dump(episode=None, messages=shown)))
    assert [message.get("loss_mask") for message in row["messages"]] == [None, 0, None, None]
    for more in ({}, {"messages": None, "episode": None}):
        with pytest.raises(DataError, match=r"dump has no messages of an episode .*to rl"):
            to_sft(read_trajectory(dump(**more)))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"segments": None}, "f:1: the rollout has no 'segments', so it is unknown which tokens"),
        (
            {"loss_mask": [1.0]},
            "f:1: ids, loss_mask and log_probs must have equal length, got 4, 1",
        ),
        ({"segments": []}, "f:1: segments have 0 tokens, ids 4"),
        ({"log_probs": [None] * 4}, "f:1: log-probs must be a finite number, got None"),
        ({"prompt_ids": [-1]}, "f:1: prompt_ids must be token ids of at least 0, got -1"),
        ({"score": "x"}, "f:1: 'reward' must be a finite number, got 'x'"),
        ({"segments": [{}]}, "f:1: key 'tokens' is missing; correct the record, or remove it"),
        ({"episode": 3}, "f:1: AttributeError: 'int' object"),
    ],
)
def test_damaged_dumps_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read_trajectory(dump(**more), "f:1")


def test_a_rollout_whose_reward_failed_is_failed() -> None:
    trajectory = read_trajectory(dump(failure="no server", score=None))
    assert (trajectory.status, trajectory.reward) == (Status.FAILED, None)
