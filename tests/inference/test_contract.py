"""Runs the contract suite on every engine."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import tests.inference.contract_updates  # noqa: F401 (adds its cases to CASES)
from slipstream.config.engines import SERVED, engine_entry, engine_names
from slipstream.errors import EngineError
from slipstream.inference.driver import AsyncEngine
from slipstream.inference.embedded import EmbeddedEngine
from slipstream.inference.engine import EngineSettings
from slipstream.inference.fake import FakeEngine, ScriptedCore
from slipstream.inference.hf import HFCore, HFEngine
from slipstream.models import Decoder, save_checkpoint
from slipstream.types import GenerateRequest, Generation
from tests.inference.contract import CASES, DRIVER_CASES, Case, Harness
from tests.inference.helpers import EOS, VOCAB, decode, make_decoder, make_request


def embedded() -> AsyncEngine:
    settings = EngineSettings(max_model_len=96, dtype=torch.float32)
    return EmbeddedEngine(make_decoder(0, eos=EOS), settings, decode=decode)


def hf_model(decoder: Decoder) -> Any:
    """The same policy in transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = decoder.config.to_hf()
    config = AutoConfig.for_model(raw.pop("model_type"), **raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dict(decoder.named_parameters()), strict=False)
    return model


def hf() -> AsyncEngine:
    model = hf_model(make_decoder(0, eos=EOS))
    return HFEngine(HFCore(model, max_model_len=96, eos_token_ids=(EOS,), decode=decode))


def fake() -> AsyncEngine:
    def script(request: GenerateRequest) -> list[int]:
        first = sum(request.prompt_ids) + len(request.request_id)
        return [1 + (first + i * i) % (VOCAB - 1) for i in range(80)]

    core = ScriptedCore(
        script, vocab_size=VOCAB, max_model_len=96, eos_token_ids=(EOS,), decode=decode
    )
    return FakeEngine(core)


def slow_down(engine: AsyncEngine) -> Callable[[float], None]:
    """Return a function that sets a delay in seconds for each decode step of `engine`."""
    seconds = 0.0

    def gate(value: float) -> None:
        nonlocal seconds
        seconds = value

    if isinstance(engine.core, HFCore):
        model = engine.core._model
        forward = model.forward

        def slow_forward(*args: Any, **more: Any) -> Any:
            time.sleep(seconds)
            return forward(*args, **more)

        model.forward = slow_forward
        return gate
    step = engine.core.step

    def slow_step() -> list[Generation]:
        time.sleep(seconds)
        return step()

    engine.core.step = slow_step  # type: ignore[method-assign]
    return gate


def test_a_checkpoint_with_another_architecture_is_refused(tmp_path: Path) -> None:
    save_checkpoint(make_decoder(1, rope_theta=500.0), tmp_path)
    engine = embedded()
    with pytest.raises(EngineError, match=r"rope_theta is 500\.0, but .* has 10000\.0"):
        anyio.run(engine.update_weights_from_checkpoint, tmp_path, 1)
    assert engine.stats().version == 0
    engine.close()


ENGINES: dict[str, Callable[[], AsyncEngine]] = {"embedded": embedded, "hf": hf, "fake": fake}


def test_every_registered_engine_is_tested_and_has_its_registered_capabilities() -> None:
    # Engines with servers are tested in tests/inference/servers.
    assert sorted(engine_names()) == sorted([*ENGINES, *SERVED])
    for name, make in ENGINES.items():
        engine = make()
        assert engine.capabilities == engine_entry(name).capabilities, name
        engine.close()


@pytest.mark.parametrize(("name", "lends"), [("embedded", True), ("hf", False), ("fake", False)])
def test_an_engine_frees_cores_if_its_capabilities_say_so(name: str, lends: bool) -> None:
    engine = ENGINES[name]()
    if isinstance(engine, EmbeddedEngine):
        engine.close()
        settings = EngineSettings(max_model_len=96, dtype=torch.float32, one_thread_below=4)
        engine = EmbeddedEngine(make_decoder(0, eos=EOS), settings, decode=decode)
    assert engine.capabilities.one_thread_tail == lends
    events: list[bool] = []
    engine.lend_to(events.append)
    anyio.run(engine.generate, make_request("a", max_tokens=4, ignore_eos=True))
    assert events == ([True, False] if lends else [])
    engine.close()


@pytest.fixture(params=ENGINES.values(), ids=list(ENGINES))
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    engine = request.param()
    yield Harness(engine, slow_down(engine))
    engine.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(harness: Harness, case: Case) -> None:
    async def bounded() -> None:
        with anyio.fail_after(20):
            await case(harness)

    anyio.run(bounded)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
@pytest.mark.parametrize("case", DRIVER_CASES, ids=lambda case: case.__name__)
def test_driver(
    engine: Callable[[], AsyncEngine], case: Callable[[AsyncEngine], Awaitable[None]]
) -> None:
    made = engine()

    async def bounded() -> None:
        with anyio.fail_after(20):
            await case(made)

    anyio.run(bounded)
    made.close()
