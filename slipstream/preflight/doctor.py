"""`slipstream doctor`: what is here, whether it is fine, and what to do where it is not.

Runs the checks one after the other and prints a line for each finding, or all of them as JSON. A
check that fails is itself a finding: whatever is broken here, the rest is still said.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from slipstream import __version__
from slipstream.metrics.tables import Page
from slipstream.preflight import doctor_checks as checks
from slipstream.preflight.doctor_checks import Finding

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}

Check = tuple[str, Callable[[], Iterable[Finding]]]


def all_checks(folder: Path) -> list[Check]:
    """By section, in the order in which they are said; runs are to be in `folder`."""
    return [
        ("versions", checks.versions),
        ("versions", checks.torch_build),
        # First of those that compile: it says that nothing is compiled yet.
        ("kernels", checks.kernels),
        ("processor", checks.cpu),
        ("memory and disk", checks.memory),
        ("memory and disk", partial(checks.disk, folder)),
        ("GPUs", checks.gpus),
        ("engines", checks.engines),
        ("sandbox", checks.sandbox),
        ("optional packages", checks.extras),
        ("self-test", checks.self_test),
    ]


def findings_of(section: str, check: Callable[[], Iterable[Finding]]) -> Iterator[Finding]:
    """What a check finds; where it fails, that."""
    try:
        yield from check()
    except Exception as error:
        # Whatever keeps a part of Slipstream from working here is what was asked for.
        yield Finding(
            section=section,
            name="check",
            status="problem",
            value=f"failed: {type(error).__name__}: {error}",
            remedy="repair what it names (`make install` makes the environment anew)",
        )


def doctor(folder: Path, *, as_json: bool = False) -> int:
    """Print the findings; 1 where one of them is a problem, else 0."""
    page = Page()
    found: list[Finding] = []
    section = ""
    with warnings.catch_warnings():
        # What libraries warn of while they are imported is nothing that anybody could change here.
        warnings.simplefilter("ignore")
        for name, check in all_checks(folder):
            for finding in findings_of(name, check):
                found.append(finding)
                if finding.section == "kernels" and finding.status == "note":
                    print("compiling kernels, which takes a minute or two", file=sys.stderr)
    problems = sum(finding.status == "problem" for finding in found)
    if as_json:
        content = {
            "ok": not problems,
            "version": __version__,
            "findings": [asdict(finding) for finding in found],
        }
        print(json.dumps(content, indent=2))
        return int(bool(problems))
    for section, of_section in checks.of_sections(found).items():
        page.title(section)
        page.table([_row(finding) for finding in of_section], styles=STYLES)
    notes = sum(finding.status == "note" for finding in found)
    page.title(_verdict(problems, notes))
    return int(bool(problems))


def _row(finding: Finding) -> tuple[str, str, str]:
    remedy = f"; {finding.remedy}" if finding.remedy else ""
    return finding.status, finding.name, f"{finding.value}{remedy}"


def _verdict(problems: int, notes: int) -> str:
    if problems:
        return f"{problems} problem{'s' if problems > 1 else ''}: runs will not work until solved"
    return "runs can work here" + (f" ({notes} note{'s' if notes > 1 else ''})" if notes else "")
