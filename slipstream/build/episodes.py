"""Builds what runs episodes of several turns: tools, limits and the renderer of messages."""

from __future__ import annotations

import inspect
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.build.agents import make_custom_generate, turn_end_ids
from slipstream.build.limits import branches_fit
from slipstream.build.sandbox import make_sandbox
from slipstream.config.schema import Config
from slipstream.config.tree import to_dict
from slipstream.environment.adapters.gymnasium import (
    GymnasiumEnvironment,
    is_gymnasium_environment,
)
from slipstream.environment.adapters.openenv import (
    OpenEnvEnvironment,
    check_openenv_client,
    is_openenv_client,
)
from slipstream.environment.adapters.settings import load_class, read_entries
from slipstream.environment.adapters.trl import TrlFactory, is_trl_environment
from slipstream.environment.adapters.verl_interactions import (
    InteractionEnvironment,
    interaction_of,
    load_interactions,
)
from slipstream.environment.adapters.verl_tools import load_verl_tools
from slipstream.environment.protocol import ToolSchema
from slipstream.environment.tasks.registry import task_tools
from slipstream.environment.tools.environment import Toolbox, ToolEnvironment, ToolLimits
from slipstream.environment.tools.function import load_function_tools
from slipstream.environment.tools.mcp import load_mcp_tools
from slipstream.environment.tools.protocol import TIMEOUT_S, Tool, tool_name
from slipstream.environment.tools.sandboxed import PythonTool
from slipstream.errors import ConfigError, did_you_mean
from slipstream.rollout.agents.slime import CUSTOM_GENERATE
from slipstream.rollout.agents.tinker import TinkerEpisodes, is_tinker_environment
from slipstream.rollout.agents.verifiers import (
    VerifiersEpisodes,
    has_tasks,
    is_verifiers_environment,
    without_signal_handlers,
)
from slipstream.rollout.agents.verifiers_v1 import TaskEpisodes
from slipstream.rollout.agents.verl import (
    SINGLE_TURN,
    TOOL_AGENT,
    AgentLoops,
    check_loop,
    registered_loops,
)
from slipstream.rollout.episode import EpisodeLimits, EpisodeRunner, Episodes, SingleTurn
from slipstream.rollout.formats.registry import format_of_template, get_call_format
from slipstream.rollout.render import Renderer
from slipstream.rollout.render_check import CONVERSATIONS, changed_conversations
from slipstream.types import Prompt
from slipstream.user_code import created, load_named

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "actor_rollout_ref.rollout.multi_turn"

log = logging.getLogger(__name__)


def make_tools(config: Config) -> Sequence[Tool]:
    """The tools of the task and of the user. Raises ConfigError if two have the same name."""
    settings = config.actor_rollout_ref.rollout.multi_turn
    tools = dict(
        _tools(
            config.data.task,
            settings.function_tool_path,
            settings.tool_config_path,
            settings.mcp_config_path,
        )
    )
    if settings.python_tool:
        # The sandbox ends a program after ten times this time at the latest.
        limit = 10 * config.reward_model.sandbox.run_timeout_s + TIMEOUT_S
        python = PythonTool(sandbox=make_sandbox(config), timeout_s=limit)
        tools[f"{_KEY}.python_tool=true"] = [python]
    given: dict[str, str] = {}
    for setting, found in tools.items():
        for name in (tool_name(tool.schema) for tool in found):
            if name in given:
                raise ConfigError(
                    f"there are two tools of the name {name!r}, of {given[name]} and of {setting}; "
                    "rename or remove one of them"
                )
            given[name] = setting
    return [tool for found in tools.values() for tool in found]


@cache
def _tools(
    task: str | None, functions: str | None, classes: str | None, servers: str | None
) -> Mapping[str, Sequence[Tool]]:
    """The tools by setting. They are created once, because a user's constructor may open
    connections."""
    tools: dict[str, Sequence[Tool]] = {f"data.task={task}": task_tools(task)}
    if functions is not None:
        tools[f"{_KEY}.function_tool_path={functions}"] = load_function_tools(Path(functions))
    if classes is not None:
        tools[f"{_KEY}.tool_config_path={classes}"] = load_verl_tools(classes)
    if servers is not None:
        tools[f"{_KEY}.mcp_config_path={servers}"] = load_mcp_tools(servers)
    return tools


