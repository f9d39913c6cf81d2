"""Finished trajectories: reads their records, and makes samples for SFT and RL of them.

A record is a conversation in OpenAI's form, with or without the tokens of the assistant's turns, or
a line of a rollout dump of this system. Its messages are enough for SFT. RL needs the token ids and
log-probs that the engine returned: text is never tokenized again.

Knows records and files, not tokenizers. Called by `convert_trajectories`.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.data.messages import continues_message
from slipstream.data.sample_file import (
    log_prob_list,
    number,
    placed_rewards,
    segments_of,
    token_ids,
)
from slipstream.data.tool_calls import checked_messages, checked_tools
from slipstream.errors import DataError
from slipstream.reading import reading, shown, value_problem
from slipstream.types import EpisodeRecord, Message, Sample, Segment, Status, VersionSpan

ENDED = (Status.COMPLETED, Status.TRUNCATED, Status.ABORTED, Status.FAILED)

_IDS = ("token_ids", "response_token_ids")
_PROMPT_IDS = ("prompt_token_ids", "prompt_ids")
_LOG_PROBS = ("logprobs", "log_probs")
_VERSION, _FINISH = "version", "finish_reason"
_OF_TOKENS = (*_IDS, *_PROMPT_IDS, *_LOG_PROBS, _VERSION, _FINISH)
"""Fields of an assistant message that are not part of the conversation."""

_REMEDY = "give a JSON Lines file with one trajectory per line, or a JSON file with a list of them"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """The tokens of one assistant message, as the engine got and returned them; None: not recorded.

    `message` is the number of the message, `before` the role of the message before it.
    """

    message: int
    before: str
    prompt_ids: list[int] | None
    ids: list[int] | None
    log_probs: list[float] | None
    loss: float
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One finished attempt at a prompt. `where` names its file and line in messages.

    `group` is equal for all attempts at one prompt; None if the record does not say. `turns` are
    the tokens of assistant messages. `recorded` is the sample of a rollout dump, whose messages are
    complete only if it has a single turn (`complete`).
    """

    where: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    status: Status = Status.COMPLETED
    group: Hashable = None
    uid: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    turns: list[TurnTokens] = field(default_factory=list)
    recorded: Sample | None = None
    complete: bool = True


def read_trajectories(files: Sequence[str | Path]) -> list[Trajectory]:
    """Return the trajectories of all files, in order.

    A file with the suffix .json has one record or a list of records; any other has one per line.
    Raises DataError that names file and line, and for a file without trajectories.
    """
    found: list[Trajectory] = []
    for path in (Path(file).expanduser() for file in files):
        made = [read_trajectory(record, where) for where, record in _records(path)]
        if not made:
            raise DataError(f"{path} has no trajectories; {_REMEDY}")
        found += made
    return found


def read_trajectory(record: Any, where: str = "trajectory") -> Trajectory:
    """Return the trajectory of one record. `where` names it in messages.

    Raises DataError for a record of another form, and for values that contradict each other.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: must be a JSON object, got {shown(record, 80)}; {_REMEDY}")
    if problem := value_problem(record):
        raise DataError(f"{where}: {problem}; remove the record or correct the value")
    with reading(where, DataError, "correct the record, or remove it"):
        return _of_dump(record, where) if "response_ids" in record else _of_messages(record, where)


def to_sft(trajectory: Trajectory) -> dict[str, Any]:
    """Return a row for `sft.train_files`: `messages`, and `tools` if there are any.

    Raises DataError for an episode of several turns from a rollout dump, which has no messages.
    """
    if not trajectory.complete:
        raise DataError(
            f"{trajectory.where}: a rollout dump has no messages of an episode with several turns, "
            "and none of a prompt that is plain text; use --to rl, which needs none"
        )
    row: dict[str, Any] = {"messages": trajectory.messages}
    return {**row, "tools": trajectory.tools} if trajectory.tools else row


def to_sample(trajectory: Trajectory, *, group_index: int | None = None, index: int = 0) -> Sample:
    """Return the sample for RL of a trajectory, with its reward and the exact token ids.

    The loss mask is 1 only at tokens that the policy sampled. A turn whose prompt begins with all
    tokens of an earlier branch continues the newest such branch. Any other turn begins a new
    branch; what an earlier branch sampled is part of its prompt and has mask 0. `parent` is the
    branch of the turn before. The sample is the newest branch, with the others in `earlier`.

    Raises DataError that says what the record lacks.
    """
    where = trajectory.where
    if trajectory.reward is None:
        raise DataError(f"{where}: --to rl needs a 'reward'; add it, or use --to sft")
    if trajectory.recorded is not None:
        recorded = trajectory.recorded
        earlier = [replace(b, group_index=group_index, index=index) for b in recorded.earlier]
        return replace(recorded, earlier=earlier, group_index=group_index, index=index)
    if not trajectory.turns:
        raise DataError(
            f"{where}: no assistant message has 'token_ids', 'logprobs' and 'prompt_token_ids', "
            "which --to rl needs; record what the engine returned, or use --to sft"
        )
    samples: list[Sample] = []
    branch = None
    for turn in trajectory.turns:
        prompt_ids, segment = _sampled(turn, where)
        last = branch
        branch = next(
            (s for s in reversed(samples) if s.tokens == prompt_ids[: s.num_tokens]), None
        )
        if branch is None:
            branch = Sample(
                prompt=trajectory.messages[: turn.message],
                segments=[Segment.given("prompt", prompt_ids)],
                status=trajectory.status,
                reward=trajectory.reward,
                uid=trajectory.uid,
                group_index=group_index,
                index=index,
                branch=len(samples),
                parent=None if last is None else last.branch,
                metadata=trajectory.metadata,
            )
            samples.append(branch)
        elif len(prompt_ids) > branch.num_tokens:
            branch.append(Segment.given(turn.before, prompt_ids[branch.num_tokens :]))
        branch.append(segment)
    *earlier, newest = samples
    newest.earlier = earlier
    return newest


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the records of a file, each with its name in messages."""
    with reading(path, DataError, _REMEDY):
        text = path.read_text(encoding="utf-8")
        whole = json.loads(text) if path.suffix.lower() == ".json" else None
    if whole is not None:
        for place, record in enumerate(whole if isinstance(whole, list) else [whole], start=1):
            yield f"{path}, record {place}", record
        return
    for line, one in enumerate(text.split("\n"), start=1):
        if one.strip():
            with reading(f"{path}:{line}", DataError, _REMEDY):
                record = json.loads(one)
            yield f"{path}:{line}", record


