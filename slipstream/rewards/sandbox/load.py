"""Creates the sandbox that the settings select. Called by the loops and by `slipstream reward`."""

from __future__ import annotations

from slipstream.rewards.sandbox.fusion import FusionSandbox
from slipstream.rewards.sandbox.local import BubblewrapSandbox, UnisolatedSandbox
from slipstream.rewards.sandbox.protocol import DEFAULT_LIMITS, ProgramLimits, Sandbox


def load_sandbox(
    limits: ProgramLimits = DEFAULT_LIMITS,
    *,
    url: str | None = None,
    max_concurrent: int = 64,
    python: str | None = None,
    isolated: bool = True,
) -> Sandbox:
    """Return a sandbox: the service at `url`, or if it is None this machine.

    On this machine `python` is the interpreter of Python programs, and bubblewrap isolates them
    unless `isolated` is False. Whether isolation works is checked when the first program runs.
    """
    if url is None:
        kind = BubblewrapSandbox if isolated else UnisolatedSandbox
        return kind(limits, python=python)
    return FusionSandbox(url, limits, max_concurrent=max_concurrent)
