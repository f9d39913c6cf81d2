"""Keyed random draws are deterministic and uniform."""

from __future__ import annotations

from collections import Counter

from slipstream.data.keyed import KeyedDraws


def test_equal_keys_give_equal_draws_and_similar_keys_differ() -> None:
    first = [KeyedDraws("a", 1, 12).bits64() for _ in range(2)]
    assert first[0] == first[1]
    assert KeyedDraws("a", 11, 2).bits64() != first[0]
    draws = KeyedDraws("a", 1, 12)
    assert len({draws.bits64() for _ in range(100)}) == 100


def test_known_values_do_not_change_between_versions() -> None:
    assert KeyedDraws("problem", 0, 1).shuffled(range(8)) == [2, 5, 4, 3, 0, 1, 6, 7]


def test_draws_are_uniform() -> None:
    draws = KeyedDraws("uniform")
    counts = Counter(draws.below(5) for _ in range(10_000))
    assert set(counts) == set(range(5))
    # 2,000 expected, standard deviation 40.
    assert all(abs(count - 2000) < 200 for count in counts.values())
    units = [draws.unit() for _ in range(10_000)]
    assert all(0.0 <= u < 1.0 for u in units)
    assert abs(sum(units) / len(units) - 0.5) < 0.015


def test_shuffled_returns_a_uniform_permutation_without_changing_its_input() -> None:
    items = ["a", "b", "c"]
    counts = Counter(tuple(KeyedDraws("shuffle", i).shuffled(items)) for i in range(6000))
    assert items == ["a", "b", "c"]
    assert len(counts) == 6
    assert all(abs(count - 1000) < 150 for count in counts.values())
