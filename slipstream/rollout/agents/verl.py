"""Agent loops written for VERL: classes derived from `AgentLoopBase`, chosen by a row's
`agent_name`.

    @register("my_agent")
    class MyAgent(AgentLoopBase):
        async def run(self, sampling_params, **row) -> AgentLoopOutput:
            output = await self.server_manager.generate(
                request_id=..., prompt_ids=..., sampling_params=sampling_params)

The prompt of each later call must begin with all tokens so far, which stay as they were sampled;
the tokens after them get loss mask 0. A loop that is stopped begins again later, and gets its
recorded turns without generating them again. Knows engines by `Generate` only.
"""

from __future__ import annotations

import asyncio
import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import anyio

from slipstream.data.chat_template import prompt_ids
from slipstream.errors import ConfigError, DataError, did_you_mean, name_of
from slipstream.rollout.agents.session import LENGTHS, PolicySession, Result, check_sampling
from slipstream.rollout.episode import EpisodeRunner, Generate
from slipstream.types import Prompt, Sample

SINGLE_TURN, TOOL_AGENT = "single_turn_agent", "tool_agent"
"""VERL's names of its own loops."""

KIND = "agent loop"
"""What messages call the user's code."""

_IGNORED = ("logprobs", "repetition_penalty", "min_p")

C = TypeVar("C", bound=type[Any])


@dataclass(slots=True)
class TokenOutput:
    """The answer of `server_manager.generate`. `stop_reason` is always `completed`, also for a turn
    that was cut off. `token_ids` is empty if no token fits."""

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = "completed"
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class AgentLoopMetrics:
    """Seconds of a loop, filled in by the loop."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass(slots=True, kw_only=True)
class AgentLoopOutput:
    """The result of a loop. `response_mask` is 1 for tokens of the policy."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None


