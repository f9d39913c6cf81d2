"""Tests of loading a configuration: composition, types, unknown keys, interpolation, YAML, diff."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.config import (
    CONFIG_FILE,
    RESUMABLE_KEYS,
    Config,
    Hardware,
    diff,
    load_config,
    resolve_mode,
    to_dict,
    to_yaml,
)
from slipstream.config.sources import recipe_names
from slipstream.config.tree import from_dict, options
from slipstream.errors import ConfigError

CPU = Hardware(gpus=0)


def load(*overrides: str, recipe: str | None = "tiny", file: Path | None = None) -> Config:
    notices: list[str] = []
    config = load_config(
        overrides,
        recipe=None if file else recipe,
        file=file,
        hardware=CPU,
        notify=notices.append,
        complete=False,
    )
    assert notices == []
    return config


def error_of(*overrides: str, **arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **arguments)
    return str(caught.value)


def test_without_sources_all_options_have_defaults() -> None:
    config = load(recipe=None)
    assert config.data.train_batch_size == 16
    assert config.actor_rollout_ref.rollout.n == 8
    assert config.algorithm.adv_estimator == "grpo"
    assert config.trainer.default_local_dir == "checkpoints/slipstream/run"


def test_overrides_win_over_the_recipe_and_the_recipe_over_defaults() -> None:
    config = load("data.train_batch_size=6")
    assert config.data.train_batch_size == 6
    assert config.actor_rollout_ref.rollout.n == 2
    assert config.algorithm.kl_ctrl.kl_coef == 0.001


def test_the_last_override_of_a_key_wins() -> None:
    assert load("trainer.seed=2", "trainer.seed=5").trainer.seed == 5


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("trainer.seed=7", "trainer.seed", 7),
        ("actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.actor.optim.lr", 1e-5),
        ("actor_rollout_ref.actor.optim.lr=1", "actor_rollout_ref.actor.optim.lr", 1.0),
        ("data.shuffle=False", "data.shuffle", False),
        ("trainer.experiment_name='12'", "trainer.experiment_name", "12"),
        ("trainer.experiment_name=a-b.c/d", "trainer.experiment_name", "a-b.c/d"),
        ("data.seed=null", "data.seed", None),
        ("trainer.logger=file", "trainer.logger", ("file",)),
        ("trainer.logger=['console','file']", "trainer.logger", ("console", "file")),
        ('trainer.logger=["console"]', "trainer.logger", ("console",)),
        ("+trainer.seed=4", "trainer.seed", 4),
        ("++trainer.seed=4", "trainer.seed", 4),
        (
            "actor_rollout_ref.actor.optim={lr:0.5,eps:1e-5}",
            "actor_rollout_ref.actor.optim.eps",
            1e-5,
        ),
        ("actor_rollout_ref.rollout.do_sample=true", "actor_rollout_ref.rollout.do_sample", True),
        ("actor_rollout_ref.rollout.stop=['a, b']", "actor_rollout_ref.rollout.stop", ("a, b",)),
    ],
)
def test_overrides_in_hydras_notation(override: str, path: str, value: object) -> None:
    node: Any = load(override)
    for part in path.split("."):
        node = getattr(node, part)
    assert node == value
    assert type(node) is type(value)


def test_training_files_are_one_path_or_a_list() -> None:
    one = load("data.train_files=a.parquet", recipe=None)
    two = load("data.train_files=[a.parquet,b.jsonl]", recipe=None)
    assert one.data.train_files == ("a.parquet",)
    assert two.data.train_files == ("a.parquet", "b.jsonl")


def test_keys_of_free_form_mappings_can_be_added_deleted_and_merged() -> None:
    key = "reward_model.reward_kwargs"
    config = load(f"+{key}.buffer.length=4", f"{key}.buffer.factor=0.5", f"{key}={{other:[1,2]}}")
    assert dict(config.reward_model.reward_kwargs) == {
        "buffer": {"length": 4, "factor": 0.5},
        "other": [1, 2],
    }
    config = load(f"{key}={{a:1,b:2}}", f"~{key}.a")
    assert dict(config.reward_model.reward_kwargs) == {"b": 2}


def test_keys_below_a_plain_value_and_invalid_deletions_are_errors() -> None:
    key = "reward_model.reward_kwargs"
    message = error_of(f"{key}.a=1", f"{key}.a.b=2")
    assert message.startswith(f"{key}.a.b cannot be set: ")
    assert message.endswith(f"set {key}.a={{b:2}}")
    assert error_of(f"~{key}.a").startswith(f"~{key}.a: this key is not set")
    assert error_of("~trainer.seed").startswith("~trainer.seed: only keys of free-form mappings")


def test_setting_one_key_of_a_null_section_gives_the_others_defaults() -> None:
    assert load(recipe=None).actor_rollout_ref.model.init is None
    init = load(
        "actor_rollout_ref.model.init.num_layers=3", recipe=None
    ).actor_rollout_ref.model.init
    assert init is not None
    assert (init.num_layers, init.hidden_size) == (3, 192)
    assert load("actor_rollout_ref.model.init=null").actor_rollout_ref.model.init is None


def test_interpolations_are_resolved() -> None:
    config = load("trainer.seed=9", "data.seed=${trainer.seed}", "trainer.experiment_name=x")
    assert config.data.seed == 9
    assert config.trainer.default_local_dir == "checkpoints/slipstream/x"
    message = error_of("data.seed=${trainer.sed}")
    assert message.startswith("data.seed: ")
    assert "trainer.sed" in message


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("trainer.total_trainig_steps=5", "trainer.total_training_steps"),
        ("trainer.lr=5", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.rollout.temprature=1", "actor_rollout_ref.rollout.temperature"),
        ("partial_rollot=true", "actor_rollout_ref.rollout.partial_rollout"),
        ("actor.clip_ratio_hig=1", "actor_rollout_ref.actor.clip_ratio_high"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_similar_keys(override: str, nearest: str) -> None:
    message = error_of(override)
    assert message.startswith(
        f"{override.partition('=')[0]}: there is no such option; did you mean"
    )
    assert re.search(rf"\b{re.escape(nearest)}\b", message)


def test_an_unknown_key_without_similar_keys_names_the_command_that_lists_all() -> None:
    assert error_of("qqq.zzz=1") == (
        "qqq.zzz: there is no such option; `slipstream config` lists all options"
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "trainer.seed=abc",
            "trainer.seed: expected an integer, at least 0, got abc (str); "
            "for example trainer.seed=1",
        ),
        (
            "trainer.seed=1.5",
            "trainer.seed: expected an integer, at least 0, got 1.5 (float); "
            "for example trainer.seed=1",
        ),
        (
            "trainer.seed=true",
            "trainer.seed: expected an integer, at least 0, got true (bool); "
            "for example trainer.seed=1",
        ),
        (
            "trainer.seed=null",
            "trainer.seed: expected an integer, at least 0, got null (NoneType); "
            "for example trainer.seed=1",
        ),
        (
            "data.shuffle=1",
            "data.shuffle: expected true or false, got 1 (int); for example data.shuffle=true",
        ),
        (
            "data.truncation=up",
            "data.truncation: expected one of error, left, right, middle, got up (str); "
            "for example data.truncation=error",
        ),
        (
            "actor_rollout_ref.rollout.top_p=1.5",
            "actor_rollout_ref.rollout.top_p: "
            "expected a number, at least 0 and at most 1, got 1.5 (float); "
            "for example actor_rollout_ref.rollout.top_p=1",
        ),
        (
            "actor_rollout_ref.rollout.top_p=nan",
            "actor_rollout_ref.rollout.top_p: "
            "expected a number, at least 0 and at most 1, got nan (float); "
            "for example actor_rollout_ref.rollout.top_p=1",
        ),
        (
            "trainer.experiment_name=12",
            "trainer.experiment_name: expected a string, got 12 (int); for example "
            "trainer.experiment_name=run; a string that looks like a number needs quotes: "
            """trainer.experiment_name="'...'\"""",
        ),
        (
            "actor_rollout_ref.actor.optim.betas=[0.9]",
            "actor_rollout_ref.actor.optim.betas: expected a list of 2 numbers, each at least 0 "
            "and at most 1, got [0.9] (list); "
            "for example actor_rollout_ref.actor.optim.betas=[0.9,0.999]",
        ),
        (
            "reward_model.reward_kwargs=3",
            "reward_model.reward_kwargs: expected a mapping, got 3 (int); "
            "for example reward_model.reward_kwargs='{}'",
        ),
        (
            "data.val_batch_size=0",
            "data.val_batch_size: expected an integer, at least 1, or null, got 0 (int); "
            "for example data.val_batch_size=1",
        ),
        (
            "trainer.logger=[console,5]",
            "trainer.logger: expected a list of strings, or one string, "
            "got [console,5] (list); for example trainer.logger=[console,file]",
        ),
        (
            "trainer=5",
            "trainer=5: trainer is a section; set its options instead, such as "
            "trainer.mode, trainer.seed, trainer.total_epochs",
        ),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error(override: str, message: str) -> None:
    assert error_of(override) == message


