"""Input buffers of recordings, and the log message about their memory."""

from __future__ import annotations

import logging

import pytest
import torch

from slipstream.inference.engine.recorder import Inputs, RecordedMemory


def test_input_buffers_keep_their_address_and_are_padded_with_zeros() -> None:
    inputs = Inputs([(2, 3)], [torch.ones(2, 3)])
    address = inputs.buffers[0].data_ptr()
    inputs.fill([torch.full((1, 2), 5.0)])
    assert inputs.buffers[0].tolist() == [[5, 5, 0], [0, 0, 0]]
    assert inputs.buffers[0].data_ptr() == address


def test_memory_is_counted_by_tokens_per_request(caplog: pytest.LogCaptureFixture) -> None:
    memory = RecordedMemory("decode graph")
    assert memory.sentence() == "0 decode graphs use 0.0 MiB"
    for size, mebibytes in ((4, 3), (1, 1), (4, 2)):
        memory.add(size, mebibytes << 20)
    expected = (
        "3 decode graphs use 6.0 MiB: 1.0 MiB for 1 token per request (1), "
        "5.0 MiB for 4 tokens per request (2)"
    )
    assert memory.nbytes == 6 << 20
    assert memory.sentence() == expected
    with caplog.at_level(logging.INFO):
        for _ in range(300):
            memory.stepped()
    assert caplog.messages == [expected]


def test_memory_names_the_unit_of_its_sizes() -> None:
    memory = RecordedMemory("choice graph", ("row", "rows"))
    memory.add(1, 1 << 20)
    memory.add(16, 1 << 20)
    assert memory.sentence() == (
        "2 choice graphs use 2.0 MiB: 1.0 MiB for 1 row (1), 1.0 MiB for 16 rows (1)"
    )


def test_memory_is_logged_once_and_again_after_changes(caplog: pytest.LogCaptureFixture) -> None:
    memory = RecordedMemory("decode graph")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            # Cleared before the number of steps after which it is logged.
            memory.add(1, 1 << 20)
            memory.clear()
        assert caplog.messages == [
            "1 decode graph uses 1.0 MiB: 1.0 MiB for 1 token per request (1)"
        ]
        memory.add(1, 1 << 20)
        memory.add(8, 1 << 20)
        memory.clear()
        assert len(caplog.messages) == 2
        memory.clear()
    assert len(caplog.messages) == 2
    assert memory.nbytes == 0
