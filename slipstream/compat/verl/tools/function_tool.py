"""verl's `verl.tools.function_tool`."""

from slipstream.environment.tools.function import function_tool

__all__ = ["function_tool"]