@cache
def _interactions(path: str | None) -> Mapping[str, Any]:
    """The interactions of a YAML file, by name. They are created once, as tools are."""
    return {} if path is None else load_interactions(path)


def tool_schemas(config: Config) -> list[ToolSchema] | None:
    """The schemas that the chat template writes into prompts; None without tools."""
    if not has_tools(config):
        return None
    return [tool.schema for tool in make_tools(config)] or None


def has_tools(config: Config) -> bool:
    """Whether the policy can call tools, or an interaction answers it."""
    settings = config.actor_rollout_ref.rollout.multi_turn
    if settings.enable is not None:
        return settings.enable
    paths = (
        settings.function_tool_path,
        settings.tool_config_path,
        settings.mcp_config_path,
        settings.interaction_config_path,
        settings.environment.path,
    )
    given = settings.python_tool or any(path is not None for path in paths)
    return given or bool(task_tools(config.data.task))


def has_episodes(config: Config) -> bool:
    """Whether responses can have several turns."""
    return has_tools(config) or _has_loops(config)


def _has_loops(config: Config) -> bool:
    agent = config.actor_rollout_ref.rollout.agent
    own = agent.default_agent_loop not in (None, SINGLE_TURN, TOOL_AGENT)
    paths = (agent.agent_loop_config_path, agent.custom_generate_function_path)
    return own or any(path is not None for path in paths) or bool(registered_loops())


def make_episodes(
    config: Config, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool = False
) -> EpisodeRunner | None:
    """What runs the episodes of a run, or of its validation; None if every response is a single
    turn.

    Raises ConfigError if multi-turn is enabled without tools, for a chat template without tool
    calls, for an unknown agent loop, and for a custom generate function that cannot be used.
    """
    tools = _tool_episodes(config, tokenizer) if has_tools(config) else None
    agent = config.actor_rollout_ref.rollout.agent
    if tools is None and agent.default_agent_loop is None and not _has_loops(config):
        return None
    others: dict[str, EpisodeRunner] = {SINGLE_TURN: SingleTurn()}
    if tools is not None:
        others[TOOL_AGENT] = tools
    custom = make_custom_generate(config, tokenizer, evaluation=evaluation)
    if custom is not None:
        others[CUSTOM_GENERATE] = custom
    return AgentLoops(
        others,
        default=agent.default_agent_loop or [*others][-1],  # the user's own, if there is one
        sampling_params=_sampling_params(config),
        max_tokens=config.data.max_response_length,
        max_prompt_tokens=config.data.max_prompt_length,
        tokenizer=tokenizer,
        config=_readable(config),
        loops=_loops_of(agent.agent_loop_config_path),
    )


def check_agents(config: Config, prompts: Iterable[Prompt]) -> None:
    """Raise ConfigError if a row names an agent loop that the run does not have. Without tools and
    loops every response is a single turn, whatever rows say."""
    named = {str(prompt.extra_info.get("agent_name") or "") for prompt in prompts} - {""}
    if not named or not has_episodes(config):
        return
    agent = config.actor_rollout_ref.rollout.agent
    known = [SINGLE_TURN, *registered_loops(), *_loops_of(agent.agent_loop_config_path)]
    known += [TOOL_AGENT] if has_tools(config) else []
    known += [CUSTOM_GENERATE] if agent.custom_generate_function_path is not None else []
    for name in sorted(named):
        check_loop(name, known)


