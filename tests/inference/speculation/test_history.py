"""Tests of drafts from earlier text."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.inference.speculation.history import HistoryProposer

PROMPT = (1, 2, 3)


def drafts(proposer: HistoryProposer, name: str, count: int = 4) -> list[int]:
    return proposer.drafts(name, count)


def finished(proposer: HistoryProposer, name: str, response: Sequence[int]) -> None:
    proposer.begin(name, PROMPT, PROMPT)
    proposer.observe([name], [response])
    proposer.end(name)


def test_drafts_come_from_the_requests_own_context() -> None:
    proposer = HistoryProposer()
    proposer.begin("a", PROMPT, PROMPT)
    assert drafts(proposer, "a") == []
    proposer.observe(["a"], [[7, 8, 9, 10, 11, 5, 7, 8]])
    assert drafts(proposer, "a") == []
    proposer.observe(["a"], [[9]])
    assert drafts(proposer, "a") == [10, 11, 5, 7]
    assert drafts(proposer, "a", 2) == [10, 11]


def test_drafts_come_from_finished_responses_to_the_same_prompt_only() -> None:
    proposer = HistoryProposer()
    finished(proposer, "a", [20, 21, 22, 23, 24])
    proposer.begin("b", PROMPT, [*PROMPT, 20, 21, 22])
    assert drafts(proposer, "b") == [23, 24]
    proposer.begin("c", (1, 2, 4), (1, 2, 4, 20, 21, 22))
    assert drafts(proposer, "c") == []
    # The first token of a response can be drafted, because the end of the prompt matches.
    proposer.begin("d", PROMPT, PROMPT)
    assert drafts(proposer, "d") == [20, 21, 22, 23]


def test_drafts_come_from_running_responses_to_the_same_prompt() -> None:
    proposer = HistoryProposer()
    proposer.begin("a", PROMPT, PROMPT)
    proposer.begin("b", PROMPT, PROMPT)
    proposer.begin("c", (1, 2, 4), (1, 2, 4))
    for name in "abc":
        assert drafts(proposer, name) == []
    proposer.observe(["a", "b", "c"], [[20, 21, 22, 23, 24], [20, 21, 22], [20, 21, 22]])
    # The response of `a` is known from its next draft on.
    assert drafts(proposer, "a") == []
    assert drafts(proposer, "b") == [23, 24]
    assert drafts(proposer, "c") == []
    # It grows.
    proposer.observe(["a"], [[25, 26]])
    assert drafts(proposer, "b") == [23, 24, 25, 26]
    # Where it is as long as the other one, it has nothing to propose.
    proposer.observe(["b"], [[23, 24, 25, 26]])
    assert drafts(proposer, "a") == []
    assert drafts(proposer, "b") == []
    # After its end it is a finished response, and no longer a running one.
    proposer.observe(["a"], [[27, 28]])
    ended = proposer._running["a"].context
    proposer.end("a")
    beside = proposer._beside[PROMPT].index.places
    assert all(text is not ended for places in beside.values() for text, _ in places)
    assert beside
    assert drafts(proposer, "b") == [27, 28]
    proposer.forget()
    assert drafts(proposer, "b") == []
    proposer.end("b")
    proposer.end("c")
    assert not proposer._beside


def test_a_running_response_is_found_although_the_prompt_has_a_shorter_match() -> None:
    prompt = (1, 2, 3, 21, 22, 23, 90)
    proposer = HistoryProposer()
    proposer.begin("a", prompt, prompt)
    proposer.begin("b", prompt, prompt)
    proposer.observe(["a", "b"], [[20, 21, 22, 23, 24, 25], [20, 21, 22, 23]])
    assert drafts(proposer, "a") == []
    assert drafts(proposer, "b") == [24, 25]


def test_the_longest_match_wins_then_the_latest() -> None:
    proposer = HistoryProposer(match=2)
    finished(proposer, "a", [50, 30, 31, 70])
    finished(proposer, "b", [60, 30, 31, 80])
    proposer.begin("c", PROMPT, [*PROMPT, 50, 30, 31])
    assert drafts(proposer, "c", 1) == [70]
    proposer.begin("d", PROMPT, [*PROMPT, 40, 30, 31])
    assert drafts(proposer, "d", 1) == [80]


def test_memory_is_limited_and_the_oldest_prompt_is_dropped_first() -> None:
    proposer = HistoryProposer(max_tokens=40)
    for prompt in range(10):
        name = f"p{prompt}"
        proposer.begin(name, (prompt, 1, 2), (prompt, 1, 2))
        proposer.observe([name], [range(100, 110)])
        proposer.end(name)
        assert proposer.kept_tokens <= 40
    for prompt in range(10):
        name = f"q{prompt}"
        proposer.begin(name, (prompt, 1, 2), (prompt, 1, 2, 100, 101, 102))
        assert bool(drafts(proposer, name)) == (prompt >= 7)


def test_the_oldest_response_to_a_prompt_is_dropped_first() -> None:
    proposer = HistoryProposer(max_tokens=40)
    for text in range(9):
        finished(proposer, f"t{text}", [10 * text + i for i in range(2, 12)])
        assert proposer.kept_tokens == 13 * min(text + 1, 3)
    for text in range(9):
        name = f"u{text}"
        proposer.begin(name, PROMPT, [*PROMPT, *(10 * text + i for i in range(2, 6))])
        assert bool(drafts(proposer, name)) == (text >= 6)
        proposer.end(name)
    (past,) = proposer._past.values()
    assert past.texts == len(proposer._texts) == 3
    # The index has no places in dropped texts.
    assert {id(text) for p in past.index.places.values() for text, _ in p} == {
        id(text) for _, text in proposer._texts
    }


def test_an_interrupted_response_is_remembered_once() -> None:
    proposer = HistoryProposer(longest_match=4)
    prompt = tuple(range(50))
    proposer.begin("a", prompt, prompt)
    proposer.observe(["a"], [[60, 61, 62, 63, 64]])
    proposer.end("a")
    assert proposer.kept_tokens == 4 + 5
    proposer.begin("a", prompt, [*prompt, 60, 61, 62, 63, 64])
    proposer.end("a")
    assert proposer.kept_tokens == 4 + 5
    proposer.begin("a", prompt, [*prompt, 60, 61, 62, 63, 64])
    proposer.observe(["a"], [[65, 66]])
    proposer.end("a")
    assert proposer.kept_tokens == 4 + 5 + 4 + 2
    proposer.begin("b", prompt, [*prompt, 60, 61, 62])
    assert drafts(proposer, "b") == [63, 64]
    proposer.begin("c", prompt, [*prompt, 63, 64, 65])
    assert drafts(proposer, "c") == [66]


def test_finished_responses_can_be_forgotten() -> None:
    proposer = HistoryProposer()
    finished(proposer, "a", [20, 21, 22, 23, 24])
    proposer.forget()
    assert proposer.kept_tokens == 0
    proposer.begin("b", PROMPT, [*PROMPT, 20, 21, 22])
    assert drafts(proposer, "b") == []


def test_the_end_of_an_unknown_request_is_ignored() -> None:
    HistoryProposer().end("unknown")
