"""Kernels shared among threads give the same results as on one thread."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.kernels import team
from slipstream.models.decoder import Decoder
from tests.models.helpers import make_decoder, random_ids


def forward(decoder: Decoder) -> torch.Tensor:
    ids = random_ids(3, 60)
    with torch.no_grad():
        packed = decoder.pack(torch.float32)
        return packed.forward(ids, torch.arange(60).expand(3, -1)).final


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_threads(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder("qwen3")
    # Call it now, because the result is cached and would be False without a team.
    assert team.kernels_supported()
    monkeypatch.setattr(team, "_gomp", None)
    alone = forward(decoder)
    monkeypatch.undo()
    monkeypatch.setattr(team, "SHARED_FROM", 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(forward(decoder), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("lengths", [[60] * 4, [40, 80, 60, 60, 3], [200, 20, 10]])
@pytest.mark.parametrize("intermediate", [80, 72])
def test_threads_with_their_own_sequences_give_the_same_bits(
    lengths: list[int], intermediate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In bf16 each thread runs its own sequences if they divide evenly.
    decoder, before = make_decoder("qwen3", intermediate_size=intermediate), torch.get_num_threads()
    monkeypatch.setattr(team, "SHARED_FROM", 1)
    ids = random_ids(1, sum(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            with torch.no_grad():
                packed = decoder.pack(torch.bfloat16)
                results.append(packed.forward(ids, positions, lengths=lengths).final)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_kernels_use_the_thread_team_of_torch() -> None:
    # Otherwise kernels would silently run on one thread.
    assert team._gomp is not None
    maps = Path("/proc/self/maps").read_text().splitlines()
    loaded = {line.split()[-1] for line in maps if "libgomp" in line}
    assert len(loaded) == 1


def test_single_threaded_gives_the_same_results_on_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder, before = make_decoder("qwen3"), torch.get_num_threads()
    shared: list[int] = []
    monkeypatch.setattr(team, "SHARED_FROM", 1)
    library = team._gomp
    assert library is not None
    parallel, set_threads = library.GOMP_parallel, library.omp_set_num_threads

    class Counted:
        omp_set_num_threads = set_threads

        @staticmethod
        def GOMP_parallel(*arguments: object) -> object:  # noqa: N802
            shared.append(int(arguments[2]))  # type: ignore[call-overload]
            return parallel(*arguments)

    monkeypatch.setattr(team, "_gomp", Counted)
    torch.set_num_threads(2)
    try:
        expected = forward(decoder)
        assert shared
        assert set(shared) == {2}
        shared.clear()
        with team.single_threaded(True):
            assert torch.get_num_threads() == 1
            assert torch.equal(forward(decoder), expected)
        assert set(shared) == {1}
        assert torch.get_num_threads() == 2
        with team.single_threaded(False):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
