"""Choice of the draft vocabulary from the tokens that a policy wrote."""

from __future__ import annotations

import random

import pytest

from slipstream.drafter.vocabulary import LARGE, TokenCounts, best_size
from tests.models.helpers import config


def counted(vocab_size: int, *responses: list[int]) -> TokenCounts:
    counts = TokenCounts(vocab_size)
    for response in responses:
        counts.add(response)
    return counts


def test_most_frequent_tokens_are_sorted_by_id() -> None:
    counts = counted(8, [3, 1, 3], [5, 5, 1, 3])
    assert counts.most_frequent(2) == [1, 3]
    assert counts.most_frequent(2, always=[7]) == [3, 7]
    # Among equally frequent tokens, an earlier vocabulary comes first, then the lowest ids.
    assert counts.most_frequent(2, before=[5]) == [3, 5]
    assert counted(8, [6]).most_frequent(3) == [0, 1, 6]
    assert counted(8, [6]).most_frequent(3, before=[4, 5]) == [4, 5, 6]


def test_coverage_is_a_share_of_the_counts() -> None:
    counts = counted(8, [3, 3, 1, 5])
    assert counts.coverage([3, 4]) == 0.5
    assert TokenCounts(8).coverage([1]) == 1.0
    counts.fade(0.25)
    counts.add([4])
    assert counts.coverage([4]) == 0.5


@pytest.mark.parametrize(
    ("words", "size"), [(300, 1024), (3000, 4096), (6000, 8192), (LARGE, None), (60_000, None)]
)
def test_the_size_follows_coverage_and_cost(words: int, size: int | None) -> None:
    """Responses use `words` different tokens equally often."""
    rng = random.Random(words)
    policy = config("llama", vocab_size=65_536, hidden_size=64, num_layers=400)
    responses = [[rng.randrange(words) for _ in range(1000)] for _ in range(200)]
    if size is None and words == LARGE:
        policy = config("llama", vocab_size=LARGE)
    assert best_size(responses, policy) == size


def test_the_samples_of_a_prompt_are_in_the_same_half() -> None:
    # The two samples of a prompt are equal, and different prompts have no token in common.
    policy = config("llama", vocab_size=65_536, num_layers=500)
    texts = [[*range(60_000 + 100 * n, 60_100 + 100 * n)] for n in range(20)]
    responses = [text for text in texts for _ in range(2)]
    prompts = [prompt for prompt in range(20) for _ in range(2)]
    assert best_size(responses, policy, prompts) is None
    assert best_size(responses, policy) == 2048


def test_one_response_is_too_little_to_choose_a_size() -> None:
    assert best_size([[1, 2, 3]], config("llama", vocab_size=65_536)) is None
