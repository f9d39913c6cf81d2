"""What a run folder holds, as far as it goes: of a run that is under way, was killed, or is of
another version, too.

Knows file formats; nothing of what is drawn. Files that the report can do without are passed over
with a note in `RunData.notes`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slipstream.config.load import CONFIG_FILE
from slipstream.errors import DataError
from slipstream.metrics.loggers import METRICS_FILE
from slipstream.metrics.timeline import EVENTS_FILE, Process, heard_of, read_timeline

LOCK_FILE = ".lock"
"""Locked by the process that works in the folder."""

TOKENS_FOLDER = "tokens"
"""Below that of the rollouts: a few responses of each step, token by token."""

MOST_TOKENS, HEAD = 2000, 1500
"""Tokens of a response that a page has, at most, and how many of them from its beginning."""

MOST_BYTES = 64 << 20
"""Of a file of rollouts: reading more takes longer than a report may."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a metrics file. `time`: seconds since 1970, None in files of earlier versions."""

    step: int
    data: Mapping[str, float]
    time: float | None = None


@dataclass(slots=True)
class RunData:
    """A run. `rl`, `sft` and `draft` are in order of steps; `tokens` has the samples of some steps.

    `state`: `running`, `finished`, `interrupted`, `killed`, or what ended it.
    """

    name: str
    folder: Path
    state: str
    config: dict[str, Any] = field(default_factory=dict)
    rl: list[Record] = field(default_factory=list)
    sft: list[Record] = field(default_factory=list)
    draft: list[Record] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    tokens: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    lengths: dict[int, list[int]] = field(default_factory=dict)
    """Response lengths of the first and the last step that was dumped."""
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[Record]:
        """The records of RL steps: without the validation before the first."""
        return [record for record in self.rl if "timing_s/step" in record.data]

    @property
    def trainer(self) -> dict[str, Any]:
        """The settings under `trainer`, as far as they are some."""
        found = self.config.get("trainer")
        return found if isinstance(found, dict) else {}

    @property
    def environment(self) -> dict[str, Any]:
        """What the last process ran on."""
        return dict(self.processes[-1].facts.get("environment", {})) if self.processes else {}


def read_run(folder: Path, *, name: str | None = None) -> RunData:
    """Read the run in `folder`.

    Raises DataError where it is no folder, or holds nothing of a run.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the folder of a run")
    known = [CONFIG_FILE, EVENTS_FILE, METRICS_FILE, f"sft/{METRICS_FILE}"]
    if not any((folder / part).exists() for part in known):
        inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}"))
        hint = f"; there are runs in it: {', '.join(inside[:5])}" if inside else ""
        raise DataError(
            f"{folder} holds no run: none of {', '.join(known)}{hint}. Give the folder that "
            "trainer.default_local_dir named"
        )
    notes: list[str] = []
    processes, problems = read_timeline(folder / EVENTS_FILE)
    notes += problems
    run = RunData(
        name=name or folder.resolve().name,
        folder=folder,
        state="",
        config=_read_config(folder / CONFIG_FILE, notes),
        rl=read_records(folder / METRICS_FILE, notes),
        sft=read_records(folder / "sft" / METRICS_FILE, notes),
        draft=read_records(folder / "draft" / METRICS_FILE, notes),
        processes=processes,
        notes=notes,
    )
    if _is_draft_run(run.rl):
        run.rl, run.draft = [], run.rl
    rollouts = _rollout_folder(run)
    run.tokens = _read_tokens(rollouts / TOKENS_FOLDER, run.steps, notes)
    run.lengths = _read_lengths(rollouts, run.steps, notes)
    running = is_running(folder)
    for process in processes[-1:]:
        times = [r.time for r in (*run.rl, *run.sft, *run.draft) if r.time is not None]
        if process.status is None and times and max(times) >= process.begin:
            heard_of(process, max(times))
    run.state = _state(processes, running=running)
    if not processes:
        notes.append(
            f"no {EVENTS_FILE}: just begun, or of an earlier version; where time went is unknown"
        )
    return run


def read_records(path: Path, notes: list[str]) -> list[Record]:
    """The whole lines of a metrics file, the last of those of the same step; lines that are none
    are counted in `notes`. The last line of a run under way may be torn."""
    if not path.exists():
        return []
    found: dict[int, Record] = {}
    bad = 0
    for line in _whole_lines(path):
        try:
            raw = json.loads(line)
            data = {name: float(value) for name, value in raw["data"].items()}
            when = raw.get("time")
            found[int(raw["step"])] = Record(
                int(raw["step"]), data, None if when is None else float(when)
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            bad += 1
    if bad:
        notes.append(f"{path.name}: {bad} line{'s' if bad > 1 else ''} could not be read")
    return [found[step] for step in sorted(found)]


def is_running(folder: Path) -> bool:
    """Whether a process works in the run folder now: it holds its lock."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _state(processes: list[Process], *, running: bool) -> str:
    if running:
        return "running"
    if not processes:
        return "ended"
    return processes[-1].status or "killed"


