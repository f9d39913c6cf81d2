"""The replay of recorded rollouts by drafts from history."""

from __future__ import annotations

from bench.history import Sample, replay

PROMPT = [1, 2, 3]
RESPONSE = list(range(20, 30))


def test_a_response_that_repeats_is_drafted_from_the_one_before() -> None:
    rollout: list[Sample] = [(PROMPT, RESPONSE), (PROMPT, RESPONSE)]
    tokens, found, drafted, accepted = replay([rollout], 1)
    # All ten tokens of the second response have drafts: five, then fewer near the end.
    assert (tokens, found) == (20, 10)
    assert drafted == accepted == 6 * 5 + 4 + 3 + 2 + 1


def test_a_running_response_drafts_for_one_that_is_behind() -> None:
    # The second response writes three more tokens first. At the same time, the first one has
    # written the tokens that follow.
    late: Sample = (PROMPT, [60, 61, 62, *RESPONSE])
    tokens, found, drafted, accepted = replay([[(PROMPT, RESPONSE), late]], 2)
    assert tokens == 23
    assert found > 0
    assert drafted == accepted
    assert replay([[(PROMPT, RESPONSE), ([4, 5, 6], late[1])]], 2)[1:] == (0, 0, 0)


def test_wrong_drafts_are_not_accepted() -> None:
    other = [*RESPONSE[:5], *range(70, 75)]
    tokens, found, drafted, accepted = replay([[(PROMPT, RESPONSE), (PROMPT, other)]], 1)
    # At tokens 1 to 5 the draft begins with 5, 4, 3, 2, 1 right ones; at token 6 with none.
    assert (tokens, found, accepted) == (20, 6, 15)
    assert drafted > accepted
