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
from slipstream.build.servers import (
    SGLANG,
    VLLM,
    check_sglang,
    check_vllm,
    make_sglang,
    make_vllm,
    placement,
    server_python,
    sglang_settings,
    vllm_settings,
)
from slipstream.config import Config, Hardware, load_config
from slipstream.errors import ConfigError, EngineError
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import VersionSpan
from tests.inference.contract import endless
from tests.inference.helpers import EOS, decode, make_decoder, make_engine, update_from
from tests.inference.servers import local

SERVER = "actor_rollout_ref.rollout.server"


ROLLOUT = "actor_rollout_ref.rollout"


def load(folder: Path, *overrides: str, name: str = "vllm") -> Config:
    return load_config(
        [
            f"{ROLLOUT}.name={name}",
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
    """A program that runs contract servers in place of vLLM and SGLang."""
    return local.python(tmp_path)


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


@pytest.mark.parametrize(("name", "make"), [("vllm", make_vllm), ("sglang", make_sglang)])
def test_a_run_starts_servers_and_leaves_nothing_of_them(
    tmp_path: Path, python: Path, older: set[psutil.Process], name: str, make: Any
) -> None:
    transfer = tmp_path / "transfer"
    line = [f"{SERVER}.python={python}", f"{SERVER}.transfer_dir={transfer}"]
    config = load(tmp_path, *line, name=name)
    compute = ComputeThread()
    made = setup(config, compute)
    policy: Any = made.policy

    async def work() -> list[Any]:
        found = [await engine.generate(endless("a", 9, temperature=0.0))]
        policy.load_state_dict(make_decoder(1).state_dict())
        await engine.update_weights(update_from(policy, 1))
        return [*found, await engine.generate(endless("a", 9, temperature=0.0))]

    engine = make(made)
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
    assert (tmp_path / "servers" / f"{name}-0.log").exists()


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
    for kind, variable in ((VLLM, "SLIPSTREAM_VLLM_PYTHON"), (SGLANG, "SLIPSTREAM_SGLANG_PYTHON")):
        monkeypatch.delenv(variable, raising=False)
        with pytest.raises(ConfigError, match=rf"{SERVER}\.python=.*missing was not found"):
            server_python(kind, load(tmp_path, f"{SERVER}.python={tmp_path}/missing"))
        with pytest.raises(ConfigError, match=rf"set {SERVER}\.python.*{variable}"):
            server_python(kind, load(tmp_path))
        monkeypatch.setenv(variable, sys.executable)
        assert server_python(kind, load(tmp_path)) == Path(sys.executable)


def test_options_of_the_run_become_options_of_vllm(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        "actor_rollout_ref.rollout.max_num_seqs=7",
        "actor_rollout_ref.rollout.engine_kwargs.vllm={max-num-seqs: 9, swap_space: 4}",
    )
    settings = vllm_settings(config, make_decoder(0).config, 0)
    assert settings["dtype"] == str(torch.float32).removeprefix("torch.")
    assert settings["max_model_len"] == 96
    assert (settings["max_num_seqs"], settings["swap_space"]) == (9, 4)
    assert settings["generation_config"] == "vllm"
    # 7 sequences of 96 + 128 tokens, 2 layers of 2 heads of 16, keys and values, 4 bytes each.
    assert settings["kv_cache_memory_bytes"] == max(64 << 20, 7 * 224 * 2 * 2 * 2 * 16 * 4)


def test_options_of_the_run_become_options_of_sglang(tmp_path: Path) -> None:
    line = [
        f"{ROLLOUT}.max_num_seqs=7",
        f"{ROLLOUT}.max_num_batched_tokens=512",
        f"{ROLLOUT}.gpu_memory_utilization=0.7",
        f"{ROLLOUT}.enable_prefix_caching=false",
        f"{ROLLOUT}.enforce_eager=true",
        "trainer.seed=5",
        f"{ROLLOUT}.engine_kwargs.sglang={{tp-size: 2}}",
    ]
    config = load(tmp_path, *line, name="sglang")
    settings = sglang_settings(config, make_decoder(0).config, 1)
    assert settings == {
        # A sequence of 96 tokens needs 6 more of SGLang's context.
        "context_length": 104,
        "dtype": "float32",
        "max_running_requests": 7,
        "chunked_prefill_size": 512,
        "random_seed": 6,
        "disable_radix_cache": True,
        "cuda_graph_backend_decode": "disabled",
        "cuda_graph_backend_prefill": "disabled",
        "device": "cpu",
        # 64 MiB, the least, in tokens of 2 layers with 2 heads of 16, keys and values, 4 bytes each
        "max_total_tokens": (64 << 20) // 512,
        "tp_size": 2,
    }


def test_on_a_gpu_sglang_gets_a_share_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.build.servers.device_of", lambda _: torch.device("cuda"))
    config = load(tmp_path, f"{ROLLOUT}.gpu_memory_utilization=0.7", name="sglang")
    settings = sglang_settings(config, make_decoder(0).config, 0)
    assert settings["mem_fraction_static"] == 0.7
    assert "max_total_tokens" not in settings
    assert "device" not in settings
    config = load(tmp_path, f"{ROLLOUT}.kv_cache_bytes=1000000", name="sglang")
    assert sglang_settings(config, make_decoder(0).config, 0)["max_total_tokens"] == 1000000 // 512


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["top_k=5000"], r"rollout\.top_k=5000.*at most 4096"),
        (["top_k=1", "temperature=0.7"], r"rollout\.top_k=1 .*set temperature=0"),
        (["top_p=0.9", "min_p=0.1"], r"rollout\.min_p=0.1 .*set top_k"),
        (["temperature=1e-7"], r"rollout\.temperature=1e-07"),
        (
            ["min_p=0.1", "engine_kwargs.sglang={enable-deterministic-inference: true}"],
            r"rollout\.min_p=0.1.*remove enable_deterministic_inference",
        ),
        (
            ["val_kwargs.do_sample=true", "val_kwargs.temperature=1", "val_kwargs.top_k=5000"],
            r"rollout\.val_kwargs\.top_k=5000",
        ),
        (["engine_kwargs.sglang=3"], r"engine_kwargs\.sglang must be a mapping"),
        (["top_p=0.9"], None),
        (["top_p=0.9", "min_p=0.1", "top_k=40"], None),
        (["top_k=5000", "engine_kwargs.sglang.sampling_mask_max_tokens=6000"], None),
    ],
)
def test_sampling_that_sglang_cannot_report_is_refused(
    tmp_path: Path, overrides: list[str], key: str | None
) -> None:
    line = [f"{SERVER}.urls=[http://localhost:1]", *(f"{ROLLOUT}.{text}" for text in overrides)]
    config = load(tmp_path, *line, name="sglang")
    if key is None:
        check_sglang(config, make_decoder(0).config)
    else:
        with pytest.raises(ConfigError, match=key):
            check_sglang(config, make_decoder(0).config)


def test_replicas_on_a_cpu_have_their_own_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 4, 5, 6})
    monkeypatch.setattr("slipstream.build.servers.usable_cores", lambda: 4)
    assert placement(VLLM, load(tmp_path), 0) == {}
    config = load(tmp_path, f"{SERVER}.replicas=2")
    found = [placement(VLLM, config, number)["VLLM_CPU_OMP_THREADS_BIND"] for number in range(2)]
    assert found == ["3,4", "5,6"]
    assert placement(SGLANG, config, 1) == {"SGLANG_CPU_OMP_THREADS_BIND": "5,6"}
    config = load(tmp_path, f"{SERVER}.replicas=5")
    found = [placement(VLLM, config, number)["VLLM_CPU_OMP_THREADS_BIND"] for number in range(5)]
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