def check_rows(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raise ConfigError if a row names an agent loop that the run does not have, and DataError if
    it does not name an interaction of the run. Log a warning if rows have `tools_kwargs` of tools
    that the run does not have."""
    check_agents(config, prompts)
    rollout = config.actor_rollout_ref.rollout
    settings, agent = rollout.multi_turn, rollout.agent
    own_code = settings.environment.path is not None or TOOL_AGENT in registered_loops()
    if own_code or not has_tools(config):
        return
    custom = agent.custom_generate_function_path is not None
    default = agent.default_agent_loop or (CUSTOM_GENERATE if custom else TOOL_AGENT)
    rows = [row for row in prompts if (row.extra_info.get("agent_name") or default) == TOOL_AGENT]
    if interactions := _interactions(settings.interaction_config_path):
        for row in rows:
            interaction_of(row, interactions)
    known = [tool_name(tool.schema) for tool in make_tools(config)]
    given = [row.extra_info.get("tools_kwargs") or {} for row in rows]
    # Parquet gives every row the keys of all rows.
    counts = Counter(name for one in given for name, value in one.items() if value)
    for name in sorted(counts.keys() - set(known)):
        log.warning(
            "%d of %d rows have tools_kwargs of %r, which is no tool of the run%s (tools: %s); "
            "rename it in the rows, or add the tool (%s.function_tool_path or another of its keys)",
            counts[name],
            len(prompts),
            name,
            did_you_mean(name, known),
            ", ".join(known) or "none",
            _KEY,
        )


def _sampling_params(config: Config) -> dict[str, Any]:
    """The sampling parameters that code of the user sees, under VERL's names."""
    rollout = config.actor_rollout_ref.rollout
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "repetition_penalty": 1.0,
        "logprobs": True,
    }


def _readable(config: Config) -> Any:
    """The configuration for users' classes: readable by attribute and with `get`."""
    from omegaconf import OmegaConf

    plain = to_dict(config)
    # VERL's names.
    plain["actor_rollout_ref"]["rollout"] |= {
        "prompt_length": config.data.max_prompt_length,
        "response_length": config.data.max_response_length,
    }
    return OmegaConf.create(plain)


@cache
def _loops_of(path: str | None) -> Mapping[str, Callable[..., Any]]:
    """The agent loops of a YAML file, by name."""
    loops: dict[str, Callable[..., Any]] = {}
    if path is None:
        return loops
    key, name_key = "actor_rollout_ref.rollout.agent.agent_loop_config_path", "_target_"
    for entry in read_entries(path, key=key, section=None, name_key=name_key):
        cls: Callable[..., Any] = load_class(entry, key=key, name_key=name_key)
        own = {name: value for name, value in entry.items() if name not in ("name", name_key)}
        loops[str(entry.get("name") or entry[name_key].rpartition(".")[2])] = partial(cls, **own)
    return loops


