"""Composes recipe, file and overrides into one frozen, checked `Config`.

Order of precedence, low to high: schema defaults, recipe or file, overrides. `aliases` translates
the assignments of all sources. The result is checked against the schema's types, and then against
the rules of `validate`. Each of these steps reports all its problems in one error. Called by the
command line, and by programs that build a run in Python.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.config import aliases, servers
from slipstream.config.engines import ENGINE_KEY, has_servers
from slipstream.config.hardware import Hardware, detect_hardware
from slipstream.config.interpolate import escaped, resolve_in_sources
from slipstream.config.notices import Notices
from slipstream.config.rules import WithoutEffect
from slipstream.config.schedules import schedule_notices
from slipstream.config.schema import Config
from slipstream.config.sources import (
    Assignment,
    Places,
    file_assignments,
    flatten,
    override_assignments,
    parse_overrides,
    recipe_file,
)
from slipstream.config.suggest import unknown_key
from slipstream.config.tree import Option, example, from_dict, leaves, options, show, to_dict
from slipstream.config.validate import validate
from slipstream.config.validate_algorithm import NEEDS_CRITIC, OWN_AGGREGATION
from slipstream.config.verl_combined import COMBINED, SEQUENCE_PARALLEL, apply_combined
from slipstream.config.verl_defaults import is_default
from slipstream.config.verl_keys import REFUSED_VALUES
from slipstream.errors import ConfigError
from slipstream.reading import MOST_SHOWN, jinja_text, reading, shown, shown_path, value_problem

CONFIG_FILE = "config.yaml"
"""Name of the file in a run folder that contains the resolved configuration."""

_CHAT_TEMPLATE = "actor_rollout_ref.model.custom_chat_template"

_TEMPLATE_OPTIONS = "apply_chat_template_kwargs"
_PATHS = re.compile(r"(path|dir|files?|tokenizer|external_lib|python|experiment_name)$")
"""The keys of options whose values become names of files."""
_KEY = re.compile(r"[\w.]+")
_INDEX = re.compile(r"[0-9]{1,4}")
_MISSING = "???"
"""OmegaConf's value of an option that must be set, which is not set yet."""

RESUMABLE_KEYS = frozenset(
    {
        "actor_rollout_ref.rollout.enable_chunked_prefill",
        "actor_rollout_ref.rollout.enable_prefix_caching",
        "actor_rollout_ref.rollout.enforce_eager",
        "actor_rollout_ref.rollout.engine_kwargs",
        "actor_rollout_ref.rollout.free_cache_engine",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "actor_rollout_ref.rollout.kv_cache_bytes",
        "actor_rollout_ref.rollout.load_format",
        "actor_rollout_ref.rollout.max_num_batched_tokens",
        "actor_rollout_ref.rollout.max_num_seqs",
        "actor_rollout_ref.rollout.one_thread_below",
        "actor_rollout_ref.rollout.server.python",
        "actor_rollout_ref.rollout.server.replicas",
        "actor_rollout_ref.rollout.server.startup_timeout_s",
        "actor_rollout_ref.rollout.server.transfer_dir",
        "actor_rollout_ref.rollout.server.transport",
        "actor_rollout_ref.rollout.server.update_timeout_s",
        "actor_rollout_ref.rollout.server.urls",
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "actor_rollout_ref.rollout.timeout_s",
        "data.chat_template_date",
        "reward_model.num_workers",
        "speculative.draft.patience",
        "speculative.draft.save_freq",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
        "trainer.num_threads",
        "trainer.mode",
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "trainer.project_name",
        "trainer.experiment_name",
        "trainer.logger",
        "trainer.save_freq",
        "trainer.test_freq",
        "trainer.resume_mode",
        "trainer.resume_from_path",
        "trainer.val_before_train",
        "trainer.val_only",
        "trainer.default_local_dir",
        "trainer.max_actor_ckpt_to_keep",
        "trainer.rollout_data_dir",
        "trainer.validation_data_dir",
        "trainer.log_val_generations",
        "trainer.stage_timeout_s",
        "sft.save_freq",
        "sft.test_freq",
    }
)
"""Keys whose values may change when a run resumes.

They do not affect updates that the run has already made. A different number of steps changes a
learning-rate schedule that depends on it, and the loops print a note then.
"""


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one ConfigError with all `problems`, if there are any."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        lines = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"{len(problems)} settings cannot be used:{lines}")


