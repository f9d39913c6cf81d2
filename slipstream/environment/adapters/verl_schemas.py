"""The classes of VERL's tool schemas and answers, with the names that users' tools import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from slipstream.errors import ConfigError

T = TypeVar("T", bound="_Schema")


class _Schema:
    """Conversions as in pydantic, which VERL's classes use."""

    @classmethod
    def model_validate(cls: type[T], value: Any) -> T:
        """Return an object of a mapping. Raises ConfigError if it is none, or lacks a field."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"a tool schema must be a mapping, got {type(value).__name__}")
        known = {f.name for f in fields(cls)}  # type: ignore[arg-type]
        try:
            return cls(**{key: part for key, part in value.items() if key in known})
        except TypeError as error:
            raise ConfigError(f"a tool schema is incomplete: {error}") from error

    def model_dump(self, **_: Any) -> dict[str, Any]:
        """Return the object as a dictionary, without fields that are None."""
        return _without_none(asdict(self))  # type: ignore[call-overload, no-any-return]


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_none(one) for one in value]
    return value


@dataclass(slots=True, kw_only=True)
class OpenAIFunctionPropertySchema(_Schema):
    """A parameter of a function."""

    type: str | list[str]
    description: str | None = None
    enum: list[str] | None = None


@dataclass(slots=True, kw_only=True)
class OpenAIFunctionParametersSchema(_Schema):
    """The parameters of a function. Properties may have any fields of JSON schemas."""

    type: str = "object"
    properties: dict[str, Any] = field(default_factory=dict)
    required: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class OpenAIFunctionSchema(_Schema):
    """A function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = field(
        default_factory=OpenAIFunctionParametersSchema
    )
    strict: bool = False

    def __post_init__(self) -> None:
        self.parameters = OpenAIFunctionParametersSchema.model_validate(self.parameters)


@dataclass(slots=True, kw_only=True)
class OpenAIFunctionToolSchema(_Schema):
    """A tool."""

    type: str = "function"
    function: OpenAIFunctionSchema

    def __post_init__(self) -> None:
        self.function = OpenAIFunctionSchema.model_validate(self.function)


@dataclass(slots=True)
class ToolResponse:
    """The answer of a tool. Images and videos are not supported: models here read text."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None


class BaseTool:
    """The base class of VERL's tools. A subclass implements `execute`."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None
    ) -> None:
        """`tool_schema` None: the one that `get_openai_tool_schema` returns."""
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ConfigError(f"{type(self).__name__} needs a tool_schema")
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return the schema of the tool."""
        found: OpenAIFunctionToolSchema | None = getattr(self, "tool_schema", None)
        return found  # type: ignore[return-value]

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Begin an episode. Returns the id of its state."""
        return instance_id or "", ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Answer a call. Returns the answer, a reward and metrics."""
        raise NotImplementedError(f"{type(self).__name__} must implement execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return the reward of the whole episode."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an episode."""
        return