def test_draft_plans_are_not_read_as_numbers_with_underscores() -> None:
    for text in ("8_4_32", "[8_4_32]", "['8_4_32']"):
        config = load(f"speculative.eagle.mab_configs={text}")
        assert config.speculative.eagle.mab_configs == ("8_4_32",)
    config = load("speculative.eagle.mab_configs=[8_4_32,6_2_8]")
    assert config.speculative.eagle.mab_configs == ("8_4_32", "6_2_8")
    assert "needs quotes" in error_of("speculative.eagle.mab_configs=8432")


CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize("interval", ["0.5_5", "1_5", "0.5_5.0", "'0.5_5'"])
def test_an_interval_is_not_read_as_a_number(interval: str) -> None:
    config = load(f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold={interval}")
    assert config.algorithm.rollout_correction.rollout_is_threshold == interval.strip("'")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("trainer.experiment_name=exp-1_2", "exp-1_2"),
        ("trainer.experiment_name=2024-05_06", "2024-05_06"),
        ("trainer.default_local_dir=runs/2024_01/x", "runs/2024_01/x"),
        ("data.train_files=[d/2024_01/a.parquet,b_1/2]", ("d/2024_01/a.parquet", "b_1/2")),
        ("trainer.project_name= 2024_01", "2024_01"),
    ],
)
def test_joined_numbers_in_names_and_paths_stay_unchanged(override: str, value: object) -> None:
    node: Any = load(override, "data.task=null", recipe=None)
    for part in override.partition("=")[0].split("."):
        node = getattr(node, part)
    assert node == value


