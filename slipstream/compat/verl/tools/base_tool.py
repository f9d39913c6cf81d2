"""verl's `verl.tools.base_tool`."""

from slipstream.environment.adapters.verl_schemas import (
    BaseTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
)

__all__ = ["BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"]