def _free_form_above(key: str) -> Option | None:
    """Return the free-form mapping that contains `key`; None if there is none."""
    parts = key.split(".")
    for end in range(len(parts) - 1, 0, -1):
        option = options().get(".".join(parts[:end]))
        if option is not None:
            return option if option.free_form else None
    return None


class _Tree:
    """The plain tree under construction, with the notices and problems of its assignments.

    `assigned` holds the keys that a source has set. `verl` is true if the sources are written for
    VERL or FastRL.
    """

    def __init__(self, places: Places, verl: bool) -> None:
        self.values = to_dict(Config())
        self.notices = Notices()
        self.problems: list[str] = []
        self.to_compare: list[aliases.Rewritten] = []
        self.assigned: set[str] = set()
        self.places = places
        self.in_files: set[str] = set()
        self.derived: set[str] = set()  # set by interpolations in files
        self.mistyped: set[str] = set()
        self.combined: dict[str, Any] = {}
        self.verl = verl

    def apply(self, assignment: Assignment) -> None:
        """Set or delete one key, and record notices and problems."""
        before = len(self.problems)
        self.places.note(assignment, assignment.key)
        self._apply(assignment)
        for number in range(before, len(self.problems)):
            self.problems[number] = self.places.added(self.problems[number], assignment.key)

    def _apply(self, assignment: Assignment) -> None:
        key = assignment.key
        if assignment.value == _MISSING:
            return
        if problem := value_problem([key, assignment.value], setting=True):
            self.problems.append(
                f"{shown_path(key)}: {problem}; set it to a value that can be used, such as "
                f"{example(options()[key]) if key in options() else 'null'}"
            )
            return
        if problem := _path_problem(key, assignment.value):
            self.problems.append(problem)
            return
        if key in COMBINED or key in SEQUENCE_PARALLEL:
            self.combined[key] = assignment.value
        if key in COMBINED:
            return
        inside = _free_form_above(key) is not None and key not in aliases.RENAMED
        known = key in options() or inside
        if assignment.delete and self.verl:
            self._reset(key)
            return
        if assignment.delete:
            self._delete(key)
            return
        rewritten = aliases.rewrite(key, assignment.value, known=known, verl=self.verl)
        in_file = assignment.in_file
        if rewritten.alias is not None and self._adds_nothing(rewritten, assignment):
            return
        self.notices.warn(rewritten.warnings)
        # A composed configuration of VERL has its defaults, also under names that differ from ours.
        unset = in_file and is_default(key, assignment.value)
        self.notices.add(() if unset else rewritten.notices, in_file=in_file)
        if rewritten.alias is not None and not unset:
            ours = aliases.ours(rewritten.alias)
            assert ours is not None
            self.notices.alias(rewritten.alias, ours, in_file=in_file)
        if rewritten.inert and not (in_file and assignment.interpolated):
            self.notices.inert(key, rewritten.inert, in_file=in_file)
        if rewritten.unless_equal is not None:
            self.to_compare.append(rewritten)
        elif rewritten.problem is not None:
            self.problems.append(rewritten.problem)
        if rewritten.key is not None and not self._is_unset(rewritten, in_file):
            self.places.note(assignment, rewritten.key)
            self._set(rewritten.key, rewritten.value)
            (self.in_files.add if in_file else self.in_files.discard)(rewritten.key)
            derived = in_file and assignment.interpolated
            (self.derived.add if derived else self.derived.discard)(rewritten.key)

    def _adds_nothing(self, rewritten: aliases.Rewritten, assignment: Assignment) -> bool:
        """Return whether an alias has VERL's default, so that it must not replace a setting.

        A composed configuration of VERL has old and new spellings of a setting. The one that nobody
        has set has the default. On the command line, every spelling is set by the user.
        """
        assert rewritten.key is not None
        option = options().get(rewritten.key)
        if rewritten.value is None and option is not None and not option.nullable:
            return True
        default = is_default(assignment.key, assignment.value)
        return assignment.in_file and default and rewritten.key in self.assigned

    def _is_unset(self, rewritten: aliases.Rewritten, in_file: bool) -> bool:
        """Return whether null leaves our key to its default, or to another spelling of it."""
        key = rewritten.key
        option = None if key is None else options().get(key)
        if not self.verl or rewritten.value is not None or option is None:
            return False
        spelled_otherwise = in_file and key in self.in_files
        return spelled_otherwise or (
            not option.nullable and (in_file or is_default(option.key, None))
        )

    def _section(self, key: str) -> tuple[dict[str, Any], str]:
        """Return the dictionary that contains `key`, and the last name of `key`.

        Sections and mappings that are null get their defaults first.
        """
        node = self.values
        *path, name = key.split(".")
        for depth, part in enumerate(path, start=1):
            option = options().get(".".join(path[:depth]))
            if node.get(part) is None:
                section = None if option is None else option.section
                node[part] = {} if section is None else to_dict(section())
            node = node[part]
        return node, name

    def _set(self, key: str, value: Any) -> None:
        option = options().get(key)
        if option is None:
            self._set_inside(key, value)
            return
        if option.section is not None and not (option.nullable and value is None):
            names = [k for k in options() if k.rpartition(".")[0] == key][:3]
            self.problems.append(
                f"{key}={show(value)}: {key} is a section; set its options instead, such as "
                + ", ".join(names)
            )
            return
        node, name = self._section(key)
        if option.free_form and isinstance(value, dict) and isinstance(node[name], dict):
            _merge(node[name], value)
        else:
            node[name] = value
        self.assigned.add(key)

    def _set_inside(self, key: str, value: Any) -> None:
        """Set a key inside a free-form mapping, or one item of a list."""
        parent, _, name = key.rpartition(".")
        if _free_form_above(key) is not None:
            try:
                node, name = self._section(key)
                node[name] = value
            except (AttributeError, TypeError):
                self.problems.append(
                    f"{key} cannot be set: {parent} has a plain value, not a mapping; set "
                    f"{parent}={{{name}:{show(value)}}}"
                )
        elif parent in options() and _INDEX.fullmatch(name):
            self._set_item(parent, int(name), value)
        else:
            self.problems.append(unknown_key(key))

    def _set_item(self, key: str, index: int, value: Any) -> None:
        node, name = self._section(key)
        items = node[name]
        if not isinstance(items, list) or index >= len(items):
            self.problems.append(
                f"{key}.{index} cannot be set: {key}={show(items)} has no item {index}; set the "
                f"whole list, such as {example(options()[key])}"
            )
            return
        # A list of the settings' source is not changed in place.
        node[name] = [*items[:index], value, *items[index + 1 :]]

    def _reset(self, key: str) -> None:
        """Delete a key on a line of VERL, where the default then applies."""
        ours = aliases.ours(key) or key
        option = options().get(ours)
        if option is not None and option.section is None:
            self._set(ours, option.default)
        elif option is not None and option.section is not None:
            node, name = self._section(ours)
            node[name] = to_dict(option.default)
        elif _free_form_above(ours) is not None:
            self._delete(ours)
        elif not (aliases.knows(key) or aliases.knows(f"{key}.x")):
            self.problems.append(unknown_key(key))

    def _delete(self, key: str) -> None:
        if _free_form_above(key) is None:
            self.problems.append(
                f"~{key}: only keys of free-form mappings can be deleted; set {key}=VALUE instead"
                if key in options()
                else unknown_key(key)
            )
            return
        try:
            node, name = self._section(key)
            known = name in node
        except (AttributeError, TypeError):  # a plain value is where a mapping would have to be
            known = False
        if not known:
            self.problems.append(f"~{key}: this key is not set, so it cannot be deleted")
            return
        del node[name]

    def imply(self) -> None:
        """Set options that follow from others, and add notices about options without effect."""
        for rewritten in self.to_compare:
            assert rewritten.unless_equal is not None
            final = _at(self.values, rewritten.unless_equal)
            if rewritten.problem is not None and final != rewritten.value:
                self.problems.append(rewritten.problem)
        for message, problem in apply_combined(
            self.combined, lambda key: _at(self.values, key), self._set
        ):
            if problem:
                self.problems.append(message)
            else:
                self.notices.add([message])
        self._without_critic()
        self._without_reward_model()
        self._micro_batches()
        self._aggregation()

    def _aggregation(self) -> None:
        """Add a notice if the policy loss does not use `loss_agg_mode`."""
        actor = self.values["actor_rollout_ref"]["actor"]
        mode, loss = actor["loss_agg_mode"], actor["policy_loss"]["loss_mode"]
        own = OWN_AGGREGATION.get(loss) if isinstance(loss, str) else None
        key = "actor_rollout_ref.actor"
        # VERL 0.9.1 aggregates with its default, too, if a line does not set it.
        given = f"{key}.loss_agg_mode" in self.assigned or (self.verl and loss == "gspo")
        if own in (None, mode) or actor["policy_loss"]["gspo_uses_loss_agg_mode"] or not given:
            return
        newer = (
            f"; VERL 0.9.1 uses it: for that, set {key}.policy_loss.gspo_uses_loss_agg_mode=true"
            if loss == "gspo"
            else ""
        )
        self.notices.add(
            [
                f"{key}.loss_agg_mode={show(mode)} does not apply to {key}.policy_loss.loss_mode="
                f"{loss}, which aggregates with {own}{newer}"
            ]
        )

    def _without_critic(self) -> None:
        critic, algorithm = self.values["critic"], self.values["algorithm"]
        estimator = algorithm["adv_estimator"]
        # A value of the wrong type is refused later, with its type.
        if not critic["enable"] and not (isinstance(estimator, str) and estimator in NEEDS_CRITIC):
            defaults = to_dict(Config())
            for key in sorted(self.assigned - {"critic.enable"}):
                if key.startswith("critic.") and _at(self.values, key) != _at(defaults, key):
                    self._unused(key, "no critic is trained")

    def _without_reward_model(self) -> None:
        rewards = self.values["reward_model"]
        if not rewards["enable"] and rewards["model"]["path"] is not None:
            self._unused("reward_model.model.path", "reward_model.enable=false")

    def without_servers(self, values: dict[str, Any]) -> None:
        """Take the options of servers out of the typed tree `values` if the engine has none."""
        if has_servers(_at(values, ENGINE_KEY)):
            return
        for key, reason in servers.SERVER_OPTIONS.items():
            section, _, name = key.rpartition(".")
            value = _at(values, key)
            if value is not None and not is_default(key, value) and key not in self.derived:
                self.notices.inert(key, reason, in_file=key in self.in_files)
            _at(values, section)[name] = None

    def server_notices(self, config: Config, hardware: Hardware) -> None:
        """Add notices about options that have no effect with the servers of the run."""
        for key, reason in servers.without_effect(config, hardware):
            value, in_file = _at(to_dict(config), key), key in self.in_files
            unset = value is None or (in_file and value == _plain_default(key))
            if key in self.assigned and not unset and not is_default(key, value):
                self.notices.inert(key, reason, in_file=in_file)
        for key, reason in servers.kwargs_without_effect(config):
            self.notices.inert(key, reason)

    def _unused(self, key: str, reason: str) -> None:
        """Add a notice that our key has no effect, unless it has VERL's default."""
        value = _at(self.values, key)
        unset = is_default(key, value) or _is_interpolation(value) or key in self.derived
        if not (self.verl and unset):
            self.notices.inert(key, reason, in_file=key in self.in_files)

    def _micro_batches(self) -> None:
        """Turn off dynamic batching if a micro-batch size is set, as in VERL."""
        actor = "actor_rollout_ref.actor"
        size, dynamic = f"{actor}.ppo_micro_batch_size_per_gpu", f"{actor}.use_dynamic_bsz"
        settings = self.values["actor_rollout_ref"]["actor"]
        if size not in self.assigned or settings["ppo_micro_batch_size_per_gpu"] is None:
            return
        if dynamic not in self.assigned:
            settings["use_dynamic_bsz"] = False
            self.notices.add([f"{size} is set, so {dynamic}=false"])
        elif settings["use_dynamic_bsz"] is True:
            self.notices.inert(size, f"{dynamic}=true limits tokens instead")


