"""Tests of `slipstream doctor`: its findings, its output and its exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import cli
from slipstream.config.hardware import Hardware
from slipstream.preflight import doctor, doctor_checks
from slipstream.preflight.doctor_checks import Finding
from slipstream.preflight.self_test import RESPONSES, TOKENS, self_test
from slipstream.rewards.sandbox.memory_cgroup import FoundGroups, MemoryGroups, memory_groups
from slipstream.rewards.sandbox.protocol import SandboxError
from slipstream.training.compute_thread import ComputeThread


def finding(status: str = "ok", **more: Any) -> Finding:
    values = {"section": "versions", "name": "torch", "value": "2.13.0", **more}
    return Finding(status=status, **values)  # type: ignore[arg-type]


def only(monkeypatch: pytest.MonkeyPatch, *findings: Finding) -> None:
    """Replace all checks of the doctor by one check with these findings."""
    monkeypatch.setattr(doctor, "all_checks", lambda *_: [("versions", lambda: findings)])


def test_json_output_contains_the_facts_of_all_checks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["doctor", "--json", "--folder", str(tmp_path / "runs")]) == 0
    output = json.loads(capsys.readouterr().out)
    assert output["ok"] is True
    by_name = {(f["section"], f["name"]): f for f in output["findings"]}
    assert [status for f in output["findings"] if (status := f["status"]) == "problem"] == []
    # One or both of the versions can have a build suffix such as "+cpu".
    torches = [torch.__version__, by_name["versions", "torch"]["facts"]["version"]]
    assert len({version.partition("+")[0] for version in torches}) == 1
    assert by_name["memory and disk", "disk"]["facts"]["folder"] == str(tmp_path)
    assert by_name["memory and disk", "memory"]["facts"]["free_for_process"] > 0
    assert by_name["processor", "cores"]["facts"]["usable"] >= 1
    for dtype in ("float32", str(by_name["processor", "dtype=auto"]["facts"]["dtype"])):
        tested = by_name["self-test", f"{dtype} on cpu"]["facts"]
        # Two rollouts, the second with new weights.
        assert tested["tokens"] == 2 * RESPONSES * TOKENS
        assert tested["differing"] == 0 or not tested["exact"]
    assert ("sandbox", "bubblewrap, python") in by_name
    memory = by_name["sandbox", "memory limit"]
    assert memory["facts"]["cgroups"] == (
        groups.version if (groups := memory_groups().groups) else None
    )
    assert ("sandbox", "scoring workers") in by_name
    assert by_name["engines", "embedded"]["facts"] == {"found": True}


def test_a_check_that_raises_is_a_problem_and_later_checks_still_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Iterator[Finding]:
        yield finding(name="first")
        raise OSError("no such device")

    checks = [("GPUs", broken), ("engines", lambda: [finding(section="engines", name="hf")])]
    monkeypatch.setattr(doctor, "all_checks", lambda *_: checks)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "failed: OSError: no such device; " in printed
    assert "make install" in printed
    assert printed.index("first") < printed.index("failed") < printed.index("engines")
    assert printed.rstrip().splitlines()[-1].startswith("1 problem found")


def test_notes_do_not_change_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only(monkeypatch, finding("note", remedy="unset it"), finding("note"))
    assert cli.main(["doctor"]) == 0
    assert capsys.readouterr().out.rstrip().endswith("no problems found (2 notes)")


@pytest.mark.parametrize("columns", [20, 40, 80])
def test_output_fits_a_narrow_terminal_and_has_no_color_codes(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    words = "of several words each of which is short"
    only(monkeypatch, finding("problem", value=words, remedy=words), finding("ok"))
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert max(map(len, printed.splitlines())) <= columns
    assert " ".join(printed.split()).count("several words") == 2


@pytest.mark.parametrize(
    ("requirement", "status", "value", "remedy"),
    [
        ("numpy>=1.0", "ok", "(needs >=1.0)", ""),
        ("numpy>=99", "problem", "(needs >=99)", 'pip install "numpy>=99"'),
        ("no-such-package>=2", "problem", "not installed (needs >=2)", "no-such-package>=2"),
    ],
)
def test_versions_of_packages_are_compared_with_their_requirements(
    requirement: str, status: str, value: str, remedy: str
) -> None:
    name = requirement.partition(">")[0]
    found = doctor_checks.package(name, requirement)
    assert found.status == status
    assert value in found.value
    assert remedy in found.remedy


def test_requirements_come_from_the_source_tree_or_the_installed_package(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "slipstream-rl"\nrequires-python = ">=3.11"\n'
        'dependencies = ["numpy>=2"]\n[project.optional-dependencies]\ngym = ["reasoning-gym>=1"]\n'
    )
    found = doctor_checks.requirements(tmp_path)
    assert (found.python, found.needed) == (">=3.11", {"numpy": "numpy>=2"})
    assert found.optional == {"reasoning-gym": "reasoning-gym>=1"}
    # The pyproject.toml of another project is ignored.
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "other"\n')
    assert "torch" in doctor_checks.requirements(tmp_path).needed


def test_missing_optional_packages_are_notes_with_a_pip_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = doctor_checks.requirements().optional
    assert set(doctor_checks.EXTRAS) <= set(known)

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    found = {f.name: f for f in doctor_checks.extras()}
    assert {f.status for f in found.values()} == {"note"}
    assert found["mlflow-skinny"].remedy == f'pip install "{known["mlflow-skinny"]}"'
    assert found["mlflow-skinny"].value.endswith("(trainer.logger=mlflow)")


def test_a_run_folder_that_is_a_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (found,) = doctor_checks.disk(tmp_path / "file")
    assert found.status == "problem"
    assert found.remedy.startswith("set trainer.default_local_dir")
    (missing,) = doctor_checks.disk(tmp_path / "not" / "yet")
    assert missing.facts["folder"] == str(tmp_path)


@pytest.mark.parametrize(
    ("free", "status"), [(10**8, "problem"), (10**9, "note"), (5 * 10**9, "ok")]
)
def test_status_by_free_memory(free: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.inference.engine.memory.free_bytes", lambda device: free)
    (found,) = doctor_checks.memory()
    assert found.status == status
    assert found.value.startswith(f"{free / 1e9:.1f} GB of ")


def test_cores_idle_because_of_omp_num_threads_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.threads.usable_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = doctor_checks._threads(1)
    assert found.status == "note"
    assert found.value.startswith("4 of ")
    assert found.value.endswith("1 thread (OMP_NUM_THREADS=1)")
    assert found.remedy.startswith("3 idle: unset OMP_NUM_THREADS")
    assert doctor_checks._threads(4).status == "ok"
    # Without the variable, torch's choice is accepted.
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert doctor_checks._threads(2).status == "ok"


def test_gpus_that_torch_cannot_use_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor_checks, "detect_hardware", lambda: Hardware(gpus=2))
    (found,) = doctor_checks.gpus()
    assert (found.status, found.value) == ("note", "2 present, but torch can use none of them")
    assert "torch built for CUDA" in found.remedy


def test_a_broken_sandbox_is_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise SandboxError("bwrap is not installed")

    monkeypatch.setattr("slipstream.rewards.sandbox.local.BubblewrapSandbox.run", refuse)
    for found in doctor_checks.sandbox():
        assert found.status == "note"
        assert found.remedy.startswith("bwrap is not installed (only rewards that run programs")


@pytest.mark.parametrize("version", [1, 2])
def test_a_memory_limit_by_cgroups_is_ok(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    found = FoundGroups(MemoryGroups(Path("/sys/fs/cgroup/x"), version))
    monkeypatch.setattr("slipstream.rewards.sandbox.memory_cgroup.memory_groups", lambda: found)
    (only,) = doctor_checks.sandbox_memory()
    assert (only.status, only.facts, only.remedy) == ("ok", {"cgroups": version}, "")
    assert f"cgroups (version {version})" in only.value


def test_a_memory_limit_without_cgroups_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    found = FoundGroups(None, "no cgroup may be written")
    monkeypatch.setattr("slipstream.rewards.sandbox.memory_cgroup.memory_groups", lambda: found)
    (only,) = doctor_checks.sandbox_memory()
    assert (only.status, only.facts) == ("note", {"cgroups": None})
    assert only.remedy.startswith("no cgroup may be written; ")
    assert "systemd-run --user --scope" in only.remedy


def test_workers_without_a_lock_down_are_only_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "slipstream.rewards.workers.WorkerPool.call", lambda *_: "darwin has no seccomp"
    )
    (found,) = doctor_checks.scoring_workers()
    assert (found.status, found.facts) == ("note", {"locked_down": False})
    assert found.remedy.startswith("darwin has no seccomp (only math and reasoning-gym rewards")


def test_differing_log_probs_are_a_problem_if_row_identity_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute = ComputeThread()
    try:
        result = self_test(torch.float32, torch.device("cpu"), compute)
    finally:
        compute.close()
    assert result.passed
    values = {name: getattr(result, name) for name in result.__slots__}
    values |= {"differing": 3, "largest": 0.5, "exact": True}
    failed = type(result)(**values)
    assert not failed.passed
    monkeypatch.setattr("slipstream.preflight.self_test.self_test", lambda *args: failed)
    for found in doctor_checks.self_test():
        assert found.status == "problem"
        assert found.value.startswith(f"3 of {result.tokens} log-probs differ")
        assert found.value.endswith(" 0.5")
        assert "slipstream doctor --json" in found.remedy
