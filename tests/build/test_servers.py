"""Servers as a run makes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import torch

from slipstream.build.engine import EngineSetup
from slipstream.build.servers import check_vllm, make_vllm, placement, vllm_python, vllm_settings
from slipstream.config import Config, Hardware, load_config
from slipstream.errors import ConfigError, EngineError
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import VersionSpan
from tests.docs.pages import ROOT
from tests.inference.contract import endless
from tests.inference.helpers import EOS, decode, make_decoder, make_engine, update_from
from tests.inference.servers.local import PROGRAM

SERVER = "actor_rollout_ref.rollout.server"


def load(folder: Path, *overrides: str) -> Config:
    return load_config(
        [
            "actor_rollout_ref.rollout.name=vllm",
            f"trainer.default_local_dir={folder}",
            "actor_rollout_ref.rollout.dtype=float32",
            "actor_rollout_ref.rollout.max_model_len=96",
            *overrides,
        ],
        recipe="tiny",
        hardware=Hardware(gpus=0),
        notify=lambda _: None,
    )


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """A program that runs this Python with the contract server in place of vLLM."""
    script = tmp_path / "python"
    script.write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{PROGRAM}:{ROOT}" exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return script


def setup(config: Config, compute: ComputeThread) -> EngineSetup:
    return EngineSetup(
        config=config,
        policy=make_decoder(0, eos=EOS),
        trained=True,
        decode=decode,
        compute=compute,
        notify=None,
    )


@pytest.fixture
def older() -> set[psutil.Process]:
    """The processes that earlier tests have started in this process."""
    return set(psutil.Process().children(recursive=True))


def test_a_run_starts_servers_and_leaves_nothing_of_them(
    tmp_path: Path, python: Path, older: set[psutil.Process]
) -> None:
    transfer = tmp_path / "transfer"
    config = load(tmp_path, f"{SERVER}.python={python}", f"{SERVER}.transfer_dir={transfer}")
    compute = ComputeThread()
    made = setup(config, compute)
    policy: Any = made.policy

    async def work() -> list[Any]:
        found = [await engine.generate(endless("a", 9, temperature=0.0))]
        policy.load_state_dict(make_decoder(1).state_dict())
        await engine.update_weights(update_from(policy, 1))
        return [*found, await engine.generate(endless("a", 9, temperature=0.0))]

    engine = make_vllm(made)
    try:
        own = set(psutil.Process().children(recursive=True)) - older
        assert len(own) == 2  # the guard and the server
        results = anyio.run(work)
    finally:
        engine.close()
        compute.close()
    for version, result in enumerate(results):
        expected = make_engine(make_decoder(version)).run([endless("a", 9, temperature=0.0)])[0]
        assert result.error is None
        assert result.token_ids == expected.token_ids
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        assert result.spans == [VersionSpan(version, 0, 9)]
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in own)
    assert list(transfer.iterdir()) == []
    assert (tmp_path / "servers" / "vllm-0.log").exists()


def test_a_server_that_does_not_start_leaves_nothing(
    tmp_path: Path, python: Path, older: set[psutil.Process]
) -> None:
    transfer = tmp_path / "transfer"
    config = load(
        tmp_path,
        f"{SERVER}.python={python}",
        f"{SERVER}.transfer_dir={transfer}",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.no_such_option=3",
    )
    compute = ComputeThread()
    with pytest.raises(EngineError, match="unrecognized arguments: --no-such-option 3"):
        make_vllm(setup(config, compute))
    compute.close()
    assert list(transfer.iterdir()) == []
    assert set(psutil.Process().children(recursive=True)) <= older


def test_a_python_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_VLLM_PYTHON", raising=False)
    with pytest.raises(ConfigError, match=rf"{SERVER}\.python=.*missing was not found"):
        vllm_python(load(tmp_path, f"{SERVER}.python={tmp_path}/missing"))
    with pytest.raises(ConfigError, match=rf"set {SERVER}\.python"):
        vllm_python(load(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_VLLM_PYTHON", sys.executable)
    assert vllm_python(load(tmp_path)) == Path(sys.executable)


def test_options_of_the_run_become_options_of_vllm(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "actor_rollout_ref.rollout.max_num_seqs=7",
        "actor_rollout_ref.rollout.engine_kwargs.vllm={max-num-seqs: 9, swap_space: 4}",
    )
    settings = vllm_settings(config, make_decoder(0).config)
    assert settings["dtype"] == str(torch.float32).removeprefix("torch.")
    assert settings["max_model_len"] == 96
    assert (settings["max_num_seqs"], settings["swap_space"]) == (9, 4)
    assert settings["generation_config"] == "vllm"
    # 7 sequences of 96 + 128 tokens, 2 layers of 2 heads of 16, keys and values, 4 bytes each.
    assert settings["kv_cache_memory_bytes"] == max(64 << 20, 7 * 224 * 2 * 2 * 2 * 16 * 4)


def test_replicas_on_a_cpu_have_their_own_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 4, 5, 6})
    monkeypatch.setattr("slipstream.build.servers.usable_cores", lambda: 4)
    assert placement(load(tmp_path), 0) == {}
    config = load(tmp_path, f"{SERVER}.replicas=2")
    found = [placement(config, number)["VLLM_CPU_OMP_THREADS_BIND"] for number in range(2)]
    assert found == ["3,4", "5,6"]
    config = load(tmp_path, f"{SERVER}.replicas=5")
    found = [placement(config, number)["VLLM_CPU_OMP_THREADS_BIND"] for number in range(5)]
    assert found == ["3", "4", "5", "6", "3"]


@pytest.mark.parametrize(
    ("override", "allowed"),
    [
        ("actor_rollout_ref.rollout.temperature=0.001", False),
        ("actor_rollout_ref.rollout.temperature=2.5", False),
        ("actor_rollout_ref.rollout.temperature=0.01", True),
        ("actor_rollout_ref.rollout.val_kwargs.temperature=0.001", False),
    ],
)
def test_temperatures_that_the_server_would_change_are_refused(
    tmp_path: Path, override: str, allowed: bool
) -> None:
    line = [f"{SERVER}.urls=[http://localhost:1]", override]
    if "val_kwargs" in override:
        line.append("actor_rollout_ref.rollout.val_kwargs.do_sample=true")
    config = load(tmp_path, *line)
    if allowed:
        check_vllm(config, make_decoder(0).config)
    else:
        with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.*0.01 to 2"):
            check_vllm(config, make_decoder(0).config)