def test_an_interval_in_a_mapping_or_list_is_not_read_as_a_number() -> None:
    text = "{rollout_is: token, rollout_is_threshold: 0.5_5, rollout_token_veto_threshold: 0.1}"
    correction = load(f"{CORRECTION}={text}").algorithm.rollout_correction
    assert correction.rollout_is_threshold == "0.5_5"
    assert correction.rollout_token_veto_threshold == 0.1
    listed = load(
        f"{CORRECTION}.rollout_rs=[token_k1,seq_mean_k1]",
        f"{CORRECTION}.rollout_rs_threshold=[0.5_2, 0.9_1.1]",
    )
    assert listed.algorithm.rollout_correction.rollout_rs_threshold == ("0.5_2", "0.9_1.1")
    mixed = load(f"{CORRECTION}.rollout_rs_threshold=[0.5_2, 3]")
    assert mixed.algorithm.rollout_correction.rollout_rs_threshold == ("0.5_2", 3.0)


def test_underscores_stay_in_names_and_separate_digits_in_integers(tmp_path: Path) -> None:
    config = load("trainer.project_name=2024_01", "trainer.seed=1_000", "trainer.logger=[file]")
    assert (config.trainer.project_name, config.trainer.seed) == ("2024_01", 1000)
    path = tmp_path / "run.yaml"
    path.write_text("trainer:\n  seed: 1_000\n  project_name: 'at 0.5_5'\n")
    assert load(file=path).trainer.seed == 1000


