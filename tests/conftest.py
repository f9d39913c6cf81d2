"""What holds for all tests: one thread, and no verdict that depends on how busy the machine is."""

from __future__ import annotations

import os

from hypothesis import settings

# Before torch is imported anywhere, and inherited by the processes that tests start. The tensors of
# tests are so small that a second thread costs more than it brings; OMP_NUM_THREADS=2 overrides.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("slipstream", deadline=None, print_blob=True)
settings.load_profile("slipstream")