class AgentLoopBase(ABC):
    """The base class of loops. There is one object per sample."""

    def __init__(
        self,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: Any = None,
        data_config: Any = None,
        **kwargs: Any,
    ) -> None:
        self.config = getattr(trainer_config, "config", trainer_config)
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = getattr(data_config, "config", data_config)
        actor = getattr(self.config, "actor_rollout_ref", None)
        self.rollout_config = getattr(actor, "rollout", None)
        self.loop = asyncio.get_running_loop()

    async def apply_chat_template(
        self, messages: list[dict[str, Any]], tools: Any = None, **_: Any
    ) -> list[int]:
        """Return the ids of a conversation, with the generation prompt."""
        return prompt_ids(self.tokenizer, messages, tools=tools)

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Run one episode for a row of the data set."""


_LOOPS: dict[str, Callable[..., Any]] = {}


def register(agent_name: str) -> Callable[[C], C]:
    """A decorator that registers a loop under a name. A later class of the name replaces it."""

    def add(cls: C) -> C:
        _LOOPS[name_of(agent_name, "agent loop")] = cls
        return cls

    return add


def registered_loops() -> list[str]:
    """Return the names of the registered loops, sorted."""
    return sorted(_LOOPS)


def check_loop(name: str, known: Sequence[str]) -> None:
    """Raise ConfigError, with similar names, if `name` is none of the `known` loops."""
    if name in known:
        return
    if name == TOOL_AGENT:
        raise ConfigError(
            f"the agent loop {name!r} needs tools; set "
            "actor_rollout_ref.rollout.multi_turn.tool_config_path or function_tool_path"
        )
    raise ConfigError(
        f"there is no agent loop {name!r}{did_you_mean(name, known)} (known: "
        f"{', '.join(sorted(known))}); register it in a module of "
        "actor_rollout_ref.model.external_lib, or name its class in "
        "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    )


class AgentLoops:
    """Runs the loop that a row names; rows of other names are for `others`."""

    def __init__(
        self,
        others: Mapping[str, EpisodeRunner],
        *,
        default: str,
        sampling_params: Mapping[str, Any],
        max_tokens: int,
        tokenizer: Any,
        max_prompt_tokens: int | None = None,
        config: Any = None,
        loops: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """`others` run the rows of other names. `default` is the name of rows without `agent_name`.
        `loops` are classes by name, in addition to the registered ones. `max_tokens` limits the
        tokens after the prompt."""
        self._others = others
        self._default = default
        self._params = dict(sampling_params)
        self._max_tokens = max_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._tokenizer = tokenizer
        self._config = config
        self._loops = {**_LOOPS, **(loops or {})}
        self.check(default)

    def check(self, name: str) -> None:
        """Raise ConfigError, with similar names, if there is no loop `name`."""
        check_loop(name, [*self._loops, *self._others])

    async def run(
        self,
        sample: Sample,
        row: Prompt,
        generate: Generate,
        *,
        seed: int,
        stop: anyio.Event | None = None,
    ) -> bool:
        """Run an episode, or continue one that was stopped (see `EpisodeRunner`)."""
        name = str(row.extra_info.get("agent_name") or self._default)
        if name not in self._loops and name in self._others:
            return await self._others[name].run(sample, row, generate, seed=seed, stop=stop)
        self.check(name)
        session = PolicySession(
            sample,
            generate,
            kind=KIND,
            max_tokens=self._max_tokens,
            max_prompt_tokens=self._max_prompt_tokens,
        )

        async def call() -> None:
            loop = self._loops[name](
                trainer_config=SimpleNamespace(config=self._config),
                server_manager=_Server(session, self._params),
                tokenizer=self._tokenizer,
                processor=None,
                dataset_cls=None,
                data_config=SimpleNamespace(config=getattr(self._config, "data", None)),
            )
            output = await loop.run(dict(self._params), **_columns(row))
            if session.ended is None:
                _finish(session, output)

        return await session.run(f"{KIND} {name}", call)

    async def discard(self, sample: Sample) -> None:
        """Release what a stopped sample holds."""
        for runner in self._others.values():
            await runner.discard(sample)

    async def close(self) -> None:
        """Release what all stopped samples hold."""
        for runner in self._others.values():
            await runner.close()


def _columns(row: Prompt) -> dict[str, Any]:
    """The columns of a row, as VERL passes them."""
    extra = copy.deepcopy(row.extra_info)
    return {
        **extra,
        "raw_prompt": copy.deepcopy(row.messages),
        "data_source": row.data_source,
        "ability": row.ability,
        "reward_model": {"ground_truth": row.ground_truth},
        "extra_info": extra,
        "tools_kwargs": extra.get("tools_kwargs") or {},
        "interaction_kwargs": extra.get("interaction_kwargs") or {},
        "index": extra.get("index", 0),
        "uid": row.uid,
    }


class _Server:
    """The `server_manager` of one episode."""

    def __init__(self, session: PolicySession, params: Mapping[str, Any]) -> None:
        self._session = session
        self._params = params

    async def generate(
        self,
        request_id: str = "",
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """Generate the next turn after `prompt_ids`, which begin with all tokens so far."""
        given = sampling_params or {}
        if self._session.ended is None:
            check_sampling(given, self._params, kind=KIND, ignored=_IGNORED)
        asked = [int(given[name]) for name in LENGTHS if given.get(name)]
        turn = await self._session.turn(prompt_ids, min(asked, default=None))
        if turn is None:
            return TokenOutput([], [])
        return TokenOutput(list(turn.ids), list(turn.log_probs))


def _finish(session: PolicySession, output: Any) -> None:
    """Check the loop's result against what was sampled, and take its mask and reward."""
    outputs = output if isinstance(output, list) else [output]
    if len(outputs) != 1 or not hasattr(outputs[0], "response_ids"):
        raise DataError("an agent loop must return one AgentLoopOutput")
    (output,) = outputs
    session.finish(
        [Result(output.response_ids, output.response_mask)],
        output.reward_score,
        names=("response_ids", "response_mask", "reward_score"),
    )
