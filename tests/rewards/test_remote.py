"""`RemoteRewardManager` against a real server that sends prepared responses."""

from __future__ import annotations

import gzip
import math
import zlib
from typing import Any

import anyio
import pytest

from slipstream.errors import ConfigError, RewardError
from slipstream.rewards.load import load_reward_manager
from slipstream.rewards.protocol import Score
from slipstream.rewards.remote import (
    MAX_REPLY,
    MAX_RETRY_AFTER_S,
    RemoteRewardManager,
    _Reply,
)
from tests.rewards.helpers import decode, sample
from tests.rewards.server import Answer, serving


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Remote:
    """A manager that records its pauses instead of sleeping."""

    def __init__(self, url: str, **options: Any) -> None:
        self.paused: list[float] = []
        options = {"timeout_s": 20.0, "max_retries": 3} | options
        self.manager = RemoteRewardManager(decode=decode, url=url, sleep=self._sleep, **options)

    async def _sleep(self, seconds: float) -> None:
        self.paused.append(seconds)

    def score(self) -> Score:
        return anyio.run(self.manager.score_sample, sample(1, 2))


RIGHT: Answer = (200, {}, b'{"score": 0.5, "format": 1}')
BUSY: Answer = (429, {}, b"slow down")
DOWN: Answer = (503, {}, b"down")


def test_requests_have_verls_arguments_and_return_scores() -> None:
    with serving(RIGHT, (200, {}, b"0.25")) as server:
        remote = Remote(server.url, headers={"Authorization": "Bearer me"})
        assert remote.score() == Score(0.5, {"format": 1.0})
        assert remote.score() == Score(0.25)
    assert server.seen[0] == {
        "data_source": "exact_match",
        "solution_str": "1 2",
        "ground_truth": "1 2",
        "extra_info": {"index": 4, "num_turns": 1},
    }
    assert server.headers[0]["Authorization"] == "Bearer me"
    assert remote.paused == []


def test_busy_and_down_are_retried_with_doubling_pauses() -> None:
    with serving(BUSY, DOWN, (500, {}, b""), RIGHT) as server:
        remote = Remote(server.url, backoff_s=2.0, max_backoff_s=5.0)
        assert remote.score().value == 0.5
    assert remote.paused == [2.0, 4.0, 5.0]
    assert remote.manager.retries == 3
    assert len(server.seen) == 4


def test_retry_after_is_obeyed() -> None:
    waits = [(429, {"Retry-After": text}, b"busy") for text in ("7", "0.5", "Wed, 21 Oct 2026")]
    with serving(*waits, RIGHT) as server:
        remote = Remote(server.url)
        assert remote.score().value == 0.5
    assert remote.paused == [7.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("text", "pause"),
    [
        ("nan", 0.0),
        ("inf", 0.0),
        ("-inf", 0.0),
        ("-5", 0.0),
        ("1e9", MAX_RETRY_AFTER_S),
        ("9" * 400, 0.0),
        ("301", MAX_RETRY_AFTER_S),
        ("299.5", 299.5),
    ],
)
def test_retry_after_is_bounded(text: str, pause: float) -> None:
    with serving((503, {"Retry-After": text}, b"busy"), RIGHT) as server:
        remote = Remote(server.url, backoff_s=0.5)
        assert remote.score().value == 0.5
    assert remote.paused == [max(pause, 0.5)]


def test_the_pause_stops_growing() -> None:
    with serving(DOWN) as server:
        remote = Remote(server.url, max_retries=1, backoff_s=2.0)
        remote.manager._attempts = 2_000
        remote.manager._post = _down  # type: ignore[method-assign]
        assert str(remote.score().failure).endswith("after 2000 attempts")
    assert remote.paused[-1] == 30.0


async def _down(body: bytes) -> _Reply:
    return _Reply(503, b"down", 0.0)


def zipped(content: bytes) -> Answer:
    return 200, {"Content-Encoding": "gzip"}, gzip.compress(content)


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        ((200, {}, b"[" * 100_000), "answered with what is no JSON: '[[["),
        ((200, {}, b'{"score":' * 100_000), "answered with what is no JSON: "),
        ((200, {}, b"1" * 6_000), "answered with what is no JSON: '111"),
        ((200, {}, b" " * (MAX_REPLY + 1)), "HTTP 200: the reply is longer than 1,000,000 bytes"),
        ((500, {}, b"x" * (MAX_REPLY + 1)), "HTTP 500: the reply is longer than 1,000,000 bytes"),
        (zipped(b" " * 50_000_000), "the decompressed reply is longer than 1,000,000 bytes"),
        ((200, {"Content-Encoding": "gzip"}, b"0.5"), "the reply is not gzip: "),
        ((200, {"Content-Encoding": "gzip, gzip"}, b"0.5"), "the reply has the Content-Encoding "),
        ((200, {"Content-Encoding": "br"}, b"0.5"), "the reply has the Content-Encoding 'br'"),
        ((200, {"Content-Type": "text/plain; charset=zip"}, b"x"), "answered with what is no JSON"),
    ],
)
def test_what_a_service_sends_is_bounded(answer: Answer, failure: str) -> None:
    with serving(answer) as server:
        found = Remote(server.url).score().failure
        assert len(server.seen) == 1  # a second attempt would get the same
    assert found is not None
    assert found.startswith(failure)
    assert len(found) < 300


