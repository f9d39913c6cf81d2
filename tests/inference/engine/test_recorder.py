"""What recordings are given, and what is said of their memory."""

from __future__ import annotations

import logging

import pytest
import torch

from slipstream.inference.engine.recorder import Inputs, RecordedMemory


def test_inputs_are_filled_up_with_zeros() -> None:
    inputs = Inputs([(2, 3)], [torch.ones(2, 3)])
    address = inputs.buffers[0].data_ptr()
    inputs.fill([torch.full((1, 2), 5.0)])
    assert inputs.buffers[0].tolist() == [[5, 5, 0], [0, 0, 0]]
    assert inputs.buffers[0].data_ptr() == address


def test_memory_is_counted_by_rows_to_verify(caplog: pytest.LogCaptureFixture) -> None:
    memory = RecordedMemory("decode graph")
    assert memory.sentence() == "0 decode graphs take 0.0 MiB"
    for size, mebibytes in ((4, 3), (1, 1), (4, 2)):
        memory.add(size, mebibytes << 20)
    expected = (
        "3 decode graphs take 6.0 MiB: 1.0 MiB for 1 row of a request (1), "
        "5.0 MiB for 4 rows of a request (2)"
    )
    assert memory.nbytes == 6 << 20
    assert memory.sentence() == expected
    with caplog.at_level(logging.INFO):
        for _ in range(300):
            memory.stepped()
    assert caplog.messages == [expected]


def test_it_is_said_once_and_when_it_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    memory = RecordedMemory("decode graph")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            # Shorter than what is waited for.
            memory.add(1, 1 << 20)
            memory.clear()
        assert caplog.messages == [
            "1 decode graph takes 1.0 MiB: 1.0 MiB for 1 row of a request (1)"
        ]
        memory.add(1, 1 << 20)
        memory.add(8, 1 << 20)
        memory.clear()
        assert len(caplog.messages) == 2
        memory.clear()
    assert len(caplog.messages) == 2
    assert memory.nbytes == 0
