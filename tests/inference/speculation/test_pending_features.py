"""Tests of pending features: their tokens and their memory addresses."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

from slipstream.inference.speculation.pending_features import (
    ENDED,
    PendingFeatureQueue,
    PendingFeatures,
    PendingRequest,
)


def numbered(*shape: int, start: int) -> Tensor:
    """Features of width 2 with consecutive numbers, so that each one is different."""
    count = int(np.prod(shape))
    return torch.arange(start, start + 2 * count, dtype=torch.float32).view(*shape, 2)


def found(pending: PendingFeatures) -> list[list[tuple[int, float]]]:
    """By request: each token with the first number of its feature, read by address. Checks that
    the padded form has the same."""
    numbers = np.array(pending.addresses())
    ids, features = pending.padded()
    assert features.is_contiguous()
    result, at = [], 0
    for row, count in enumerate(pending.counts_N.tolist()):
        part = slice(at, at + count)
        tokens = pending.tokens_T[part].tolist()
        firsts = [float(np.ctypeslib.as_array(_pointer(a), (2,))[0]) for a in numbers[part]]
        assert ids[row, :count].tolist() == tokens
        assert features[row, :count, 0].tolist() == firsts
        result.append(list(zip(tokens, firsts, strict=True)))
        at += count
    return result


def _pointer(address: int) -> object:
    return ctypes.cast(int(address), ctypes.POINTER(ctypes.c_float))


def test_features_of_one_step_keep_the_order_of_the_batch() -> None:
    rows, pending = [PendingRequest(0), PendingRequest(1)], PendingFeatureQueue(1 << 20)
    features = numbered(2, 3, start=0)
    pending.add(rows, [[7], [8, 9]], features)
    for same in (rows, list(rows)):  # the fast path, and sorting
        result = pending.of(same)
        assert result is not None
        assert found(result) == [[(7, 0.0)], [(8, 6.0), (9, 8.0)]]


def test_initial_features_come_before_those_of_steps() -> None:
    initial = numbered(2, start=100)
    rows = [PendingRequest(0, features_TD=initial, tokens=[1, 2]), PendingRequest(1)]
    pending = PendingFeatureQueue(1 << 20)
    first, second = numbered(1, 1, start=200), numbered(2, 2, start=300)
    pending.add([rows[1]], [[3]], first)
    pending.add(rows, [[4, 5], [6]], second)
    result = pending.of(rows)
    assert result is not None
    assert found(result) == [
        [(1, 100.0), (2, 102.0), (4, 300.0), (5, 302.0)],
        [(3, 200.0), (6, 304.0)],
    ]


def test_features_follow_moved_rows_and_omit_ended_requests() -> None:
    one, two, three = rows = [PendingRequest(0), PendingRequest(1), PendingRequest(2)]
    pending, features = PendingFeatureQueue(1 << 20), numbered(3, 1, start=0)
    pending.add(rows, [[1], [2], [3]], features)
    # The first request has ended, and the last one has moved to its row.
    one.index, three.index = ENDED, 0
    result = pending.of([three, two])
    assert result is not None
    assert found(result) == [[(3, 4.0)], [(2, 2.0)]]


def test_there_is_no_result_if_a_request_has_no_pending_feature() -> None:
    rows, pending = [PendingRequest(0), PendingRequest(1)], PendingFeatureQueue(1 << 20)
    assert pending.of(rows) is None
    pending.add([rows[0]], [[1]], numbered(1, 1, start=0))
    assert pending.of(rows) is None
    pending.add(rows, [[1], []], numbered(2, 1, start=0))
    assert pending.of(rows) is None


def test_the_oldest_steps_are_dropped_beyond_the_limit() -> None:
    row, pending = PendingRequest(0, cached=5), PendingFeatureQueue(limit=16)
    first, second, third = (numbered(1, 1, start=i) for i in range(3))
    pending.add([row], [[1]], first)
    pending.add([row], [[2]], second)
    assert (len(pending), pending.nbytes, row.cached) == (2, 16, 5)
    pending.add([row], [[3]], third)
    assert (len(pending), pending.nbytes, row.cached) == (2, 16, 0)
    result = pending.of([row])
    assert result is not None
    assert found(result) == [[(2, 1.0), (3, 2.0)]]
