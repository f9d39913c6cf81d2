"""The heap keeps freed memory, and imports run without the garbage collector."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from slipstream.heap import without_garbage_collector

FAULTS = """
from slipstream.heap import freed_memory_is_kept, keep_freed_memory
assert not freed_memory_is_kept()
assert keep_freed_memory() and freed_memory_is_kept()
import resource, torch
from slipstream.training import ComputeThread

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(25_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

thread = ComputeThread()
print([thread.run(faults) for _ in range(8)][-1])
thread.close()
"""


def test_block_that_is_allocated_again_has_no_page_faults() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], check=True, stdout=subprocess.PIPE, text=True
    )
    # 100 MB are 24,414 pages. The first blocks may get different places.
    assert int(done.stdout) < 1000


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_stopped_in_the_body_only(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with without_garbage_collector():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
        with pytest.raises(ImportError), without_garbage_collector():
            raise ImportError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


EXIT = """
import atexit, gc
atexit.register(lambda: print("frozen" if gc.get_freeze_count() else "examined"))
from slipstream import cli
cli.main(["config", "trainer.seed"])
assert not gc.get_freeze_count()
"""


def test_command_ends_without_a_last_collection() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT], check=True, stdout=subprocess.PIPE, text=True
    )
    # Handlers run in reverse order, so the command's own one has already run.
    assert done.stdout.endswith("frozen\n")
