"""Builds the sandbox in which programs of the policy run."""

from __future__ import annotations

from slipstream.config.schema import Config
from slipstream.rewards.sandbox.load import load_sandbox
from slipstream.rewards.sandbox.protocol import ProgramLimits, Sandbox

_SANDBOX_STARTS_S = 2.0
"""Extra seconds for starting and ending a program."""


def make_sandbox(config: Config) -> Sandbox:
    """The sandbox for programs in responses."""
    rewards = config.reward_model
    fusion, local = rewards.sandbox_fusion, rewards.sandbox
    total = local.total_timeout_s
    if total is None:
        total = max(rewards.timeout_s - local.run_timeout_s - _SANDBOX_STARTS_S, 0.0)
    limits = ProgramLimits(
        run_timeout_s=local.run_timeout_s,
        compile_timeout_s=local.compile_timeout_s,
        total_timeout_s=total,
        memory_mb=fusion.memory_limit_mb,
        files_mb=local.files_mb,
        output_kb=local.output_kb,
        processes=local.processes,
    )
    return load_sandbox(
        limits,
        url=fusion.url,
        max_concurrent=fusion.max_concurrent,
        python=local.python,
        isolated=not local.run_untrusted_code_without_isolation,
    )