def _path_problem(key: str, value: Any) -> str | None:
    """Return the message for a path that no file system can hold; None for all other values."""
    if not _PATHS.search(key):
        return None
    for path in value if isinstance(value, list | tuple) else [value]:
        if isinstance(path, str) and any(len(os.fsencode(p)) > 255 for p in path.split("/")):
            return (
                f"{key}: {shown(path)} has a name of more than 255 bytes, which no file has; set "
                f"{key} to an existing path"
            )
    return None


def _merge(target: dict[str, Any], values: dict[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _resolve(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Replace each interpolation `${key}` by the value of the option `key`.

    Returns the values, and a problem by key. An option with a problem gets its default.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    remedy = "an interpolation must name another option, such as ${trainer.seed}"
    problems: dict[str, str] = {}
    while True:
        with reading(_with_interpolation(values), ConfigError, remedy):
            try:
                resolved = OmegaConf.to_container(
                    OmegaConf.create(values), resolve=True, throw_on_missing=True
                )
            except OmegaConfBaseException as error:
                key = str(getattr(error, "full_key", None) or "configuration")
                first = str(error).splitlines()[0]
                if key in problems or key not in options():
                    raise ConfigError(f"{key}: {first}; {remedy}") from error
                problems[key] = f"{key}: {first}; {remedy}"
                section, _, name = key.rpartition(".")
                _at(values, section)[name] = options()[key].default
                continue
        assert isinstance(resolved, dict)
        return {str(key): value for key, value in resolved.items()}, problems


def _with_interpolation(values: Mapping[str, Any]) -> str:
    """Return the keys whose values contain an interpolation, for messages."""
    keys = [key for key, value in leaves(values) if "${" in str(value)]
    return ", ".join(keys) or "configuration"


def load_config(
    overrides: Sequence[str] = (),
    *,
    recipe: str | None = None,
    file: Path | None = None,
    values: Mapping[str, Any] | None = None,
    hardware: Hardware | None = None,
    notify: Callable[[str], None] | None = None,
    complete: bool = True,
    places: Places | None = None,
    verl: bool = False,
    sections: Sequence[str] = (),
    rules: Callable[[Config], Iterable[str]] | None = None,
    defaults: tuple[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Compose, check and freeze a configuration.

    The start is a built-in `recipe`, or a `file` of the user, or the schema's defaults. `values`, a
    tree of options, overrides them, and `overrides` (key=value) override both. `notify` is called
    once for each notice, such as an alias or a key without effect; by default notices are logged.
    `complete=False` accepts a configuration without a model, to show it or to evaluate a
    checkpoint. `places` is given the lines of `file` that set options (see `Places`).

    `verl` is true if the settings are written for VERL or FastRL. Then the built-in engine replaces
    an external one, with a warning. An option without effect because of another one gets its
    default, with a notice. Otherwise both are problems. `sections` limits the rules between options
    to those about these sections, for callers that use nothing else. `rules` yields further
    problems.

    `defaults` is the name of another system and its defaults by key. A notice lists the keys that
    no source sets and whose defaults differ.

    Raises ConfigError for unknown keys, wrong types, and impossible values or combinations. The
    message contains all problems found, with remedies.
    """
    if recipe is not None and file is not None:
        raise ConfigError(
            f"recipe {recipe!r} and config file {file} cannot be combined; pass only one of them"
        )
    source = file if file is not None else recipe_file(recipe or "default")
    parsed = parse_overrides(overrides)
    from_file, parsed = file_assignments(source, parsed)
    places = Places(file) if places is None else places
    tree = _Tree(places, verl)
    from_values = flatten("", values or {}, "the configuration")
    in_files = [replace(one, in_file=True) for one in (*from_file, *from_values)]
    assignments = [*in_files, *override_assignments(parsed, verl=verl)]
    for assignment in resolve_in_sources(assignments) if verl else assignments:
        tree.apply(assignment)
    tree.imply()
    try:
        values, problems = _checked(tree)
        problems += _read_chat_template(values)
        tree.without_servers(values)
        machine = hardware or detect_hardware()
        config, broken = _validated(tree, values, tuple(sections), machine, complete)
        problems += broken
        problems += [] if rules is None else rules(config)
        if defaults is not None:
            tree.notices.add(_other_defaults(tree, *defaults))
        tree.notices.add(schedule_notices(config, tree.assigned))
        tree.server_notices(config, machine)
    finally:
        _send_notices(tree.notices.lines(tuple(sections)), notify)
    raise_problems([places.added(problem) for problem in problems])
    return config


def _checked(tree: _Tree) -> tuple[dict[str, Any], list[str]]:
    """Return the plain tree, and the problems of its assignments and types.

    An option with a problem has its default in the tree.
    """
    try:
        values, unresolved = _resolve(tree.values)
    except ConfigError as error:
        raise_problems([tree.places.added(text) for text in (*tree.problems, str(error))])
        raise
    config, mismatches = from_dict(values)
    refused = {key: aliases.refused_value(key, _at(values, key)) for key in REFUSED_VALUES}
    problems = [*tree.problems, *unresolved.values()]
    problems += [message for message in refused.values() if message is not None]
    # A refused value also has the wrong type. Only the more helpful message is reported.
    explained = tuple(f"{key}:" for key, message in refused.items() if message is not None)
    problems += [message for message in mismatches if not message.startswith(explained)]
    tree.mistyped = {message.partition(":")[0] for message in mismatches} | unresolved.keys()
    return to_dict(config), problems


def _validated(
    tree: _Tree,
    values: dict[str, Any],
    sections: tuple[str, ...],
    machine: Hardware,
    complete: bool,
) -> tuple[Config, list[str]]:
    """Return the typed tree, and the broken rules that are about `sections` (none: about any).

    On a line of VERL, an option without effect gets its default, and a notice. A rule about an
    option of the wrong type is skipped.
    """
    while True:
        config, _ = from_dict(values)
        broken = [
            message
            for message in validate(config, machine, complete=complete)
            if not any(key in message for key in tree.mistyped)
            and (not sections or message.startswith(sections))
        ]
        without_effect = {
            _KEY.match(message)[0]: message  # type: ignore[index]
            for message in broken
            if tree.verl and isinstance(message, WithoutEffect)
        }
        reset = [key for key in without_effect if key in options()]
        tree.notices.add(message.partition(";")[0] for message in without_effect.values())
        if not reset:
            return config, [text for text in broken if text not in without_effect.values()]
        for key in reset:
            section, _, name = key.rpartition(".")
            _at(values, section)[name] = _plain_default(key)


def _plain_default(key: str) -> Any:
    default = _at(to_dict(Config()), key)
    assert not _is_interpolation(default)
    return default


def _other_defaults(tree: _Tree, system: str, defaults: Mapping[str, Any]) -> Iterator[str]:
    ours = {key: options()[key].default for key in defaults}
    differing = [
        f"{key}={show(ours[key])} ({system}: {show(theirs)})"
        for key, theirs in defaults.items()
        if key not in tree.assigned and ours[key] != theirs
    ]
    if differing:
        yield f"defaults that differ from {system}: {', '.join(differing)}"


def _read_chat_template(values: dict[str, Any]) -> list[str]:
    """Replace the path of a chat template by the text in the file. Return the problems.

    The text belongs to the run: it is recorded in the run folder, and a changed file is a changed
    setting.
    """
    model, variables = values["actor_rollout_ref"]["model"], values["data"][_TEMPLATE_OPTIONS]
    given = model["custom_chat_template"]
    if isinstance(variables, dict) and "chat_template" in variables:
        variable = variables.pop("chat_template")
        given = variable if given is None else given
        if variable != given:
            return [
                f"{_CHAT_TEMPLATE} and data.{_TEMPLATE_OPTIONS}.chat_template have different "
                f"templates; set only {_CHAT_TEMPLATE}"
            ]
        model["custom_chat_template"] = given
    if isinstance(given, str):
        try:
            model["custom_chat_template"] = jinja_text(given, key=_CHAT_TEMPLATE)
        except ConfigError as error:
            return [str(error)]
    return []


def _at(values: dict[str, Any], key: str) -> Any:
    node: Any = values
    for part in key.split("."):
        node = node[part]
    return node


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _send_notices(notices: Iterable[str], notify: Callable[[str], None] | None) -> None:
    send = notify or logging.getLogger("slipstream.config").warning
    for notice in notices:
        send(notice)


def to_yaml(config: Config) -> str:
    """Return the resolved tree as YAML. `load_config(file=...)` reads it to an equal tree."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(escaped(to_dict(config))))


def diff(old: Config, new: Config) -> list[str]:
    """Return the differences as `key: old -> new`, except those in `RESUMABLE_KEYS`.

    If there are any, a run cannot resume from the folder of the old configuration.
    """
    before, after = to_dict(old), to_dict(new)
    changes: list[str] = []

    def compare(left: Any, right: Any, key: str) -> None:
        if left == right or key in RESUMABLE_KEYS:
            return
        option = options().get(key)
        whole = option is not None and option.section is None
        if isinstance(left, dict) and isinstance(right, dict) and not whole:
            for name in left:
                compare(left[name], right[name], f"{key}.{name}" if key else name)
        else:
            changes.append(f"{key}: {_short(left)} -> {_short(right)}")

    compare(before, after, "")
    return changes


def _short(value: Any) -> str:
    """Return `value` for a message; of a long text, its length and a checksum."""
    if isinstance(value, str) and len(value) > MOST_SHOWN:
        return f"a text of {len(value)} characters ({zlib.crc32(value.encode()):08x})"
    return show(value)
