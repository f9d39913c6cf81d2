"""Custom generate functions written for slime run unchanged, but for their imports."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from slipstream.compat.slime.rollout.sglang_rollout import GenerateState
from slipstream.compat.slime.utils.http_utils import post
from slipstream.compat.slime.utils.types import Sample as SlimeSample
from slipstream.data.lookup import build_tokenizer
from slipstream.errors import DataError
from slipstream.rollout.agents.slime import (
    ROUTER_IP,
    ROUTER_PORT,
    Arguments,
    CustomGenerate,
    Settings,
)
from slipstream.types import Generation, Prompt, Sample, Status, StopReason, VersionSpan
from tests.rollout.agents.policy import Policy

TOKENIZER = build_tokenizer()
END = TOKENIZER.eos_token_id
PARAMS: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "max_new_tokens": 100,
    "stop": [],
    "skip_special_tokens": False,
    "no_stop_trim": True,
}
ARGS = Arguments(
    sglang_router_ip=ROUTER_IP,
    sglang_router_port=ROUTER_PORT,
    tokenizer=TOKENIZER,
    sampling_params=PARAMS,
    partial_rollout=False,
)
URL = f"http://{ROUTER_IP}:{ROUTER_PORT}/generate"
ROW = Prompt(
    uid="q",
    ids=[1],
    messages=[{"role": "user", "content": "who is ana ?"}],
    extra_info={"index": 3},
    ground_truth="4",
)
PROMPT = "<user>who is ana ?<end><assistant>"
MORE = "<user>who is ben ?<end><assistant>"
ZERO = {"max_new_tokens": 0}


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


async def by_ids(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Two turns, with token ids."""
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    sample.tokens = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    for turn in range(2):
        payload = {
            "input_ids": sample.tokens,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        found = output["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in found],
            log_probs=[item[0] for item in found],
            meta_info=output["meta_info"],
            text=output["text"],
        )
        if output["meta_info"]["finish_reason"]["type"] == "length":
            return sample
        if turn == 0:
            sample.append_response_tokens(args, tokens=encode(MORE), trainable=False, text=MORE)
    sample.reward = 0.5
    return sample


async def by_text(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """The same turns, with text."""
    ids: list[int] = []
    mask: list[int] = []
    for turn in range(2):
        text = sample.prompt + sample.response
        payload = {"text": text, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(URL, payload)
        new = [item[1] for item in output["meta_info"]["output_token_logprobs"]]
        ids, mask = ids + new, mask + [1] * len(new)
        sample.response += output["text"]
        if turn == 0:
            ids, mask = ids + encode(MORE), mask + [0] * len(encode(MORE))
            sample.response += MORE
    sample.tokens = encode(sample.prompt) + ids
    sample.response_length, sample.loss_mask = len(ids), mask
    sample.reward, sample.status = 0.5, SlimeSample.Status.COMPLETED
    return sample


def runner(function: Callable[..., Any] = by_ids, **more: Any) -> CustomGenerate:
    settings: dict[str, Any] = {
        "args": ARGS,
        "tokenizer": TOKENIZER,
        "sampling_params": PARAMS,
        "max_tokens": 100,
        "max_prompt_tokens": None,
        "end_token_ids": (END,),
        "template_kwargs": {},
        "branches_fit": lambda lengths: len(lengths) < 4,
    }
    return CustomGenerate(function, Settings(**(settings | more)))


def new_sample(index: int = 0) -> Sample:
    return Sample.from_prompt(ROW, group_index=0, index=index)


def run(agent: CustomGenerate, sample: Sample, policy: Any, row: Prompt = ROW) -> bool:
    return anyio.run(lambda: agent.run(sample, row, policy, seed=1))


class Scripted:
    """Writes the given tokens, turn by turn."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns = [*turns]

    async def __call__(self, sample: Sample, max_tokens: int | None = None, /) -> Generation:
        ids = self.turns.pop(0)[:max_tokens]
        return Generation(
            request_id="r",
            token_ids=ids,
            log_probs=[-1.0] * len(ids),
            sampling_log_probs=[-1.0] * len(ids),
            spans=[VersionSpan(7, 0, len(ids))],
            stop_reason=StopReason.EOS,
        )


@pytest.mark.parametrize("function", [by_ids, by_text])
def test_what_the_function_adds_has_no_loss(function: Callable[..., Any]) -> None:
    sample, more = new_sample(), encode(MORE)
    assert run(runner(function), sample, Policy())
    assert sample.prompt_ids == encode(PROMPT)
    assert sample.response_ids == [10, 11, *more, 20, 21]
    mask = [1.0, 1.0, *[0.0] * len(more), 1.0, 1.0]
    assert sample.loss_mask == [*[0.0] * len(encode(PROMPT)), *mask]
    assert [s.role for s in sample.segments] == ["prompt", "assistant", "tool", "assistant"]
    assert sample.status is Status.COMPLETED
    assert sample.episode is not None
    assert (sample.episode.turns, sample.episode.score) == (2, 0.5)


def test_the_answer_has_sglangs_form() -> None:
    answers: list[Any] = []

    async def once(args: Any, sample: Any, sampling_params: Any) -> Any:
        for asked in (True, False):
            ids = [1] if asked else [1, 10, END]
            payload = {"input_ids": ids, "return_logprob": asked, "rid": "a"}
            answers.append(await post(URL, payload))
        sample.tokens, sample.response_length = [1, 10, END, 11], 3
        return sample

    run(runner(once), new_sample(), Scripted([10, END], [11]))
    first, second = answers
    assert first == {
        "text": " neighbor",
        "output_ids": [10, END],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "stop", "matched": END},
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "cached_tokens": 0,
            "weight_version": "7",
            "output_token_logprobs": [[-1.0, 10, None], [-1.0, END, None]],
        },
    }
    assert second["meta_info"]["prompt_tokens"] == 3
    assert "output_token_logprobs" not in second["meta_info"]


def test_the_function_gets_the_row() -> None:
    seen: dict[str, Any] = {}

    async def look(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
        seen.update(vars(sample), evaluation=evaluation, params=sampling_params)
        return await by_ids(args, sample, sampling_params)

    assert run(runner(look, evaluation=True), new_sample(2), Policy())
    assert (seen["prompt"], seen["label"], seen["metadata"]) == (PROMPT, "4", {"index": 3})
    assert (seen["group_index"], seen["index"], seen["session_id"]) == (0, 2, "0/2")
    assert seen["evaluation"] is True
    assert seen["params"] == PARAMS
    assert seen["params"] is not PARAMS


def test_a_plain_text_prompt_stays_as_it_is() -> None:
    sample = new_sample()
    assert run(runner(), sample, Policy(), Prompt(uid="q", ids=[1], messages="who is ana ?"))
    assert sample.prompt_ids == encode("who is ana ?")


@pytest.mark.parametrize("function", [by_ids, by_text])
@pytest.mark.parametrize("stop_in", [0, 1])
def test_a_stopped_function_is_replayed_and_continues(
    function: Callable[..., Any], stop_in: int
) -> None:
    whole, sample = new_sample(), new_sample()
    run(runner(function), whole, Policy())
    policy = Policy(stop_in=stop_in)
    assert not run(runner(function), sample, policy)
    assert sample.status is Status.PENDING
    policy.limits.clear()
    assert run(runner(function), copy.deepcopy(sample), copy.deepcopy(policy))
    assert run(runner(function), sample, policy)
    assert sample == whole
    assert len(policy.limits) == 2 - stop_in  # recorded turns are not generated again


def test_a_replayed_turn_is_answered_as_before() -> None:
    """A turn that was cut at its limit, and then goes on."""
    reasons: list[str] = []

    async def pieces(args: Any, sample: Any, sampling_params: Any) -> Any:
        sample.tokens = encode(sample.prompt)
        for limit in (2, 9, 9):
            payload = {"input_ids": sample.tokens, "sampling_params": {"max_new_tokens": limit}}
            output = await post(URL, payload)
            reasons.append(output["meta_info"]["finish_reason"]["type"])
            ids = output["output_ids"]
            sample.append_response_tokens(args, tokens=ids, log_probs=[-1.0] * len(ids))
        return sample

    policy, sample = Policy(stop_in=2), new_sample()
    assert not run(runner(pieces), sample, policy)
    assert reasons == ["length", "stop"]
    reasons.clear()
    assert run(runner(pieces), sample, policy)
    assert reasons == ["length", "stop", "stop"]


def test_a_changed_text_in_the_replay_fails_the_sample() -> None:
    count = iter(range(9))

    async def dated(args: Any, sample: Any, sampling_params: Any) -> Any:
        sample.prompt += str(next(count))
        return await by_ids(args, sample, sampling_params)

    agent, sample, policy = runner(dated), new_sample(), Policy(stop_in=1)
    assert not run(agent, sample, policy)
    assert not run(agent, sample, policy)
    assert "another prompt" in (sample.failure or "")


def test_episodes_that_run_together_do_not_mix() -> None:
    async def slow(args: Any, sample: Any, sampling_params: Any) -> Any:
        sample.prompt += f" {sample.index}"
        await asyncio.sleep(0)
        # Tasks of the function belong to its episode.
        return await asyncio.create_task(by_ids(args, sample, sampling_params))

    class Slow(Policy):
        async def __call__(self, sample: Sample, max_tokens: int | None = None, /) -> Generation:
            assert sample.index is not None
            await anyio.sleep(0.001 * (4 - sample.index))
            return await super().__call__(sample, max_tokens)

    samples, agent = [new_sample(index) for index in range(4)], runner(slow)

    async def together() -> None:
        async with anyio.create_task_group() as tasks:
            for sample in samples:
                tasks.start_soon(partial(agent.run, sample, ROW, Slow(), seed=1))

    anyio.run(together)
    for index, sample in enumerate(samples):
        assert sample.prompt_ids == encode(f"{PROMPT} {index}")
        assert sample.response_ids == [10, 11, *encode(MORE), 20, 21]


def with_text(end: str, params: dict[str, Any]) -> Callable[..., Any]:
    """A function that writes `end` itself behind a turn."""

    async def function(args: Any, sample: Any, sampling_params: Any) -> Any:
        first = await post(URL, {"text": sample.prompt, "sampling_params": params})
        text = f"{sample.prompt}{first['text']}{end}{MORE}"
        second = await post(URL, {"text": text, "sampling_params": params})
        ids = [*first["output_ids"], *encode(MORE), *second["output_ids"]]
        sample.tokens, sample.response_length = [*encode(sample.prompt), *ids], len(ids)
        return sample

    return function


@pytest.mark.parametrize(
    ("end", "params"),
    [
        ("", {"skip_special_tokens": False, "no_stop_trim": True}),
        ("<end>", {"skip_special_tokens": False, "no_stop_trim": False}),
        ("<end>", {"skip_special_tokens": True, "no_stop_trim": True}),
        ("", {"skip_special_tokens": True}),
    ],
)
def test_an_end_token_stays_once_although_the_text_lacks_it(
    end: str, params: dict[str, Any]
) -> None:
    sample = new_sample()
    assert run(runner(with_text(end, params)), sample, Scripted([10, END], [20, END]))
    assert sample.response_ids == [10, END, *encode(MORE), 20, END]


def test_text_that_was_cut_fails_the_sample() -> None:
    async def cuts(args: Any, sample: Any, sampling_params: Any) -> Any:
        first = await post(URL, {"text": sample.prompt})
        return await post(URL, {"text": sample.prompt + first["text"][:3] + MORE})

    sample = new_sample()
    assert not run(runner(cuts), sample, Policy())
    assert "does not begin with the text" in (sample.failure or "")
    assert "rollout.stop" in (sample.failure or "")


def test_text_after_token_ids_fails_the_sample() -> None:
    async def changes(args: Any, sample: Any, sampling_params: Any) -> Any:
        first = await post(URL, {"input_ids": encode(sample.prompt)})
        return await post(URL, {"text": sample.prompt + first["text"] + MORE})

    sample = new_sample()
    assert not run(runner(changes), sample, Policy())
    assert "its tokens are not known" in (sample.failure or "")


def test_the_limit_of_a_turn_is_what_is_left() -> None:
    policy = Policy()
    run(runner(max_tokens=30), new_sample(), policy)
    assert policy.limits == [30, 28 - len(encode(MORE))]


def test_no_room_truncates_the_sample() -> None:
    async def empty(args: Any, sample: Any, sampling_params: Any) -> Any:
        sample.tokens = encode(sample.prompt)
        output = await post(URL, {"input_ids": sample.tokens, "sampling_params": ZERO})
        assert output["output_ids"] == []
        assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        sample.update_from_meta_info(args, output["meta_info"])
        return sample

    sample, policy = new_sample(), Policy()
    assert run(runner(empty), sample, policy)
    assert sample.status is Status.TRUNCATED
    assert policy.limits == []


@pytest.mark.parametrize("way", ["mask", "remove", "shorter"])
def test_tokens_can_be_excluded_from_the_loss(way: str) -> None:
    async def masked(args: Any, sample: Any, sampling_params: Any) -> Any:
        sample = await by_ids(args, sample, sampling_params)
        if way == "mask":
            sample.loss_mask = [0, *[1] * (sample.response_length - 1)]
        elif way == "remove":
            sample.remove_sample = True
        else:
            sample.tokens, sample.loss_mask = sample.tokens[:-1], sample.loss_mask[:-1]
            sample.response_length -= 1
        return sample

    sample = new_sample()
    assert run(runner(masked), sample, Policy())
    own = [x for s in sample.segments if s.role == "assistant" for x in s.loss_mask]
    expected = {"mask": [0.0, 1.0, 1.0, 1.0], "remove": [0.0] * 4, "shorter": [1.0, 1.0, 1.0, 0.0]}
    assert own == expected[way]
    assert not any(x for s in sample.segments if s.role == "tool" for x in s.loss_mask)


@pytest.mark.parametrize("status", ["TRUNCATED", "COMPLETED", "PENDING"])
def test_the_function_sets_the_status(status: str) -> None:
    async def ends(args: Any, sample: Any, sampling_params: Any) -> Any:
        sample = await by_ids(args, sample, sampling_params)
        sample.status, sample.reward = SlimeSample.Status[status], None
        return [sample]

    sample = new_sample()
    assert run(runner(ends), sample, Policy())
    assert sample.status is (Status.TRUNCATED if status == "TRUNCATED" else Status.COMPLETED)
    assert sample.episode is not None
    assert sample.episode.score is None  # the reward function scores it


def second_payload(how: str, prompt: list[int], known: list[int]) -> dict[str, Any] | None:
    """A second request that cannot be answered."""
    params: dict[str, dict[str, Any]] = {
        "temperature": {"temperature": 0.1},
        "stop": {"stop": "</search>"},
        "unknown": {"temprature": 1.0},
    }
    if how in params:
        return {"input_ids": known, "sampling_params": params[how]}
    payloads: dict[str, dict[str, Any]] = {
        "rewrite": {"input_ids": [*prompt, 99, 99]},
        "image": {"input_ids": known, "image_data": ["x"]},
        "batch": {"input_ids": [known]},
    }
    return payloads.get(how)


async def bad(how: str, args: Any, sample: Any, sampling_params: Any) -> Any:
    """Ends in one of several wrong ways."""
    prompt = encode(sample.prompt)
    url = URL.replace("/generate", "/v1/chat/completions") if how == "chat" else URL
    first = await post(url, {"input_ids": prompt} if how != "nothing" else {})
    known = prompt + first["output_ids"]
    sample.tokens, sample.response_length = known, 2
    if (payload := second_payload(how, prompt, known)) is not None:
        with contextlib.suppress(Exception):
            await post(URL, payload)
    if how == "raise":
        raise RuntimeError("broken function")
    if how == "args":
        return args.max_tokens_per_gpu
    changes: dict[str, dict[str, Any]] = {
        "abort": {"status": SlimeSample.Status.ABORTED},
        "tokens": {"tokens": [*prompt, 98, 98]},
        "prompt": {"response_length": 1},
        "nan": {"reward": float("nan")},
        "mask": {"loss_mask": [1]},
        "reward": {"reward": {"score": 1.0}},
    }
    vars(sample).update(changes.get(how, {}))
    return {"other": 1.0, "list": [sample, sample]}.get(how, sample)


def bad_one(how: str) -> Callable[..., Any]:
    async def function(args: Any, sample: Any, sampling_params: Any) -> Any:
        return await bad(how, args, sample, sampling_params)

    return function


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("rewrite", "append to them"),
        ("raise", "broken function"),
        ("args", "args.max_tokens_per_gpu of slime does not exist"),
        ("abort", "it set Sample.Status.ABORTED"),
        ("tokens", "not the tokens that were sampled"),
        ("prompt", "response_length=1"),
        ("nan", "sample.reward is nan"),
    ],
)
def test_a_function_that_goes_wrong_fails_its_sample(how: str, words: str) -> None:
    sample = new_sample()
    assert not run(runner(bad_one(how)), sample, Policy())
    assert sample.status is Status.FAILED
    assert words in (sample.failure or "")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("temperature", r"rollout\.temperature"),
        ("stop", r"rollout\.stop instead"),
        ("unknown", "did you mean temperature"),
        ("image", "image_data"),
        ("batch", "one request"),
        ("chat", "only /generate"),
        ("nothing", "input_ids or text"),
        ("mask", "sample.loss_mask"),
        ("reward", "set it to a number"),
        ("other", "must return a Sample, got float"),
        ("list", "returned 2 samples"),
    ],
)
def test_a_function_with_impossible_settings_ends_the_run(how: str, words: str) -> None:
    """Even if it catches the exception."""
    with pytest.raises(DataError, match=words):
        run(runner(bad_one(how)), new_sample(), Policy())


def test_a_failed_engine_fails_the_sample() -> None:
    sample = new_sample()
    assert not run(runner(), sample, Policy(fail=True))
    assert "no memory" in (sample.failure or "")


def test_arguments_that_may_be_missing_are_missing() -> None:
    assert getattr(ARGS, "use_rollout_routing_replay", None) is None
    assert copy.deepcopy(Arguments(a=1)).a == 1


def test_the_router_answers_only_in_an_episode() -> None:
    with pytest.raises(DataError, match="only in a custom generate function"):
        anyio.run(lambda: post(URL, {"input_ids": [1]}))


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """A server that fails once and then answers; its address, and what it was sent."""
    sent: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(500 if len(sent) == 1 else 200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"result": [1]}')

        def log_message(self, *_: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}/retrieve", sent
        found.shutdown()


def test_other_addresses_are_asked_by_http(server: tuple[str, list[bytes]]) -> None:
    url, sent = server
    assert anyio.run(lambda: post(url, {"q": 1}, 2)) == {"result": [1]}
    assert sent == [b'{"q":1}'] * 2


OTHER = [5, 6, 7]


def turn_of(output: dict[str, Any]) -> list[int]:
    return list(output["output_ids"])


async def two_contexts(args: Any, sample: Any, sampling_params: Any) -> Any:
    """An agent asks another one, which has a context of its own, and continues with its answer."""
    prompt = encode(sample.prompt)
    first = turn_of(await post(URL, {"input_ids": prompt}))
    worker = turn_of(await post(URL, {"input_ids": OTHER}))
    more = encode(MORE)
    known = [*prompt, *first, *more]
    last = turn_of(await post(URL, {"input_ids": known}))
    other = copy.deepcopy(sample)
    sample.tokens, sample.response_length = [*known, *last], len(first + more + last)
    sample.loss_mask = [1] * len(first) + [0] * len(more) + [1] * len(last)
    other.tokens, other.response_length = [*OTHER, *worker], len(worker)
    other.loss_mask = [1, *[0] * (len(worker) - 1)]
    sample.reward = other.reward = 0.25
    sample.status = other.status = SlimeSample.Status.COMPLETED
    return [sample, other]


def test_contexts_that_do_not_continue_each_other_are_branches() -> None:
    sample, more = new_sample(), encode(MORE)
    assert run(runner(two_contexts), sample, Policy())
    agent, worker = sample.branches
    assert (agent.branch, worker.branch, worker.parent) == (0, 1, 0)
    assert agent.prompt_ids == encode(PROMPT)
    assert agent.response_ids == [10, 11, *more, 30, 31]
    assert agent.loss_mask[len(agent.prompt_ids) :] == [1.0, 1.0, *[0.0] * len(more), 1.0, 1.0]
    assert (worker.prompt_ids, worker.response_ids) == (OTHER, [20, 21])
    assert worker.loss_mask == [0.0, 0.0, 0.0, 1.0, 0.0]
    assert sample.status is Status.COMPLETED
    assert sample.episode is not None
    assert (sample.episode.score, sample.episode.turns) == (0.5, 3)


@pytest.mark.parametrize("stop_in", [0, 1, 2])
def test_contexts_are_replayed(stop_in: int) -> None:
    whole, sample = new_sample(), new_sample()
    run(runner(two_contexts), whole, Policy())
    policy = Policy(stop_in=stop_in)
    assert not run(runner(two_contexts), sample, policy)
    assert sample.status is Status.PENDING
    policy.limits.clear()
    assert run(runner(two_contexts), sample, policy)
    assert sample == whole
    assert len(policy.limits) == 3 - stop_in


def test_each_context_must_be_returned() -> None:
    async def forgets(args: Any, sample: Any, sampling_params: Any) -> Any:
        return (await two_contexts(args, sample, sampling_params))[0]

    sample = new_sample()
    assert not run(runner(forgets), sample, Policy())
    assert "return a sample for each of 2 contexts" in (sample.failure or "")


def test_a_context_that_may_not_fit_truncates_the_sample() -> None:
    lengths: list[list[int]] = []

    def none_fits(found: Sequence[int]) -> bool:
        lengths.append([*found])
        return False

    async def asks_twice(args: Any, sample: Any, sampling_params: Any) -> Any:
        prompt = encode(sample.prompt)
        first = turn_of(await post(URL, {"input_ids": prompt}))
        assert turn_of(await post(URL, {"input_ids": OTHER})) == []
        sample.tokens, sample.response_length = prompt + first, len(first)
        return sample

    sample, prompt = new_sample(), encode(PROMPT)
    assert run(runner(asks_twice, branches_fit=none_fits), sample, Policy())
    assert sample.status is Status.TRUNCATED
    assert lengths == [[len(prompt) + 2, len(prompt) + 100]]


def test_rewards_of_some_contexts_end_the_run() -> None:
    async def half(args: Any, sample: Any, sampling_params: Any) -> Any:
        first, second = await two_contexts(args, sample, sampling_params)
        second.reward = None
        return [first, second]

    with pytest.raises(DataError, match="all or none"):
        run(runner(half), new_sample(), Policy())


def test_two_turns_at_the_same_time_fail_the_sample() -> None:
    async def both(args: Any, sample: Any, sampling_params: Any) -> Any:
        async with anyio.create_task_group() as tasks:
            for ids in (encode(sample.prompt), OTHER):
                tasks.start_soon(post, URL, {"input_ids": ids})

    policy = Policy()

    async def slow(sample: Sample, max_tokens: int | None = None, /) -> Generation:
        await anyio.lowlevel.checkpoint()
        return await policy(sample, max_tokens)

    sample = new_sample()
    assert not run(runner(both), sample, slow)
    assert "two turns at the same time" in (sample.failure or "")