def test_an_interval_without_quotes_in_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    lines = "algorithm:\n  rollout_correction:\n    rollout_is: token\n    rollout_is_threshold: "
    path.write_text(lines + "0.5_5\n")
    assert 'write "0.5_5" with quotes' in error_of(file=path)
    base = tmp_path / "base.yaml"
    base.write_text(path.read_text())
    path.write_text("defaults:\n  - base\n  - _self_\n")
    assert "base.yaml: algorithm.rollout_correction.rollout_is_threshold" in error_of(file=path)
    merged = "x: &x\n  rollout_is_threshold: 1_5\nalgorithm:\n  rollout_correction:\n    <<: *x\n"
    path.write_text(merged)
    assert "rollout_is_threshold: YAML reads 1_5 as" in error_of(file=path)
    # YAML reads this interval as text, so it needs no quotes.
    path.write_text(lines + "0.5_5.0\n")
    assert load(file=path).algorithm.rollout_correction.rollout_is_threshold == "0.5_5.0"
    path.write_text(lines + '"0.5_5"\n')
    assert load(file=path).algorithm.rollout_correction.rollout_is_threshold == "0.5_5"


def test_all_problems_are_reported_at_once() -> None:
    message = error_of("trainer.seed=x", "data.shuffle=3", "actor_rollout_ref.rollout.name=trtllm")
    assert message.startswith("3 settings cannot be used:\n  - ")
    for part in ("trainer.seed: ", "data.shuffle: ", "actor_rollout_ref.rollout.name=embedded"):
        assert part in message
    message = error_of("trainer.sead=1", "data.shufle=true")
    assert "trainer.seed" in message
    assert "data.shuffle" in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("word", "'word' is not an override; write key=value"),
        ("trainer.seed=1,2", "is a sweep over several values"),
        ("trainer.seed=range(1,4)", "is a sweep"),
        ("trainer.experiment_name=a=[", "override 'trainer.experiment_name=a=[' cannot be read"),
    ],
)
def test_invalid_overrides_are_errors(override: str, part: str) -> None:
    assert part in error_of(override)


def test_a_recipe_and_a_file_cannot_be_combined(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"recipe 'tiny' and config file .* cannot be combined"):
        load_config(recipe="tiny", file=tmp_path / "a.yaml", hardware=CPU)


def test_an_unknown_recipe_is_an_error_that_lists_known_recipes() -> None:
    message = error_of(recipe="tinny")
    assert message.startswith("recipe 'tinny' does not exist; known recipes: default, long_tail, ")


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name: str) -> None:
    config = load_config(recipe=name, hardware=CPU, complete=name != "default")
    if name != "default":
        assert resolve_mode(config) == "sft+rl"


def test_a_file_composes_recipes_and_group_choices(tmp_path: Path) -> None:
    (tmp_path / "loss").mkdir()
    for name, low in (("wide", 0.4), ("narrow", 0.1)):
        (tmp_path / "loss" / f"{name}.yaml").write_text(
            f"# @package _global_\nactor_rollout_ref:\n  actor:\n    clip_ratio_low: {low}\n"
        )
    file = tmp_path / "mine.yaml"
    file.write_text("defaults:\n  - tiny\n  - loss: wide\n  - _self_\ntrainer:\n  seed: 11\n")
    config = load("data.val_size=8", file=file)
    assert (config.trainer.seed, config.data.val_size, config.data.train_batch_size) == (11, 8, 2)
    assert config.actor_rollout_ref.actor.clip_ratio_low == 0.4
    config = load("loss=narrow", file=file)
    assert config.actor_rollout_ref.actor.clip_ratio_low == 0.1
    assert "loss/wider" in error_of("loss=wider", file=file)


