"""The sandbox that settings ask for. Called by the loops and by `slipstream reward`."""

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
    """The service at `url`, else this machine: with the interpreter `python`, and by bubblewrap,
    unless `isolated` is False. Whether this machine can isolate is found out by the first program.
    """
    if url is None:
        kind = BubblewrapSandbox if isolated else UnisolatedSandbox
        return kind(limits, python=python)
    return FusionSandbox(url, limits, max_concurrent=max_concurrent)
