"""verl's `verl.experimental.agent_loop.agent_loop`."""

from slipstream.rollout.agents.verl import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    TokenOutput,
    register,
)

__all__ = ["AgentLoopBase", "AgentLoopMetrics", "AgentLoopOutput", "TokenOutput", "register"]
