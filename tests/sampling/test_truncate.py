"""Top-k, top-p and min-p with the tie rule: equal values go to the lowest token id."""

from __future__ import annotations

import itertools
import random

import torch

from slipstream.sampling import truncate


def kept(probs: list[float], *, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    log_probs = torch.tensor([probs]).log()
    support = truncate(
        log_probs,
        torch.tensor([top_k]),
        torch.tensor([top_p], dtype=torch.float64),
        torch.tensor([min_p], dtype=torch.float64),
    )
    return set(support[0].nonzero().flatten().tolist())


def test_nothing_is_truncated_if_all_rules_are_off() -> None:
    assert kept([0.1, 0.2, 0.7]) == {0, 1, 2}
    assert kept([0.1, 0.2, 0.7], top_k=-1) == {0, 1, 2}
    assert kept([0.1, 0.2, 0.7], top_k=99) == {0, 1, 2}


def test_top_k_keeps_the_lowest_ids_of_a_tie() -> None:
    values = [0.3, 0.1, 0.1, 0.3, 0.1, 0.1]
    assert kept(values, top_k=1) == {0}
    assert kept(values, top_k=2) == {0, 3}
    assert kept(values, top_k=3) == {0, 1, 3}
    assert kept(values, top_k=5) == {0, 1, 2, 3, 4}


def test_ties_go_to_the_lowest_ids_under_every_permutation() -> None:
    for order in set(itertools.permutations([0.3, 0.3, 0.1, 0.1, 0.1, 0.1])):
        high = [i for i, p in enumerate(order) if p == 0.3]
        low = [i for i, p in enumerate(order) if p == 0.1]
        assert kept(list(order), top_k=1) == {high[0]}
        assert kept(list(order), top_k=4) == {*high, *low[:2]}
        # 0.3 + 0.3 = 0.6, so the lowest of the equal tokens is added.
        assert kept(list(order), top_p=0.65) == {*high, low[0]}
        assert kept(list(order), top_p=0.75) == {*high, *low[:2]}


def test_ties_go_to_the_lowest_ids_in_a_wide_row() -> None:
    # torch sorts long rows with other kernels than short ones.
    row = torch.tensor([random.Random(0).choice([-1.0, -2.0, -3.0]) for _ in range(5000)])
    for k in (1, 100, 1700, 4000):
        support = truncate(
            row[None], torch.tensor([k]), torch.ones(1).double(), torch.zeros(1).double()
        )[0]
        order = sorted(range(5000), key=lambda i: (-float(row[i]), i))
        assert set(support.nonzero().flatten().tolist()) == set(order[:k])


def test_top_p_keeps_the_smallest_set_that_reaches_its_mass() -> None:
    values = [1 / 7, 2 / 7, 4 / 7]
    assert kept(values, top_p=1e-30) == {2}
    assert kept(values, top_p=0.57) == {2}
    assert kept(values, top_p=0.58) == {1, 2}
    assert kept(values, top_p=0.85) == {1, 2}
    assert kept(values, top_p=0.86) == {0, 1, 2}


def test_top_p_limits_are_exact_for_exact_probabilities() -> None:
    values = [0.5, 0.25, 0.125, 0.125]
    assert kept(values, top_p=0.5) == {0}
    assert kept(values, top_p=0.75) == {0, 1}
    assert kept(values, top_p=0.875) == {0, 1, 2}


def test_min_p_is_relative_to_the_largest_probability() -> None:
    assert kept([0.5, 0.25, 0.125, 0.125], min_p=0.49) == {0, 1}
    assert kept([0.5, 0.25, 0.125, 0.125], min_p=0.51) == {0}
    assert kept([0.5, 0.25, 0.125, 0.125], min_p=0.24) == {0, 1, 2, 3}


def test_top_p_applies_after_top_k() -> None:
    values = [0.4, 0.3, 0.2, 0.1]
    # Among the first two, renormalized, the first has 4/7 = 0.571.
    assert kept(values, top_k=2, top_p=0.57) == {0}
    assert kept(values, top_k=2, top_p=0.58) == {0, 1}
    assert kept(values, top_p=0.57) == {0, 1}
    assert kept(values, top_k=3, top_p=0.99, min_p=0.6) == {0, 1}


def test_each_row_uses_its_own_settings() -> None:
    rows = torch.randn(6, 301, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    rows = (rows * 8).round() / 8  # many ties
    top_k = torch.tensor([0, 5, 0, 0, 7, 300])
    top_p = torch.tensor([1.0, 1.0, 0.7, 1.0, 0.9, 0.3], dtype=torch.float64)
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.2, 0.1, 0.0], dtype=torch.float64)
    together = truncate(rows, top_k, top_p, min_p)
    for i in range(6):
        one = slice(i, i + 1)
        assert torch.equal(truncate(rows[one], top_k[one], top_p[one], min_p[one])[0], together[i])
    assert together.sum(-1)[:2].tolist() == [301, 5]
