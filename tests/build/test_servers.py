"""Servers as a run makes them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
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
    _check_transport,
    check_sglang,
    check_vllm,
    make_sglang,
    make_vllm,
    placement,
    server_python,
    vllm_settings,
)
from slipstream.build.vllm import check_vllm_settings
from slipstream.config import Config, Hardware, load_config
from slipstream.errors import ConfigError, EngineError
from slipstream.inference.servers.process import ServerProcess
from slipstream.training.compute_thread import ComputeThread
from slipstream.types import VersionSpan
from tests.inference.contract import endless
from tests.inference.helpers import EOS, decode, make_decoder, make_engine, update_from
from tests.inference.servers import local
from tests.inference.servers.local import launch
from tests.inference.servers.real import decoder

ROLLOUT = "actor_rollout_ref.rollout"
SERVER = f"{ROLLOUT}.server"


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
    with pytest.raises(EngineError, match="unrecognized arguments: --no-such-option 3") as error:
        make_vllm(setup(config, compute))
    assert str(error.value).endswith("engine_kwargs.vllm.no_such_option=3")
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
    settings = vllm_settings(config, make_decoder(0).config)
    assert settings["dtype"] == str(torch.float32).removeprefix("torch.")
    assert settings["max_model_len"] == 96
    assert (settings["max_num_seqs"], settings["swap_space"]) == (9, 4)
    assert settings["generation_config"] == "vllm"
    # 7 sequences of 96 + 128 tokens, 2 layers of 2 heads of 16, keys and values, 4 bytes each.
    assert settings["kv_cache_memory_bytes"] == max(64 << 20, 7 * 224 * 2 * 2 * 2 * 16 * 4)


def test_nothing_that_a_run_asks_for_is_changed(tmp_path: Path) -> None:
    settings = vllm_settings(load(tmp_path), make_decoder(0).config)
    assert not settings.keys() & {"tensor_parallel_size", "load_format", "enable_chunked_prefill"}
    config = load(
        tmp_path,
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.load_format=dummy",
        f"{ROLLOUT}.enable_chunked_prefill=true",
        f"{ROLLOUT}.enable_prefix_caching=false",
        f"{ROLLOUT}.max_num_batched_tokens=32",
        f"{ROLLOUT}.max_num_seqs=8",
        f"{ROLLOUT}.kv_cache_bytes=12345678",
    )
    settings = vllm_settings(config, make_decoder(0).config)
    assert settings["tensor_parallel_size"] == 2
    assert settings["load_format"] == "dummy"
    assert settings["enable_chunked_prefill"] is True
    assert settings["enable_prefix_caching"] is False
    # Below max_model_len, because vLLM prefills in pieces.
    assert settings["max_num_batched_tokens"] == 32
    assert settings["kv_cache_memory_bytes"] == 12345678
    check_vllm_settings(config, settings, make_decoder(0).config)


def test_a_server_on_gpus_has_as_many_as_its_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.build.servers.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = load(tmp_path, f"{SERVER}.replicas=2")
    found = [placement(VLLM, config, number)["CUDA_VISIBLE_DEVICES"] for number in range(2)]
    assert found == ["4", "5"]
    config = load(tmp_path, f"{SERVER}.replicas=2", f"{ROLLOUT}.tensor_model_parallel_size=2")
    found = [placement(VLLM, config, number)["CUDA_VISIBLE_DEVICES"] for number in range(2)]
    assert found == ["4,5", "6,7"]


def test_parts_of_a_server_on_a_cpu_divide_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 4, 5, 6})
    monkeypatch.setattr("slipstream.build.servers.usable_cores", lambda: 4)
    size = f"{ROLLOUT}.tensor_model_parallel_size=2"
    assert placement(VLLM, load(tmp_path, size), 0)["VLLM_CPU_OMP_THREADS_BIND"] == "3,4|5,6"
    config = load(tmp_path, size, f"{SERVER}.replicas=2")
    found = [placement(VLLM, config, number)["VLLM_CPU_OMP_THREADS_BIND"] for number in range(2)]
    assert found == ["3|4", "5|6"]


def test_servers_that_begin_with_random_weights_get_those_of_the_policy(
    tmp_path: Path, python: Path
) -> None:
    config = load(tmp_path, f"{SERVER}.python={python}", f"{ROLLOUT}.load_format=dummy")
    compute = ComputeThread()
    made = setup(config, compute)
    request = endless("a", 9, temperature=0.0)
    expected = make_engine(make_decoder(0, eos=EOS)).run([request])[0]
    older = set(psutil.Process().children(recursive=True))
    engine = make_vllm(made)
    try:
        results = [anyio.run(engine.generate, request)]
        for process in set(psutil.Process().children(recursive=True)) - older:
            if process.is_running() and not process.children():
                process.kill()
        results.append(anyio.run(engine.generate, request))
    finally:
        engine.close()
        compute.close()
    log = (tmp_path / "servers" / "vllm-0.log").read_text()
    assert log.count("random weights") == 2  # It was started again.
    for result in results:
        assert result.error is None
        assert result.token_ids == expected.token_ids
        assert result.log_probs == pytest.approx(expected.log_probs, abs=1e-5)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A contract server for `decoder(0)`, up to 96 tokens in float32."""
    process = launch(tmp_path_factory.mktemp("running"))
    yield process
    process.close()


