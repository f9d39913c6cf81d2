"""Acceptance of draft tokens on chains and trees, compared with an independent implementation."""

from __future__ import annotations

import random

from slipstream.sampling.accept import accepted_path


def test_a_chain_is_accepted_up_to_the_first_difference() -> None:
    tokens, parents = [9, 1, 2, 3], [-1, 0, 1, 2]
    assert accepted_path(tokens, parents, [5, 0, 0, 0]) == [0]
    assert accepted_path(tokens, parents, [1, 2, 7, 0]) == [0, 1, 2]
    assert accepted_path(tokens, parents, [1, 2, 3, 4]) == [0, 1, 2, 3]
    # Tokens after the first difference do not count, even if they are equal.
    assert accepted_path(tokens, parents, [1, 7, 3, 4]) == [0, 1]


def test_the_path_follows_the_chosen_child() -> None:
    #      0 -> 1 (token 4) -> 3 (token 6)
    #        -> 2 (token 5) -> 4 (token 6) -> 5 (token 7)
    tokens, parents = [9, 4, 5, 6, 6, 7], [-1, 0, 0, 1, 2, 4]
    assert accepted_path(tokens, parents, [5, 0, 6, 0, 7, 1]) == [0, 2, 4, 5]
    assert accepted_path(tokens, parents, [4, 6, 6, 0, 7, 1]) == [0, 1, 3]
    assert accepted_path(tokens, parents, [8, 6, 6, 0, 7, 1]) == [0]


def walk(tokens: list[int], parents: list[int], chosen: list[int]) -> list[int]:
    path, node = [0], 0
    while True:
        children = [i for i in range(1, len(tokens)) if parents[i] == node]
        accepted = [i for i in children if tokens[i] == chosen[node]]
        if not accepted:
            return path
        node = accepted[0]
        path.append(node)


def test_random_trees_match_the_independent_implementation() -> None:
    rng = random.Random(0)
    lengths = set()
    for _ in range(2000):
        count = rng.randrange(1, 12)
        parents = [-1, *(rng.randrange(i) for i in range(1, count))]
        tokens = [rng.randrange(3) for _ in range(count)]
        chosen = [rng.randrange(3) for _ in range(count)]
        path = accepted_path(tokens, parents, chosen)
        lengths.add(len(path))
        # Siblings in a real draft are distinct tokens; among duplicates the first counts.
        assert path == walk(tokens, parents, chosen)
    assert lengths >= {1, 2, 3, 4}