def test_a_file_without_self_in_its_defaults_wins_over_them(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [tiny]\ndata:\n  train_batch_size: 3\n")
    assert load(file=file).data.train_batch_size == 3


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "cannot be read"),
        ("- 1\n- 2\n", "must contain a mapping"),
        ("trainer:\n  sead: 1\n", "trainer.sead: there is no such option"),
        ("trainer: 3\n", "trainer is a section"),
        ("defaults: [nowhere]\n", "cannot be composed"),
    ],
)
def test_invalid_files_are_errors(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    assert part in error_of(file=file)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    assert "does not exist; check --config" in error_of(file=tmp_path / "none.yaml")


def test_yaml_reads_back_to_an_equal_tree(tmp_path: Path) -> None:
    config = load(
        "actor_rollout_ref.model.custom_chat_template='{{ messages }}'",
        "trainer.experiment_name='007'",
        "actor_rollout_ref.actor.optim.eps=1e-7",
        "+reward_model.reward_kwargs.a={b:[1,null,x]}",
    )
    file = tmp_path / CONFIG_FILE
    file.write_text(to_yaml(config))
    assert load(file=file) == config
    assert "${" not in to_yaml(config)


def test_text_that_looks_like_an_interpolation_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("trainer:\n  experiment_name: a\\${b}\n")
    config = load(file=file)
    assert config.trainer.experiment_name == "a${b}"
    file.write_text(to_yaml(config))
    assert load(file=file).trainer.experiment_name == "a${b}"


def test_diff_lists_changed_keys_except_resumable_ones() -> None:
    old = load()
    new = load(
        "trainer.seed=2",
        "trainer.total_training_steps=90",
        "trainer.logger=file",
        "trainer.resume_mode=disable",
        "+reward_model.reward_kwargs.a=1",
        "actor_rollout_ref.actor.optim.lr=1e-3",
    )
    assert diff(old, new) == [
        "actor_rollout_ref.actor.optim.lr: 0.0001 -> 0.001",
        "reward_model.reward_kwargs: {} -> {a:1}",
        "trainer.seed: 1 -> 2",
    ]
    assert diff(old, old) == []


def test_diff_between_a_random_model_and_a_checkpoint() -> None:
    loaded = load("actor_rollout_ref.model.init=null", "actor_rollout_ref.model.path=m")
    changes = diff(load(), loaded)
    assert changes[0] == "actor_rollout_ref.model.path: null -> m"
    assert changes[1].startswith("actor_rollout_ref.model.init: {family:qwen3,")


def test_resumable_keys_exist() -> None:
    assert set(options()) >= RESUMABLE_KEYS


def test_to_dict_returns_plain_lists_and_dictionaries() -> None:
    plain = to_dict(load("trainer.logger=file"))
    assert plain["trainer"]["logger"] == ["file"]
    assert type(plain["reward_model"]["reward_kwargs"]) is dict


def test_notices_are_logged_without_notify(caplog: pytest.LogCaptureFixture) -> None:
    load_config(["trainer.balance_batch=false"], recipe="tiny", hardware=CPU)
    assert [record.name for record in caplog.records] == ["slipstream.config"]


def test_options_missing_from_a_tree_get_their_defaults() -> None:
    config = load_config(recipe="tiny")
    tree = to_dict(config)
    del tree["speculative"]["train"]["depth"]
    del tree["critic"]
    assert from_dict(tree) == (config, [])


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("algorithm.adv_estimator=[1,2]", "algorithm.adv_estimator: expected a string, got [1,2]"),
        ("algorithm.adv_estimator={}", "algorithm.adv_estimator: expected a string, got {}"),
        ("trainer.seed={}", "trainer.seed: expected an integer"),
        ("nothing={}", "nothing: there is no such option"),
        ("trainer.seed=" + "9" * 6000, "an integer has too many digits; set the option"),
        ("trainer.seed=18446744073709551616", "trainer.seed: an integer of 65 bits does not fit"),
        ("data.task_kwargs={a:[18446744073709551616]}", "data.task_kwargs: an integer of 65 bits"),
        ("actor_rollout_ref.actor.optim.lr=" + "9" * 400, "optim.lr: an integer of 1329 bits"),
        ("trainer.seed=" + "[" * 3000 + "]" * 3000, "it is nested too deeply"),
        ("data.task_kwargs=" + "{a: " * 70 + "1" + "}" * 70, "data.task_kwargs: it is nested"),
        ("a" * 5000 + "=1", "no option with such a long name"),
        ("trainer.default_local_dir=" + "a" * 5000, "trainer.default_local_dir: 'aaa"),
        ("data.train_files=[a/" + "b" * 300 + "]", "a name of more than 255 bytes"),
        ("trainer.default_local_dir='a\0b'", "trainer.default_local_dir: 'a\\x00b' has a NUL"),
        ("trainer.project_name='\udc80'", "trainer.project_name: '\\udc80' has a lone surrogate"),
        ("data.train_files.0=a", "data.train_files.0 cannot be set: data.train_files=null"),
        ("actor_rollout_ref.actor.optim.betas.2=1", "betas=[0.9,0.999] has no item 2; set the"),
        ("trainer.seed.0=1", "trainer.seed.0 cannot be set: trainer.seed=1 has no item 0"),
        ("~data.task_kwargs.a.b", "this key is not set"),
        ("trainer@x=3", "names the package 'x', which only a config group has"),
        ("~=1", "names no option; write key=value"),
        ("trainer.project_name='${trainer.'", "trainer.project_name"),
    ],
)
def test_values_that_no_option_can_have_are_errors(override: str, part: str) -> None:
    message = error_of(override)
    assert part in message
    assert len(message) < 1500


