"""`slipstream doctor` checks the installation and suggests fixes.

It runs the checks of `doctor_checks` one after the other and prints one line per finding, or all
findings as JSON. If a check raises an error, that error is a finding, and the other checks still
run.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from slipstream import __version__
from slipstream.metrics.tables import Page
from slipstream.preflight import doctor_checks as checks
from slipstream.preflight import doctor_servers
from slipstream.preflight.doctor_checks import Finding

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}

Check = tuple[str, Callable[[], Iterable[Finding]]]


def all_checks(
    folder: Path, urls: Sequence[str] = (), python: str | None = None, engine: str = "vllm"
) -> list[Check]:
    """Return all checks with their sections, in the order of the output.

    `folder` is where runs will be stored; the disk check looks at its disk. `urls` are those of
    running servers, and `python` is the interpreter of the serving engine `engine`, if one is
    named.
    """
    return [
        ("versions", checks.versions),
        ("versions", checks.torch_build),
        # Later checks compile kernels. So this check, which counts compiled files, runs before.
        ("kernels", checks.kernels),
        ("processor", checks.cpu),
        ("memory and disk", checks.memory),
        ("memory and disk", partial(checks.disk, folder)),
        ("GPUs", checks.gpus),
        ("engines", checks.engines),
        ("engines", partial(doctor_servers.environments, python, engine)),
        ("servers", partial(doctor_servers.running, urls)),
        ("sandbox", checks.sandbox),
        ("sandbox", checks.sandbox_memory),
        ("sandbox", checks.scoring_workers),
        ("optional packages", checks.extras),
        ("self-test", checks.self_test),
    ]


def findings_of(section: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """Yield the findings of a check. If it raises an error, yield a finding about the error."""
    try:
        yield from check()
    except Exception as error:
        # The doctor reports any error that keeps a part of Slipstream from working.
        yield Finding(
            section=section,
            name="check",
            status="problem",
            value=f"failed: {type(error).__name__}: {error}",
            remedy="fix the cause named in the error, or reinstall with `make install`",
        )


def doctor(
    folder: Path,
    *,
    as_json: bool = False,
    urls: Sequence[str] = (),
    python: str | None = None,
    engine: str = "vllm",
) -> int:
    """Print all findings. Return 1 if at least one is a problem, else 0. The arguments are those of
    `all_checks`."""
    page = Page()
    found: list[Finding] = []
    section = ""
    with warnings.catch_warnings():
        # Users cannot act on warnings that libraries print during import.
        warnings.simplefilter("ignore")
        for name, check in all_checks(folder, urls, python, engine):
            for finding in findings_of(name, check):
                found.append(finding)
                if finding.section == "kernels" and finding.status == "note":
                    print("compiling kernels (one or two minutes)", file=sys.stderr)
    problems = sum(finding.status == "problem" for finding in found)
    if as_json:
        content = {
            "ok": not problems,
            "version": __version__,
            "findings": [asdict(finding) for finding in found],
        }
        print(json.dumps(content, indent=2))
        return int(bool(problems))
    for section, in_section in checks.by_section(found).items():
        page.title(section)
        page.table([_row(finding) for finding in in_section], styles=STYLES)
    notes = sum(finding.status == "note" for finding in found)
    page.title(_verdict(problems, notes))
    return int(bool(problems))


def _row(finding: Finding) -> tuple[str, str, str]:
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return finding.status, finding.name, f"{finding.value}{remedy}"


def _verdict(problems: int, notes: int) -> str:
    if problems:
        plural = "s" if problems > 1 else ""
        return f"{problems} problem{plural} found; fix before you start a run"
    return "no problems found" + (f" ({notes} note{'s' if notes > 1 else ''})" if notes else "")