def turn_ends(config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end a turn with tool calls; none without tools."""
    return make_renderer(config, tokenizer).end_token_ids if _has_messages(config) else ()


def _has_messages(config: Config) -> bool:
    """Whether messages of tools or an environment are rendered during an episode."""
    return has_tools(config) and not _has_tinker_environment(config)


def _has_tinker_environment(config: Config) -> bool:
    settings = config.actor_rollout_ref.rollout.multi_turn.environment
    return settings.path is not None and is_tinker_environment(
        _environment_class(settings.path, settings.name)
    )


def _tool_episodes(config: Config, tokenizer: PreTrainedTokenizerBase) -> EpisodeRunner:
    settings = config.actor_rollout_ref.rollout.multi_turn
    if settings.environment.path is not None:
        return _environment_episodes(config, tokenizer)
    tools, interactions = make_tools(config), _interactions(settings.interaction_config_path)
    if not tools and not interactions:
        raise ConfigError(
            f"{_KEY}.enable=true, but there are no tools and no interactions; set "
            f"{_KEY}.function_tool_path=FILE, tool_config_path or interaction_config_path, or "
            f"{_KEY}.enable=null"
        )
    toolbox = Toolbox(tools, tool_limits(config, tokenizer))

    def make() -> ToolEnvironment:
        return ToolEnvironment(
            toolbox, InteractionEnvironment(interactions) if interactions else None
        )

    renderer = make_renderer(config, tokenizer)
    schemas = tool_schemas(config) or []
    if tools:
        renderer.check(schemas, results=True)
    if interactions:
        renderer.check(schemas, results=False)
    return Episodes(make, renderer, episode_limits(config, schemas))


def _environment_episodes(config: Config, tokenizer: PreTrainedTokenizerBase) -> EpisodeRunner:
    """Episodes of the environment that the user names."""
    settings = config.actor_rollout_ref.rollout.multi_turn.environment
    assert settings.path is not None
    key = f"{_KEY}.environment"
    if task_tools(config.data.task):
        raise ConfigError(
            f"data.task={config.data.task} has tools of its own, which {key}.path replaces; set "
            f"{key}.path=null, or data.task=null and data.train_files=FILE"
        )
    found = _environment_class(settings.path, settings.name)
    if is_tinker_environment(found):
        ends = turn_end_ids(config, tokenizer)
        texts = [str(tokenizer.convert_ids_to_tokens(i)) for i in ends]
        return TinkerEpisodes(
            found,
            episode_limits(config, scores_itself=not _has_rewards(config)),
            kwargs=settings.kwargs,
            tokenizer=tokenizer,
            ends={*ends, *texts, *config.actor_rollout_ref.rollout.stop},
            key=key,
        )
    renderer = make_renderer(config, tokenizer)

    def make() -> Any:
        return created(found, {}, settings.kwargs, what=key, own_key=f"{key}.kwargs")

    if is_trl_environment(found):
        of_tools = tool_limits(config, tokenizer)
        kwargs = json.dumps(to_dict(config)["actor_rollout_ref"]["rollout"]["multi_turn"])
        first = _Checked(make, partial(found, **settings.kwargs))
        factory = _trl_factory(found, kwargs, first, of_tools)
        renderer.check(factory.schemas, results=True)
        alone = factory.gives_reward and not _has_rewards(config)
        return Episodes(factory, renderer, episode_limits(config, scores_itself=alone))
    if not inspect.isclass(found):
        kwargs = json.dumps(dict(settings.kwargs))
        environment = _verifiers_environment(settings.path, settings.name, kwargs)
        runner = TaskEpisodes if has_tasks(environment) else VerifiersEpisodes
        return runner(
            environment,
            renderer,
            sampling_params=_sampling_params(config),
            max_tokens=config.data.max_response_length,
            max_prompt_tokens=config.data.max_prompt_length,
        )
    renderer.check([], results=False)
    own = partial(found, **settings.kwargs)
    alone = not _has_rewards(config)
    # Objects are made here, too, to check the arguments before the run starts.
    if is_gymnasium_environment(found):
        make().close()
        limits = episode_limits(config, scores_itself=alone)
        return Episodes(lambda: GymnasiumEnvironment(own), renderer, limits)
    if is_openenv_client(found):
        check_openenv_client(found, f"{key}.name={settings.name}")
        make()
        limits = episode_limits(config, scores_itself=alone)
        return Episodes(lambda: OpenEnvEnvironment(own), renderer, limits)
    for method in ("reset", "step", "score", "close"):
        if not inspect.iscoroutinefunction(getattr(found, method, None)):
            raise ConfigError(
                f"{key}.name={settings.name}: the class has no coroutine method {method!r}, and it "
                "does not have the form of TRL's, gymnasium's, OpenEnv's or tinker's environments; "
                "see slipstream.environment.protocol.Environment"
            )
    return Episodes(make, renderer, episode_limits(config))


@cache
def _environment_class(path: str, name: str) -> Any:
    """The user's class. The file is executed once, although training and validation ask for it."""
    key = f"{_KEY}.environment"
    return load_named(path, name, path_key=f"{key}.path", name_key=f"{key}.name", what="classes")


@cache
def _verifiers_environment(path: str, name: str, kwargs: str) -> Any:
    """The environment or taskset that a user's function returns. Training and validation share it,
    because it may hold data and connections."""
    key, function = f"{_KEY}.environment", _environment_class(path, name)
    with without_signal_handlers():
        made = created(function, {}, json.loads(kwargs), what=key, own_key=f"{key}.kwargs")
    if not is_verifiers_environment(made):
        raise ConfigError(
            f"{key}.name={name} is a function, so it must return an environment of the library "
            f"verifiers or a taskset, not {type(made).__name__}; otherwise name a class"
        )
    return made


class _Checked:
    """Makes objects: the first with errors that name the setting, later ones in a running episode,
    whose exceptions fail its sample."""

    def __init__(self, first: Callable[[], Any], later: Callable[[], Any]) -> None:
        self._next, self._later = first, later

    def __call__(self) -> Any:
        made, self._next = self._next(), self._later
        return made


_factories: dict[tuple[Any, str], TrlFactory] = {}


def _trl_factory(
    found: Any, settings: str, make: Callable[[], Any], limits: ToolLimits
) -> TrlFactory:
    """The factory of a class and its settings; training and validation share its objects."""
    if (found, settings) not in _factories:
        _factories[found, settings] = TrlFactory(make, limits)
    return _factories[found, settings]


def _has_rewards(config: Config) -> bool:
    """Whether the user names something that scores responses."""
    rewards = config.reward_model
    return bool(config.custom_reward_function.path or rewards.enable or rewards.terms)


def tool_limits(config: Config, tokenizer: PreTrainedTokenizerBase) -> ToolLimits:
    """The limits of tool calls. Raises ConfigError for a limit in tokens with a slow tokenizer."""
    settings = config.actor_rollout_ref.rollout.multi_turn
    if settings.max_tool_response_tokens is not None and not tokenizer.is_fast:
        raise ConfigError(
            f"{_KEY}.max_tool_response_tokens={settings.max_tool_response_tokens} needs a fast "
            "tokenizer (tokenizer.json), which knows where tokens end; set "
            f"{_KEY}.max_tool_response_length instead"
        )

    def token_ends(text: str) -> list[int]:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [end for _, end in found["offset_mapping"]]

    return ToolLimits(
        max_parallel_calls=settings.max_parallel_calls,
        max_characters=settings.max_tool_response_length,
        max_tokens=settings.max_tool_response_tokens,
        truncate_side=settings.tool_response_truncate_side,
        token_ends=token_ends,
    )


def episode_limits(
    config: Config, prompt_tools: Sequence[ToolSchema] = (), *, scores_itself: bool = False
) -> EpisodeLimits:
    """The limits of episodes; `prompt_tools` are the tools that prompts already list."""
    settings = config.actor_rollout_ref.rollout.multi_turn
    return EpisodeLimits(
        max_tokens=config.data.max_response_length,
        max_assistant_turns=settings.max_assistant_turns,
        max_user_turns=settings.max_user_turns,
        max_tool_seconds=settings.max_tool_seconds,
        max_prompt_tokens=config.data.max_prompt_length,
        prompt_tools=prompt_tools,
        rerender=settings.history == "rerender",
        branches_fit=branches_fit(config),
        scores_itself=scores_itself,
    )


def changed_turns(config: Config, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A note for the user if the chat template changes earlier turns; None if it only appends, or
    if the policy has no tools."""
    if not _has_messages(config):
        return None
    schemas = tool_schemas(config)
    names = changed_conversations(
        make_renderer(config, tokenizer), schemas or [], results=schemas is not None
    )
    if not names:
        return None
    appends = config.actor_rollout_ref.rollout.multi_turn.history == "append"
    follows = (
        "keep all turns as they were sampled" if appends else "begin a new branch after such a turn"
    )
    return (
        f"the chat template changes earlier turns of {len(names)} of {len(CONVERSATIONS)} trial "
        f"conversations ({', '.join(names)}); episodes {follows} ({_KEY}.history)"
    )


def make_renderer(config: Config, tokenizer: PreTrainedTokenizerBase) -> Renderer:
    """The renderer of messages. Raises ConfigError if the format of tool calls is unknown."""
    wanted = config.actor_rollout_ref.rollout.multi_turn.format
    if wanted is not None:
        call_format = get_call_format(wanted)
    elif tokenizer.chat_template:
        call_format = format_of_template(str(tokenizer.chat_template))
    else:
        raise ConfigError(
            "tools need a chat template, but the tokenizer has none; set "
            "actor_rollout_ref.model.custom_chat_template"
        )
    return Renderer(tokenizer, call_format, template_kwargs=config.data.apply_chat_template_kwargs)