def _is_draft_run(records: list[Record]) -> bool:
    return any("draft/loss" in record.data for record in records)


def _rollout_folder(run: RunData) -> Path:
    """Where samples are: a relative `trainer.rollout_data_dir` is of the folder that the run was
    begun in, which an earlier version did not write down; then it is of this one."""
    configured = run.trainer.get("rollout_data_dir")
    if not isinstance(configured, str) or not configured:
        return run.folder / "rollouts"
    begun = run.processes[-1].facts.get("cwd", "") if run.processes else ""
    folder = Path(str(begun)) / configured
    if run.steps and not folder.is_dir():
        run.notes.append(f"trainer.rollout_data_dir={configured} is not here: no samples are shown")
    return folder


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append(f"no {path.name}")
        return {}
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise TypeError(f"it holds {type(raw).__name__}")
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read ({type(error).__name__})")
        return {}
    return raw


def _read_tokens(
    folder: Path, steps: list[Record], notes: list[str]
) -> dict[int, list[dict[str, Any]]]:
    """Of the first, a middle and the last step that has a file."""
    have = _dumped(folder, steps)
    found: dict[int, list[dict[str, Any]]] = {}
    for step in sorted({have[0], have[len(have) // 2], have[-1]}) if have else ():
        try:
            lines = _whole_lines(folder / f"{step}.jsonl")
            found[step] = [_sample_of(json.loads(line)) for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"the samples of step {step} cannot be read ({type(error).__name__})")
    return found


def _read_lengths(folder: Path, steps: list[Record], notes: list[str]) -> dict[int, list[int]]:
    have = _dumped(folder, steps)
    found: dict[int, list[int]] = {}
    for step in sorted({have[0], have[-1]}) if have else ():
        path = folder / f"{step}.jsonl"
        try:
            if path.stat().st_size > MOST_BYTES:
                notes.append(f"the lengths of step {step} are left out: {path.name} is large")
                continue
            found[step] = [len(json.loads(line)["response_ids"]) for line in _whole_lines(path)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"the rollouts of step {step} cannot be read ({type(error).__name__})")
    return found


def _dumped(folder: Path, steps: list[Record]) -> list[int]:
    """Steps of `steps` that have a file; one that is not logged yet may be half-written."""
    have = sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit())
    return [step for step in have if steps and step <= steps[-1].step]


def _sample_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    pieces = [str(piece) for piece in raw["pieces"]]
    log_probs, drafted, masked = raw["log_probs"], str(raw["drafted"]), str(raw["masked"])
    if not len(pieces) == len(log_probs) == len(drafted) == len(masked):
        raise ValueError("pieces, log_probs, drafted and masked differ in length")
    tokens, of_drafts = len(pieces), drafted.count("1")
    if tokens > MOST_TOKENS:
        # Its beginning and, where answers stand, its end.
        left_out = tokens - MOST_TOKENS
        pieces = [*pieces[:HEAD], f"\n[{left_out} tokens left out]\n", *pieces[HEAD + left_out :]]
        log_probs = [*log_probs[:HEAD], None, *log_probs[HEAD + left_out :]]
        drafted = drafted[:HEAD] + "0" + drafted[HEAD + left_out :]
        masked = masked[:HEAD] + "1" + masked[HEAD + left_out :]
    score = raw.get("score")
    texts = ("uid", "input", "gts", "status", "stop_reason", "failure")
    return {
        **{name: None if raw.get(name) is None else str(raw[name]) for name in texts},
        "score": score if isinstance(score, int | float) and math.isfinite(score) else None,
        "tokens": tokens,
        "of_drafts": of_drafts,
        "gap": HEAD if tokens > MOST_TOKENS else None,
        "pieces": pieces,
        "log_probs": list(log_probs),
        "drafted": drafted,
        "masked": masked,
    }


def _whole_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield line