@pytest.mark.parametrize(
    ("overrides", "model", "parts"),
    [
        ([], {}, ()),
        ([], {"vocab_size": 48}, ("its vocab_size is 64, the policy's 48", "--model FOLDER")),
        ([], {"num_layers": 3}, ("its num_hidden_layers is 2, the policy's 3",)),
        (["max_model_len=97"], {}, ("up to 96 tokens", "--max-model-len 97")),
        (["dtype=bfloat16"], {}, ("computes in float32", "--dtype bfloat16")),
    ],
)
def test_a_server_of_another_model_is_refused(
    tmp_path: Path,
    running: ServerProcess,
    overrides: list[str],
    model: dict[str, int],
    parts: tuple[str, ...],
) -> None:
    config = load(
        tmp_path, f"{SERVER}.urls=[{running.url}]", *(f"{ROLLOUT}.{one}" for one in overrides)
    )
    compute = ComputeThread()
    made = replace(setup(config, compute), policy=decoder(0, eos=EOS, **model))
    try:
        if not parts:
            make_vllm(made).close()
            return
        with pytest.raises(EngineError) as error:
            make_vllm(made)
    finally:
        compute.close()
    assert str(error.value).startswith(f"{SERVER}.urls: ")
    assert [part for part in (running.url, *parts) if part not in str(error.value)] == []


def test_an_address_without_a_vllm_server_is_refused(tmp_path: Path) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None: ...

    compute = ComputeThread()
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_port}"
        config = load(tmp_path, f"{SERVER}.urls=[{url}]")
        with pytest.raises(EngineError, match=f"{SERVER}.urls: .*{url} is no vLLM server"):
            make_vllm(setup(config, compute))
        other.shutdown()
    with pytest.raises(EngineError, match=f"{SERVER}.urls: {url}/version does not answer"):
        make_vllm(setup(config, compute))
    compute.close()


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


def test_transports_that_a_kind_of_server_lacks_are_refused(tmp_path: Path) -> None:
    config = load(tmp_path, f"{ROLLOUT}.name=sglang", f"{SERVER}.transport=shared_memory")
    with pytest.raises(ConfigError, match=rf"{SERVER}\.transport=shared_memory.*transport=file"):
        check_sglang(config, make_decoder(0).config)


def test_a_process_group_needs_a_gpu_for_each_of_its_ranks(
    tmp_path: Path, python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.build.servers.device_of", lambda _: torch.device("cuda"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    config = load(tmp_path, f"{SERVER}.replicas=2", f"{SERVER}.transport=collective")
    found = [placement(VLLM, config, number)["CUDA_VISIBLE_DEVICES"] for number in range(2)]
    assert found == ["5", "6"]
    _check_transport(VLLM, config)
    config = load(tmp_path, f"{SERVER}.replicas=3", f"{SERVER}.transport=collective")
    with pytest.raises(ConfigError, match=rf"{SERVER}\.transport=collective.*need 4 GPUs.*are 3"):
        _check_transport(VLLM, config)