def _of_messages(record: Mapping[str, Any], where: str) -> Trajectory:
    key = next((key for key in ("messages", "conversations") if record.get(key) is not None), None)
    if key is None:
        raise DataError(
            f"{where}: has neither 'messages' nor 'conversations' (fields found: "
            f"{', '.join(map(str, record)) or 'none'}); name the list of messages 'messages'"
        )
    messages = checked_messages(record[key], f"{where}: {key!r}")
    group, metadata = record.get("group"), record.get("metadata") or {}
    if isinstance(group, bool) or not isinstance(group, str | int | None):
        raise DataError(f"{where}: 'group' must be text or an integer, got {shown(group, 80)}")
    if not isinstance(metadata, dict):
        raise DataError(f"{where}: 'metadata' must be an object, got {shown(metadata, 80)}")
    return Trajectory(
        where=where,
        messages=[
            {name: value for name, value in message.items() if name not in _OF_TOKENS}
            for message in messages
        ],
        tools=checked_tools(record.get("tools"), where),
        reward=_reward(record.get("reward"), where),
        status=_status(record.get("status"), messages, where),
        group=group,
        uid=where if group is None else str(group),
        metadata=metadata,
        turns=_turns(messages, f"{where}: {key!r}"),
    )


def _reward(value: Any, where: str) -> float | None:
    return None if value is None else number(value, f"{where}: 'reward'")


def _status(value: Any, messages: Sequence[Message], where: str) -> Status:
    if value is None:
        last = next(m for m in reversed(messages) if m["role"] == "assistant")
        return Status.TRUNCATED if last.get(_FINISH) == "length" else Status.COMPLETED
    if value not in ENDED:
        raise DataError(
            f"{where}: the status {shown(value)} is unknown; use one of {', '.join(ENDED)}"
        )
    return Status(value)


def _turns(messages: Sequence[Message], where: str) -> list[TurnTokens]:
    """Return the tokens of the assistant messages that have any.

    Raises DataError for one without tokens after one that has them, unless its loss_mask is 0.
    """
    turns: list[TurnTokens] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        name = f"{where}, message {place}"
        turn = _turn(message, place, str(messages[place - 1]["role"]), name)
        if turn is not None:
            turns.append(turn)
        elif turns and message.get("loss_mask") != 0:
            raise DataError(
                f"{name} has no 'token_ids', but an earlier message has; add them, set loss_mask 0 "
                "if the policy did not write it, or remove the tokens of all messages for --to sft"
            )
    return turns


def _turn(message: Message, place: int, before: str, name: str) -> TurnTokens | None:
    found = [_first(message, names) for names in (_PROMPT_IDS, _IDS, _LOG_PROBS)]
    if all(value is None for value in found):
        return None
    prompt_ids = None if found[0] is None else token_ids(found[0], f"{name}: 'prompt_token_ids'")
    ids = None if found[1] is None else token_ids(found[1], f"{name}: 'token_ids'")
    log_probs = None if found[2] is None else log_prob_list(_plain(found[2], name), name)
    if ids is not None and not ids:
        raise DataError(f"{name}: 'token_ids' is empty; remove the message")
    if ids is not None and log_probs is not None and len(ids) != len(log_probs):
        raise DataError(
            f"{name}: {len(ids)} 'token_ids' but {len(log_probs)} 'logprobs'; record both of the "
            "same response"
        )
    version = message.get(_VERSION, 0)
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise DataError(f"{name}: 'version' must be an integer of at least 0, got {shown(version)}")
    return TurnTokens(
        message=place,
        before=before if before != "assistant" else "user",
        prompt_ids=prompt_ids,
        ids=ids,
        log_probs=log_probs,
        loss=float(message.get("loss_mask", 1)),
        version=version,
    )