_NINE = "[" + ",".join(["*{0}"] * 9) + "]"
_LAUGHS = "a: &a [x,x]\n" + "".join(
    f"{new}: &{new} {_NINE.format(old)}\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("trainer: {seed: " + "9" * 6000 + "}", "an integer has too many digits; give a YAML file"),
        ("trainer: {seed: 0x" + "f" * 6000 + "}", "trainer.seed: an integer of 24000 bits"),
        ("trainer: " + "[" * 3000 + "]" * 3000, "it is nested too deeply; give a YAML file"),
        (_LAUGHS, "stands for more than 100,000 values; remove the aliases"),
        ("a: &a [*a]", "stands for more than 100,000 values; remove the aliases"),
        ("trainer: {seed: 2024-13-45}", "ValueError: month must be in 1..12; give a YAML file"),
        ("algorithm: {adv_estimator: {}}", "algorithm.adv_estimator: expected a string, got {}"),
        ("nothing: {}", "nothing: there is no such option"),
    ],
)
def test_files_that_cannot_be_settings_are_errors(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    assert part in error_of(recipe=None, file=file)


def test_an_empty_mapping_for_a_section_sets_nothing() -> None:
    assert load("trainer={}", "actor_rollout_ref.rollout.engine_kwargs={}") == load()


def test_a_file_name_that_is_too_long_is_an_error() -> None:
    assert "does not exist; check --config" in error_of(recipe=None, file=Path("a" * 5000))


TEMPLATE = (
    "{% for m in messages %}\t{{ m['content'] }}  \n${a} é \\n 'x' \"y\" # z\n{% endfor %}   \n"
)
TEMPLATE_KEY = "actor_rollout_ref.model.custom_chat_template"


@pytest.mark.parametrize(
    "form",
    [
        f"{TEMPLATE_KEY}=PATH",
        "data.chat_template=PATH",
        "+data.apply_chat_template_kwargs.chat_template=PATH",
        "data.apply_chat_template_kwargs={chat_template: PATH}",
    ],
)
@pytest.mark.parametrize("name", ["t.jinja", "t.jinja2", "t.j2", "t.txt", "no suffix"])
def test_a_chat_template_may_be_a_file_whose_text_is_recorded(
    tmp_path: Path, form: str, name: str
) -> None:
    path = tmp_path / name
    path.write_text(TEMPLATE, encoding="utf-8")
    quoted = f"'{path}'" if " " in name else str(path)
    override = form.replace("PATH", quoted)
    config = load_config([override], recipe="tiny", hardware=CPU, notify=lambda notice: None)
    assert config.actor_rollout_ref.model.custom_chat_template == TEMPLATE
    assert dict(config.data.apply_chat_template_kwargs) == {}
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    path.unlink()
    again = load_config(file=tmp_path / "config.yaml")
    assert again.actor_rollout_ref.model.custom_chat_template == TEMPLATE
    assert diff(config, again) == []


def test_paths_of_chat_templates_may_be_relative_or_begin_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.jinja").write_text(TEMPLATE, encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for path in ("'~/t.jinja'", "t.jinja", "./t.jinja"):
        found = load(f"{TEMPLATE_KEY}={path}").actor_rollout_ref.model.custom_chat_template
        assert found == TEMPLATE


def test_a_changed_template_is_a_changed_setting_and_is_shown_short(tmp_path: Path) -> None:
    first = load(f"{TEMPLATE_KEY}='{{{{ messages }}}}'")
    (tmp_path / "t.jinja").write_text("{{ messages }}" + "x" * 9999)
    (change,) = diff(first, load(f"{TEMPLATE_KEY}={tmp_path / 't.jinja'}"))
    assert change.startswith(f"{TEMPLATE_KEY}: ")
    assert "a text of 10013 characters" in change
    assert len(change) < 300


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.jinja", None),
        ("", None),
        ("a" * 999, None),
        ("empty.jinja", b""),
        ("prose.txt", b"### user"),
        ("latin.jinja", b"\xff{{ messages }}"),
        ("tokenizer_config.json", b'{"chat_template": "{{ messages }}"}'),
    ],
)
def test_files_without_a_chat_template_are_errors(
    tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{TEMPLATE_KEY}="):
        load(f"{TEMPLATE_KEY}={path}")


def test_two_different_chat_templates_are_an_error() -> None:
    options = "data.apply_chat_template_kwargs={chat_template: '{{ messages }} '}"
    with pytest.raises(ConfigError, match=f"set only {TEMPLATE_KEY}"):
        load(options, f"{TEMPLATE_KEY}='{{{{ messages }}}}'")


ODD_FILE = """\
trainer:
  seed: many
  nnodes: 1
data:
  train_batch_size: 0

  unknown: 3
foo: 1
actor_rollout_ref.actor.ppo_epochs: x
"""


def problems_of(text: str, file: Path, *overrides: str) -> dict[str, str]:
    """The messages by their first word."""
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(overrides, file=file)
    lines = str(refused.value).split("\n  - ")
    return {line.replace("=", ":").partition(":")[0]: line for line in lines}


def test_a_refusal_names_the_file_and_the_line_that_sets_the_option(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    unknown = problems_of(ODD_FILE, file)
    assert f"({file} sets foo in line 8)" in " ".join(unknown.values())
    assert f"({file} sets data.unknown in line 7)" in " ".join(unknown.values())
    known = ODD_FILE.replace("  unknown: 3\n", "").replace("foo: 1\n", "")
    problems = problems_of(known, file)
    assert problems["trainer.seed"].endswith(f"({file} sets trainer.seed in line 2)")
    assert problems["data.train_batch_size"].endswith("sets data.train_batch_size in line 5)")
    assert problems["actor_rollout_ref.actor.ppo_epochs"].endswith("ppo_epochs in line 7)")


def test_rules_between_options_name_the_lines_too(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    text = "actor_rollout_ref:\n  rollout:\n    n: 1\nalgorithm:\n  adv_estimator: rloo\n"
    (problem,) = problems_of(text, file, "actor_rollout_ref.model.path=m").values()
    assert "algorithm.adv_estimator in line 5" in problem
    assert "actor_rollout_ref.rollout.n in line 3" in problem
    assert problem.count(str(file)) == 1


def test_only_the_source_that_counts_is_named(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    assert (
        str(file) not in problems_of("trainer:\n  seed: 1\n", file, "trainer.seed=x").popitem()[1]
    )
    with pytest.raises(ConfigError) as refused:
        load_config(["data.train_batch_size=0"], recipe="tiny")
    assert ".yaml" not in str(refused.value)


def test_values_of_defaults_and_aliases_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("trainer:\n  seed: x\n")
    file = tmp_path / "job.yaml"
    composed = problems_of("defaults: [base, _self_]\ntrainer:\n  nnodes: y\n", file)
    assert composed["trainer.seed"].endswith(f"({file} sets trainer.seed)")
    assert composed["trainer.nnodes"].endswith(f"({file} sets trainer.nnodes in line 3)")
    merged = "data: &a\n  seed: x\ntrainer:\n  <<: *a\n"
    assert "trainer.seed in line 2" in " ".join(problems_of(merged, file).values())


def test_an_interpolation_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    problem = problems_of("trainer:\n  project_name: ${nothing}\n", file)
    assert f"({file} sets trainer.project_name in line 2)" in " ".join(problem.values())
