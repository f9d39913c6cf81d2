"""Tests of the registry of engines, and of rules and remedies that use it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from slipstream.config import engines
from slipstream.config.engines import (
    EMBEDDED,
    HF,
    engine_entry,
    engine_lacks,
    engine_names,
    engines_with,
    register_engine,
    selected_engine,
)
from slipstream.config.hardware import Hardware
from slipstream.config.load import load_config
from slipstream.config.schema import Config
from slipstream.errors import ConfigError
from slipstream.types import EngineCapabilities, PolicyKind, Transport

NAME = "actor_rollout_ref.rollout.name"


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_ENGINES", dict(engines._ENGINES))


def load(*overrides: str) -> Config:
    return load_config(overrides, recipe="tiny", hardware=Hardware(gpus=0))


def test_capabilities_of_the_built_in_engines() -> None:
    assert engine_names() == ("embedded", "hf", "vllm", "sglang", "fake")
    embedded, hf, vllm, sglang, fake = (engine_entry(name).capabilities for name in engine_names())
    assert embedded == EngineCapabilities(
        policies=frozenset({PolicyKind.DECODER}),
        keyed_noise=True,
        exact=True,
        drafts=True,
        hidden_states=True,
        top_log_probs=0,
        transports=frozenset({Transport.REFERENCE}),
        several_processes=True,
        one_thread_tail=True,
        kv_budget=True,
        width_multiple=16,
        for_tests=False,
    )
    assert hf.policies == frozenset(PolicyKind)
    assert (hf.keyed_noise, hf.exact, hf.drafts) == (True, False, False)
    assert sglang == EngineCapabilities(policies=frozenset({PolicyKind.DECODER}), servers=True)
    assert vllm == replace(sglang, drafts=True)
    assert fake == EngineCapabilities(for_tests=True)


def test_the_registry_imports_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys, slipstream.config.engines\n"
        "print([n for n in ('torch', 'slipstream.inference', 'slipstream.build') "
        "if n in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_a_remedy_names_all_engines_that_a_run_can_use() -> None:
    assert engines_with(lambda engine: engine.drafts) == f"{NAME}=embedded or {NAME}=vllm"
    assert engines_with(lambda engine: engine.keyed_noise) == f"{NAME}=embedded or {NAME}=hf"
    register_engine("mine", replace(HF, drafts=True), print)
    register_engine("scripted", replace(HF, drafts=True, for_tests=True), print)
    assert engines_with(lambda engine: engine.drafts) == (
        f"{NAME}=embedded or {NAME}=vllm or {NAME}=mine"
    )


def test_rules_use_the_capabilities_of_a_registered_engine() -> None:
    drafts = ("speculative.enable=true", "speculative.spec_strategy=history")
    register_engine("plain", HF, print)
    register_engine("drafting", replace(HF, drafts=True), print)
    assert load(f"{NAME}=drafting", *drafts).actor_rollout_ref.rollout.name == "drafting"
    with pytest.raises(ConfigError) as caught:
        load(f"{NAME}=plain", *drafts)
    assert f"{NAME}=plain does not support drafts" in str(caught.value)
    engines = f"{NAME}=embedded or {NAME}=vllm or {NAME}=drafting"
    assert f"set {engines} or speculative.enable=false" in str(caught.value)


def test_widths_must_be_multiples_of_the_number_that_the_engine_needs() -> None:
    register_engine("eights", replace(EMBEDDED, width_multiple=8), print)
    size = "actor_rollout_ref.model.init.intermediate_size"
    assert load(f"{NAME}=eights", f"{size}=72").actor_rollout_ref.model.init is not None
    with pytest.raises(ConfigError, match=f"multiple of 8, which the eights .*set {size}=80"):
        load(f"{NAME}=eights", f"{size}=73")
    with pytest.raises(ConfigError, match=f"multiple of 16, which the embedded .*set {size}=80"):
        load(f"{size}=72")


def test_an_unknown_engine_is_an_error_that_lists_known_engines() -> None:
    with pytest.raises(ConfigError) as caught:
        load(f"{NAME}=embeded")
    message = str(caught.value)
    assert f"{NAME}=embeded is not known; did you mean embedded?" in message
    assert "(known: embedded, hf, vllm, sglang, fake)" in message
    assert "actor_rollout_ref.model.external_lib" in message


def test_an_engine_of_a_module_that_is_not_imported_yet_is_accepted() -> None:
    config = load(
        f"{NAME}=mine",
        "actor_rollout_ref.model.external_lib=engine_of_mine",
        "speculative.enable=true",
        "speculative.spec_strategy=history",
    )
    assert selected_engine(config) is None
    assert not engine_lacks(config, lambda engine: engine.drafts)
    with pytest.raises(ConfigError, match=f"{NAME}=mine is not known"):
        engine_entry("mine")


def test_two_engines_with_the_same_name_are_an_error() -> None:
    register_engine("mine", HF, print)
    register_engine("mine", HF, print)
    with pytest.raises(ConfigError, match="engine named 'mine' is already registered"):
        register_engine("mine", HF, repr)
    with pytest.raises(ConfigError, match="engine named 'hf' is already registered"):
        register_engine("hf", EMBEDDED, print)


def test_factories_can_be_functions_or_dotted_paths() -> None:
    register_engine("function", HF, str.upper)
    register_engine("path", HF, "operator:neg", check="operator:truediv")
    assert engine_entry("function").make("a") == "A"
    assert engine_entry("path").make(3) == -3
    with pytest.raises(ZeroDivisionError):
        engine_entry("path").check_settings(1, 0)  # type: ignore[arg-type]
    engine_entry("function").check_settings(Config(), None)
    with pytest.raises(ConfigError, match=f"{NAME}=fake cannot be used in a run"):
        engine_entry("fake").make(None)
