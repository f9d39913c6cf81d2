"""Features that wait: which token each belongs to, and where it lies."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from slipstream.inference.speculation.pending_features import (
    GONE,
    PendingFeatureQueue,
    PendingFeatures,
    PendingRequest,
)


def numbered(*shape: int, start: int) -> Tensor:
    """Features of two numbers, each line its own."""
    count = int(np.prod(shape))
    return torch.arange(start, start + 2 * count, dtype=torch.float32).view(*shape, 2)


def found(waiting: PendingFeatures) -> list[list[tuple[int, float]]]:
    """By request, each token with the first number of its feature: read by address, and checked
    against the padded form."""
    numbers = np.array(waiting.addresses())
    ids, features = waiting.padded()
    assert features.is_contiguous()
    result, at = [], 0
    for row, count in enumerate(waiting.counts_N.tolist()):
        part = slice(at, at + count)
        tokens = waiting.tokens_T[part].tolist()
        firsts = [float(np.ctypeslib.as_array(_pointer(a), (2,))[0]) for a in numbers[part]]
        assert ids[row, :count].tolist() == tokens
        assert features[row, :count, 0].tolist() == firsts
        result.append(list(zip(tokens, firsts, strict=True)))
        at += count
    return result


def _pointer(address: int) -> object:
    return ctypes.cast(int(address), ctypes.POINTER(ctypes.c_float))


def test_one_step_of_the_same_batch() -> None:
    rows, waiting = [PendingRequest(0), PendingRequest(1)], PendingFeatureQueue(1 << 20)
    features = numbered(2, 3, start=0)
    waiting.add(rows, [[7], [8, 9]], features)
    for same in (rows, list(rows)):  # in order already, and sorted
        result = waiting.of(same)
        assert result is not None
        assert found(result) == [[(7, 0.0)], [(8, 6.0), (9, 8.0)]]


def test_what_a_request_began_with_comes_before_its_steps() -> None:
    begun = numbered(2, start=100)
    rows = [PendingRequest(0, features_TD=begun, tokens=[1, 2]), PendingRequest(1)]
    waiting = PendingFeatureQueue(1 << 20)
    first, second = numbered(1, 1, start=200), numbered(2, 2, start=300)
    waiting.add([rows[1]], [[3]], first)
    waiting.add(rows, [[4, 5], [6]], second)
    result = waiting.of(rows)
    assert result is not None
    assert found(result) == [
        [(1, 100.0), (2, 102.0), (4, 300.0), (5, 302.0)],
        [(3, 200.0), (6, 304.0)],
    ]


def test_rows_that_moved_and_rows_that_are_gone() -> None:
    one, two, three = rows = [PendingRequest(0), PendingRequest(1), PendingRequest(2)]
    waiting, features = PendingFeatureQueue(1 << 20), numbered(3, 1, start=0)
    waiting.add(rows, [[1], [2], [3]], features)
    # The first has ended: the last one takes its place.
    one.index, three.index = GONE, 0
    result = waiting.of([three, two])
    assert result is not None
    assert found(result) == [[(3, 4.0)], [(2, 2.0)]]


def test_a_request_of_which_nothing_waits() -> None:
    rows, waiting = [PendingRequest(0), PendingRequest(1)], PendingFeatureQueue(1 << 20)
    assert waiting.of(rows) is None
    waiting.add([rows[0]], [[1]], numbered(1, 1, start=0))
    assert waiting.of(rows) is None
    waiting.add(rows, [[1], []], numbered(2, 1, start=0))
    assert waiting.of(rows) is None


def test_beyond_the_limit_rows_begin_anew() -> None:
    row, waiting = PendingRequest(0, cached=5), PendingFeatureQueue(limit=16)
    first, second, third = (numbered(1, 1, start=i) for i in range(3))
    waiting.add([row], [[1]], first)
    waiting.add([row], [[2]], second)
    assert (len(waiting), waiting.nbytes, row.cached) == (2, 16, 5)
    waiting.add([row], [[3]], third)
    assert (len(waiting), waiting.nbytes, row.cached) == (2, 16, 0)
    result = waiting.of([row])
    assert result is not None
    assert found(result) == [[(2, 1.0), (3, 2.0)]]
