"""The token records of rollouts: pieces of text, drafted tokens, which samples are kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from slipstream.data.tokenizer import build_tokenizer
from slipstream.data.trajectories import read_trajectories, to_sample
from slipstream.rewards.protocol import REWARD_EXTRAS, Score, apply_score
from slipstream.rollout.episode import extend_sample
from slipstream.run.rollout_dump import dump_groups, dump_tokens, pieces, record, token_record
from slipstream.types import (
    EpisodeRecord,
    Generation,
    Group,
    PlacedReward,
    Prompt,
    Sample,
    Segment,
    Status,
    StopReason,
    VersionSpan,
)
from tests.run.test_conversation import branched


def generated(ids: list[int], drafted: list[int], reason: StopReason) -> Generation:
    return Generation(
        request_id="r",
        token_ids=ids,
        log_probs=[-0.25] * len(ids),
        sampling_log_probs=[-0.25] * len(ids),
        spans=[VersionSpan(0, 0, len(ids))],
        stop_reason=reason,
        drafted=drafted,
    )


def test_token_record_marks_drafted_tokens_across_attempts_and_tool_output() -> None:
    sample = Sample(segments=[Segment.given("prompt", [1, 2])])
    extend_sample(sample, generated([3, 4, 5], [1, 2], StopReason.ABORT))
    extend_sample(sample, generated([6, 7], [0], StopReason.EOS))
    assert sample.segments[1].drafted == [1, 2, 3]
    assert sample.drafted == [3, 4, 5]
    sample.append(Segment.given("tool", [8]))
    tokenizer = build_tokenizer()
    record = token_record(sample, tokenizer)
    assert (record["drafted"], record["masked"]) == ("011100", "000001")
    assert record["log_probs"] == [-0.25] * 5 + [0.0]
    assert "".join(record["pieces"]) == tokenizer.decode([3, 4, 5, 6, 7, 8])
    # Equality of segments ignores which tokens were drafted.
    other = Sample(segments=[Segment.given("prompt", [1, 2])])
    extend_sample(other, generated([3, 4, 5, 6, 7], [], StopReason.EOS))
    assert other.segments[1] == sample.segments[1]


def test_record_has_what_the_reward_function_logged() -> None:
    sample, tokenizer = Sample(segments=[Segment.given("prompt", [1, 2])]), build_tokenizer()
    assert REWARD_EXTRAS not in record(sample, tokenizer, 1, tokenizer.decode)
    apply_score(sample, Score(1.0, extras={"parsed": "5"}))
    assert record(sample, tokenizer, 1, tokenizer.decode)[REWARD_EXTRAS] == {"parsed": "5"}


def test_a_dump_has_all_tokens_of_its_samples(tmp_path: Path) -> None:
    prompt = Prompt(uid="u", ids=[1, 2], messages=[{"role": "user", "content": "1 2"}])
    sample = Sample.from_prompt(prompt, group_index=3, index=0)
    extend_sample(sample, generated([3, 4], [], StopReason.ABORT))
    extend_sample(sample, replace(generated([5], [], StopReason.EOS), spans=[VersionSpan(1, 0, 1)]))
    sample.append(Segment.given("tool", [8, 9]))
    extend_sample(sample, generated([6, 7], [], StopReason.EOS))
    # An agent loop may leave out what the policy sampled.
    sample.segments[3].loss_mask[0] = 0.0
    sample.episode = EpisodeRecord(turns=2, calls=1, rewards=[PlacedReward(4, "tool", -0.5)])
    sample.reward = 0.5
    path = tmp_path / "1.jsonl"
    dump_groups(path, [Group(index=3, prompt=prompt, samples=[sample])], build_tokenizer(), 1)
    (trajectory,) = read_trajectories([path])
    made = to_sample(trajectory, group_index=3)
    assert made.segments == sample.segments
    assert made.versions == [-1, -1, 0, 0, 1, -1, -1, 0, 0]
    assert made.episode is not None
    assert made.episode.rewards == sample.episode.rewards
    fields = ("prompt", "uid", "group_index", "index", "reward", "status")
    assert [getattr(made, name) for name in fields] == [getattr(sample, name) for name in fields]


def test_record_has_turns_calls_and_rewards_of_an_episode() -> None:
    sample, tokenizer = Sample(segments=[Segment.given("prompt", [1, 2])]), build_tokenizer()
    sample.append(Segment.given("assistant", [3, 4]))
    assert "episode" not in record(sample, tokenizer, 1, tokenizer.decode)
    sample.episode = EpisodeRecord(
        turns=2,
        calls=1,
        problems={"raised": 1},
        rewards=[PlacedReward(3, "tool", -0.5)],
        tool_seconds=4.0,
    )
    assert record(sample, tokenizer, 1, tokenizer.decode)["episode"] == {
        "turns": 2,
        "calls": 1,
        "problems": {"raised": 1},
        "truncated_by": None,
        "rewards": [{"name": "tool", "value": -0.5, "branch": 0, "place": 1}],
        "metrics": {},
    }


def test_pieces_are_the_texts_of_the_tokens() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer("1 2 + 3 = 4", add_special_tokens=False).input_ids
    assert pieces(ids, tokenizer) == ["1", " 2", " +", " 3", " =", " 4"]
    assert pieces([], tokenizer) == []


def test_piece_of_a_split_character_belongs_to_its_last_token() -> None:
    # Each byte is a token, as for rare characters in byte-level tokenizers.
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = cast(PreTrainedTokenizerBase, PreTrainedTokenizerFast(tokenizer_object=backend))
    ids = tokenizer("aéb€", add_special_tokens=False).input_ids
    assert pieces(ids, tokenizer) == ["a", "", "é", "b", "", "", "€"]


def test_token_dump_has_the_first_sample_of_a_few_groups(tmp_path: Path) -> None:
    groups = []
    for index in range(9):
        samples = [
            Sample(
                segments=[Segment.given("prompt", [1]), Segment.given("assistant", [index, 2])],
                uid=f"{index}",
                index=i,
                status=Status.COMPLETED,
            )
            for i in range(2)
        ]
        groups.append(Group(index=index, prompt=Prompt(uid=f"{index}", ids=[1]), samples=samples))
    dump_tokens(tmp_path / "tokens", groups, build_tokenizer(), 7)
    rows = [json.loads(row) for row in (tmp_path / "tokens" / "7.jsonl").read_text().splitlines()]
    assert [(row["uid"], row["index"]) for row in rows] == [("0", 0), ("2", 0), ("4", 0), ("6", 0)]
    dump_tokens(tmp_path / "tokens", groups[:1], build_tokenizer(), 8)
    assert len((tmp_path / "tokens" / "8.jsonl").read_text().splitlines()) == 1


def test_pieces_of_invalid_bytes_decode_only_a_few_tokens_at_a_time() -> None:
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = cast(PreTrainedTokenizerBase, PreTrainedTokenizerFast(tokenizer_object=backend))
    lead = backend.token_to_id("\N{LATIN CAPITAL LETTER A WITH TILDE}")  # the byte C3
    assert lead is not None
    longest = 0
    decode = tokenizer.decode

    def watched(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return str(decode(ids))

    tokenizer.decode = watched
    found = pieces([lead] * 50, tokenizer)
    assert len(found) == 50
    assert set("".join(found)) == {"\N{REPLACEMENT CHARACTER}"}
    # No text is decoded from its beginning for each token.
    assert longest <= 8


def test_dumps_are_json_without_numbers_that_are_not_finite(tmp_path: Path) -> None:
    sample = Sample(
        uid="u",
        ground_truth=float("nan"),
        extra_info={"a": [1.5, float("inf"), {"b": float("-inf")}], "c": "NaN"},
        reward=float("nan"),
    )
    group = Group(index=0, prompt=Prompt(uid="p", ids=[1]), samples=[sample])
    dump_groups(tmp_path / "1.jsonl", [group], build_tokenizer(), 1)
    dump_tokens(tmp_path / "tokens", [group], build_tokenizer(), 1)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    row = json.loads((tmp_path / "1.jsonl").read_text(), parse_constant=refuse)
    assert (row["gts"], row["score"]) == (None, None)
    assert row["extra_info"] == {"a": [1.5, None, {"b": None}], "c": "NaN"}
    tokens = json.loads((tmp_path / "tokens" / "1.jsonl").read_text(), parse_constant=refuse)
    assert tokens["score"] is None


def test_the_token_record_of_an_episode_has_its_turns_answers_and_branches() -> None:
    sample = branched()
    tokenizer = build_tokenizer()
    shown = token_record(sample, tokenizer)
    assert "".join(shown["pieces"]) == tokenizer.decode([3, 4]) + tokenizer.decode([5, 6, 7])
    assert shown["input"] == tokenizer.decode([1, 2])
    assert [(p["at"], p["role"], p["branch"], p["rewards"]) for p in shown["parts"]] == [
        (0, "assistant", 0, {"tool": -0.5}),
        (2, "assistant", 1, {}),
        (3, "tool", 1, {}),
        (4, "assistant", 1, {"end": 1.0}),
    ]
    assert len(shown["masked"]) == len(shown["drafted"]) == len(shown["log_probs"]) == 5
    earlier = record(sample, tokenizer, 1, tokenizer.decode)["episode"]["earlier"]
    assert [one["response_ids"] for one in earlier] == [[3, 4]]
