"""Programs run on this machine, isolated and not isolated."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slipstream.errors import RewardError
from slipstream.rewards.sandbox import local
from slipstream.rewards.sandbox.local import BubblewrapSandbox, UnisolatedSandbox
from slipstream.rewards.sandbox.protocol import Program, ProgramLimits, Sandbox, SandboxError
from tests.rewards.sandbox.helpers import LIMITS, isolated

BOTH = [
    pytest.param(BubblewrapSandbox(LIMITS), marks=isolated, id="isolated"),
    pytest.param(UnisolatedSandbox(LIMITS), id="not isolated"),
]
ECHO = "import sys; print(sys.stdin.read().upper(), end='')"


@pytest.mark.parametrize("sandbox", BOTH)
def test_each_standard_input_is_a_separate_run(sandbox: Sandbox) -> None:
    big = "ä" * 20_000
    ran = list(sandbox.run(Program(ECHO), ["a\nb", "", big]))
    assert [r.stdout for r in ran] == ["A\nB", "", "Ä" * 20_000]
    assert {r.verdict for r in ran} == {"ok"}


@pytest.mark.parametrize("sandbox", BOTH)
@pytest.mark.parametrize(
    ("code", "verdict", "message"),
    [
        ("raise SystemExit(3)", "failed", ""),
        ("raise ValueError('no')", "failed", "ValueError: no"),
        ("print(", "failed", "SyntaxError"),
        ("while True: pass", "time", ""),
        ("print('x' * 100_000)", "output", ""),
        ("import os; os.abort()", "failed", ""),
        ("", "ok", ""),
    ],
)
def test_verdicts(sandbox: Sandbox, code: str, verdict: str, message: str) -> None:
    (ran,) = sandbox.run(Program(code), [""])
    assert ran.verdict == verdict
    assert message in ran.stderr


@pytest.mark.parametrize("sandbox", BOTH)
@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("c", '#include <stdio.h>\nint main() { int x; scanf("%d", &x); printf("%d", 2 * x); }'),
        ("cpp", "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x; }"),
    ],
)
def test_programs_are_compiled_once(sandbox: Sandbox, language: str, code: str) -> None:
    assert [r.stdout for r in sandbox.run(Program(code, language), ["21", "4"])] == ["42", "8"]
    (broken,) = sandbox.run(Program("int main() { return x; }", language), ["21", "4"])
    assert broken.verdict == "compile"
    assert "x" in broken.stderr


def test_no_run_starts_after_the_total_time() -> None:
    sandbox = UnisolatedSandbox(ProgramLimits(run_timeout_s=0.2, total_timeout_s=0.1))
    ran = list(sandbox.run(Program("while True: pass"), ["", "", ""]))
    assert [r.verdict for r in ran] == ["time"]


def test_unisolated_programs_leave_no_folder_behind(tmp_path: Path) -> None:
    code = "import os; open('x', 'w').write('x'); print(os.getcwd(), os.environ['HOME'])"
    (ran,) = UnisolatedSandbox(LIMITS).run(Program(code), [""])
    here, home = ran.stdout.split()
    assert here == home
    assert not Path(here).exists()


@isolated
def test_the_configured_interpreter_is_used() -> None:
    code = "import sys; print(sys.executable)"
    for python in ("/usr/bin/python3", "/usr/bin/python3.11"):
        if Path(python).exists():
            (ran,) = BubblewrapSandbox(LIMITS, python=python).run(Program(code), [""])
            assert ran.stdout.strip() == python


@pytest.mark.parametrize("sandbox", BOTH)
def test_an_unknown_language_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(RewardError, match=r"'pyton'.*did you mean python.*sandbox_fusion.url"):
        list(sandbox.run(Program("", "pyton"), [""]))


def test_a_missing_interpreter_is_refused() -> None:
    sandbox = UnisolatedSandbox(LIMITS, python="/nowhere/python3")
    with pytest.raises(RewardError, match=r"no Python .* /nowhere/python3.*sandbox\.python"):
        list(sandbox.run(Program(""), [""]))


def test_missing_bubblewrap_raises_with_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    which = shutil.which
    monkeypatch.setattr(
        shutil, "which", lambda name, **more: None if name == "bwrap" else which(name, **more)
    )
    local._check_bubblewrap.cache_clear()
    try:
        with pytest.raises(RewardError, match=r"apt install bubblewrap.*without_isolation=true"):
            list(BubblewrapSandbox(LIMITS).run(Program("print(1)"), [""]))
    finally:
        local._check_bubblewrap.cache_clear()


@isolated
def test_an_error_of_bwrap_raises_sandbox_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local._check_bubblewrap()
    original = local._file_system
    monkeypatch.setattr(
        local, "_file_system", lambda *a: [*original(*a), "--ro-bind", "/nowhere", "/nowhere"]
    )
    with pytest.raises(SandboxError, match="nowhere"):
        list(BubblewrapSandbox(LIMITS).run(Program("print(1)"), [""]))