def _first(message: Message, names: Sequence[str]) -> Any:
    return next((message[name] for name in names if name in message), None)


def _plain(log_probs: Any, name: str) -> Any:
    """Return the numbers of log-probs in the form of OpenAI's chat API; other values unchanged."""
    if not isinstance(log_probs, Mapping):
        return log_probs
    content = log_probs.get("content")
    if not isinstance(content, list) or not all(isinstance(one, Mapping) for one in content):
        raise DataError(
            f"{name}: 'logprobs' must be a list of numbers, or an object with 'content' as in "
            f"OpenAI's API, got {shown(dict(log_probs), 80)}"
        )
    return [one.get("logprob") for one in content]


def _sampled(turn: TurnTokens, where: str) -> tuple[list[int], Segment]:
    """Return the prompt of a turn and what the policy sampled."""
    if turn.prompt_ids is None or turn.ids is None or turn.log_probs is None:
        fields = {
            "prompt_token_ids": turn.prompt_ids,
            "token_ids": turn.ids,
            "logprobs": turn.log_probs,
        }
        missing = " and ".join(repr(name) for name, value in fields.items() if value is None)
        raise DataError(
            f"{where}, message {turn.message}: {missing} missing, which --to rl needs; record what "
            "the engine returned, or use --to sft"
        )
    return turn.prompt_ids, Segment(
        role="assistant",
        ids=turn.ids,
        loss_mask=[turn.loss] * len(turn.ids),
        log_probs=turn.log_probs,
        sampling_log_probs=turn.log_probs,
        spans=[VersionSpan(turn.version, 0, len(turn.ids))],
    )


def _of_dump(record: Mapping[str, Any], where: str) -> Trajectory:
    """Return the trajectory of a line of a rollout dump (`run.rollout_dump.record`)."""
    if not isinstance(record.get("segments"), list):
        raise DataError(
            f"{where}: the rollout has no 'segments', so it is unknown which tokens the policy "
            "sampled; give a rollout dump of this version"
        )
    status = _status(record["status"], (), where)
    if record.get("failure") is not None:
        status = Status.FAILED
    reward = None if status is Status.FAILED else _reward(record.get("score"), where)
    episode = record.get("episode")
    given = record.get("messages")
    return Trajectory(
        where=where,
        messages=_of_single_turn(given or [], str(record["text"])),
        reward=reward,
        status=status,
        # The number of a group says nothing, because it belongs to a run.
        group=(record["step"], record["uid"], tuple(record["prompt_ids"])),
        uid=str(record["uid"]),
        metadata={"step": record["step"]},
        recorded=None if reward is None else _recorded(record, reward, status, where),
        complete=bool(given)
        and (episode is None or (episode["turns"], episode["calls"]) == (1, 0)),
    )


def _of_single_turn(prompt: Sequence[Message], text: str) -> list[Message]:
    """Return the conversation of one response. Only the response has loss, as the policy wrote it;
    a last message that it continues has loss as a whole."""
    given = [m if m["role"] != "assistant" else {**m, "loss_mask": 0} for m in prompt]
    if prompt and continues_message(prompt):
        last = prompt[-1]
        return [*given[:-1], {**last, "content": f"{last['content']}{text}"}]
    return [*given, {"role": "assistant", "content": text}]


def _recorded(record: Mapping[str, Any], reward: float, status: Status, where: str) -> Sample:
    """Return the sample of a dump, with the rewards of its turns."""
    episode = record.get("episode") or {}
    earlier = episode.get("earlier", [])
    branches = [
        Sample(
            prompt=record.get("messages") or record["input"],
            segments=_dumped_segments(one, where),
            status=status,
            reward=reward,
            uid=str(record["uid"]),
            branch=number,
            parent=number - 1 if number else None,
            metadata={"step": record["step"]},
        )
        for number, one in enumerate([*earlier, record])
    ]
    *before, sample = branches
    sample.earlier = before
    starts = [len(branch.segments[0].ids) for branch in branches]
    turns = placed_rewards(episode.get("rewards", ()), starts, where)
    sample.episode = EpisodeRecord(rewards=turns) if turns else None
    return sample


def _dumped_segments(record: Mapping[str, Any], where: str) -> list[Segment]:
    prompt = Segment.given("prompt", token_ids(record["prompt_ids"], f"{where}: prompt_ids"))
    rows, ids = record["segments"], record["response_ids"]
    return [prompt, *segments_of(rows, ids, record["loss_mask"], record["log_probs"], where)]