def test_compressed_replies_are_read() -> None:
    deflated: Answer = (200, {"Content-Encoding": "deflate"}, zlib.compress(b"0.25"))
    with serving(zipped(b'{"score": 0.5}'), deflated) as server:
        remote = Remote(server.url)
        assert [remote.score().value for _ in range(2)] == [0.5, 0.25]
    assert server.headers[0]["Accept-Encoding"] == "identity"


def test_data_that_json_cannot_hold_are_a_failure() -> None:
    one = sample(1)
    one.extra_info[(1, 2)] = 3  # type: ignore[index]
    with serving(RIGHT) as server:
        manager = Remote(server.url).manager
        failure = anyio.run(manager.score_sample, one).failure
        assert server.seen == []
    assert str(failure).startswith("TypeError: keys must be")


def test_a_server_that_stays_down_is_a_failure() -> None:
    with serving(DOWN) as server:
        remote = Remote(server.url)
        assert remote.score() == Score(0.0, failure="HTTP 503: down after 4 attempts")
        assert Remote(server.url, max_retries=0).score().failure == "HTTP 503: down"
        stopping = Remote(server.url, max_retries=0, on_failure="stop")
        with pytest.raises(RewardError, match=r"http://127.* failed on sample 'u1'.*HTTP 503"):
            stopping.score()
    assert remote.paused == [1.0, 2.0, 4.0]


@pytest.mark.parametrize("status", [400, 401, 404, 422, 302])
def test_permanent_errors_are_not_retried(status: int) -> None:
    with serving((status, {}, b"no such thing")) as server:
        remote = Remote(server.url)
        assert remote.score().failure == f"HTTP {status}: no such thing"
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b"<html>", "answered with what is no JSON: '<html>'"),
        (b'{"scor": 1}', "returned a mapping without 'score' (keys: scor)"),
        (b'"1"', "returned str, not a number"),
        (b"NaN", "returned nan, not a finite number"),
        (b"[1]", "returned list, not a number"),
        (b"\xff\xfe", "answered with what is no JSON: "),
    ],
)
def test_invalid_responses_are_failures(body: bytes, failure: str) -> None:
    with serving((200, {}, body)) as server:
        found = Remote(server.url).score().failure
    assert found is not None
    assert found.startswith(failure)


def test_timeouts_and_connection_errors_are_retried() -> None:
    with serving((200, {}, None), (200, {}, b""), RIGHT) as server:
        remote = Remote(server.url, timeout_s=0.5)
        assert remote.score().value == 0.5
    assert remote.manager.timeouts == 1
    assert remote.paused == [1.0, 2.0]
    # The server has stopped.
    failure = Remote(server.url, max_retries=1).score().failure
    assert failure is not None
    assert failure.startswith("ConnectError")
    assert failure.endswith("after 2 attempts")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://"}, r"url='http://' is not an address"),
        ({"url": "http://x:port"}, r"url='http://x:port' is not an address"),
        ({"url": 5}, r"url='5' is not an address"),
        ({"url": "http://x", "backoff_s": math.nan}, "backoff_s above 0"),
        ({"url": "http://x", "max_backoff_s": math.inf}, "max_backoff_s"),
        ({"url": "http://x", "max_retries": "3"}, r"reward_kwargs \['max_retries', 'url'\]"),
        ({"url": "http://x", "max_rpm": "3"}, r"reward_kwargs \['max_rpm', 'url'\]"),
        ({"url": "http://x", "max_concurrent": 1.5}, r"max_concurrent=1\.5 must be an integer"),
        ({"url": "localhost:80"}, r"url='localhost:80' is not an address"),
        ({"url": "http://x", "max_retries": -1}, "max_retries must be 0 or more"),
        (
            {"url": "http://x", "backoff_s": 9, "max_backoff_s": 3},
            "max_backoff_s at least backoff_s",
        ),
        ({"url": "http://x", "max_rpm": 0}, "max_rpm=0 .*above 0"),
        ({}, "url"),
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_reward_manager("remote", decode=decode, reward_kwargs=options)


def test_a_local_function_in_addition_is_refused() -> None:
    with pytest.raises(ConfigError, match="unset one of them"):
        RemoteRewardManager(lambda **_: 1.0, decode=decode, url="http://x")
