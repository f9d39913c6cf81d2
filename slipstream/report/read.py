"""Reads a run folder, also of a run in progress, a killed run, or another version.

Knows file formats and nothing of drawing. Optional files that cannot be read are skipped with a
note in `RunData.notes`.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slipstream.config.load import CONFIG_FILE
from slipstream.errors import DataError
from slipstream.metrics.loggers import METRICS_FILE
from slipstream.metrics.timeline import EVENTS_FILE, Process, extend_to, read_timeline

LOCK_FILE = ".lock"
"""Locked by the process that works in the folder."""

TOKENS_FOLDER = "tokens"
"""Subfolder of the rollouts folder with a few responses per step, token by token."""

MAX_TOKENS, HEAD_TOKENS = 2000, 1500
"""Maximum number of tokens shown per response, and how many of them are from its start."""

MAX_BYTES = 64 << 20
"""Maximum size of a rollouts file; reading a larger one would take too long."""


@dataclass(frozen=True, slots=True)
class Record:
    """One line of a metrics file. `time`: seconds since 1970; None in files of older versions."""

    step: int
    data: Mapping[str, float]
    time: float | None = None


@dataclass(slots=True)
class RunData:
    """The data of one run. `rl`, `sft` and `draft` are sorted by step.

    `tokens` maps some steps to their samples. `state` is `running`, `finished`, `interrupted`,
    `killed`, or the error that ended the run.
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
    """Response lengths of the first and the last dumped step."""
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[Record]:
        """The records of RL steps, without the validation before the first step."""
        return [record for record in self.rl if "timing_s/step" in record.data]

    @property
    def trainer(self) -> dict[str, Any]:
        """The settings under `trainer`; empty if they are missing or not a mapping."""
        found = self.config.get("trainer")
        return found if isinstance(found, dict) else {}

    @property
    def environment(self) -> dict[str, Any]:
        """The environment (hardware, versions) of the last process."""
        return dict(self.processes[-1].facts.get("environment", {})) if self.processes else {}


def read_run(folder: Path, *, name: str | None = None) -> RunData:
    """Return the run in `folder`.

    Raises DataError if it is not a folder, or contains no run.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder; give the folder of a run")
    known = [CONFIG_FILE, EVENTS_FILE, METRICS_FILE, f"sft/{METRICS_FILE}"]
    if not any((folder / part).exists() for part in known):
        inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}"))
        hint = f"; it contains runs: {', '.join(inside[:5])}" if inside else ""
        raise DataError(
            f"{folder} contains no run: none of {', '.join(known)}{hint}. Give the folder that "
            "trainer.default_local_dir names"
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
            extend_to(process, max(times))
    run.state = _state(processes, running=running)
    if not processes:
        notes.append(
            f"no {EVENTS_FILE}: the run has just started, or an older version wrote it; the split "
            "of its time is unknown"
        )
    return run


def read_records(path: Path, notes: list[str]) -> list[Record]:
    """Return the records of a metrics file, sorted by step; of a repeated step the last one.

    Invalid lines are counted in `notes`. An incomplete last line is ignored, since the run may be
    writing it.
    """
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
    """Return whether a process is working in the run folder, that is, holds its lock."""
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
    """Return the folder of the rollouts.

    A relative `trainer.rollout_data_dir` is relative to the working directory of the run. Older
    versions did not record that directory; then the current one is used.
    """
    configured = run.trainer.get("rollout_data_dir")
    if not isinstance(configured, str) or not configured:
        return run.folder / "rollouts"
    cwd = run.processes[-1].facts.get("cwd", "") if run.processes else ""
    folder = Path(str(cwd)) / configured
    if run.steps and not folder.is_dir():
        run.notes.append(f"trainer.rollout_data_dir={configured} not found: no samples are shown")
    return folder


def _read_config(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.exists():
        notes.append(f"no {path.name}")
        return {}
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(raw, dict):
            raise TypeError(f"it contains {type(raw).__name__}")
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read ({type(error).__name__})")
        return {}
    return raw


def _read_tokens(
    folder: Path, steps: list[Record], notes: list[str]
) -> dict[int, list[dict[str, Any]]]:
    """Return samples of the first, a middle and the last step that has a file."""
    available = _dumped(folder, steps)
    found: dict[int, list[dict[str, Any]]] = {}
    chosen = {available[0], available[len(available) // 2], available[-1]} if available else set()
    for step in sorted(chosen):
        try:
            lines = _whole_lines(folder / f"{step}.jsonl")
            found[step] = [_sample_of(json.loads(line)) for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"the samples of step {step} cannot be read ({type(error).__name__})")
    return found


def _read_lengths(folder: Path, steps: list[Record], notes: list[str]) -> dict[int, list[int]]:
    available = _dumped(folder, steps)
    found: dict[int, list[int]] = {}
    for step in sorted({available[0], available[-1]}) if available else ():
        path = folder / f"{step}.jsonl"
        try:
            if path.stat().st_size > MAX_BYTES:
                notes.append(f"the lengths of step {step} are skipped: {path.name} is too large")
                continue
            found[step] = [len(json.loads(line)["response_ids"]) for line in _whole_lines(path)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"the rollouts of step {step} cannot be read ({type(error).__name__})")
    return found


def _dumped(folder: Path, steps: list[Record]) -> list[int]:
    """Return the logged steps that have a file. The file of a later step may be incomplete."""
    available = sorted(int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdigit())
    return [step for step in available if steps and step <= steps[-1].step]


def _sample_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    pieces = [str(piece) for piece in raw["pieces"]]
    log_probs, drafted, masked = raw["log_probs"], str(raw["drafted"]), str(raw["masked"])
    if not len(pieces) == len(log_probs) == len(drafted) == len(masked):
        raise ValueError("pieces, log_probs, drafted and masked differ in length")
    tokens, of_drafts = len(pieces), drafted.count("1")
    labels = _labels(raw.get("parts") or [])
    if tokens > MAX_TOKENS:
        # Keep the start, and the end, which usually has the answer.
        left_out = tokens - MAX_TOKENS
        gap = f"\n[{left_out} tokens omitted]\n"
        pieces = [*pieces[:HEAD_TOKENS], gap, *pieces[HEAD_TOKENS + left_out :]]
        log_probs = [*log_probs[:HEAD_TOKENS], None, *log_probs[HEAD_TOKENS + left_out :]]
        drafted = drafted[:HEAD_TOKENS] + "0" + drafted[HEAD_TOKENS + left_out :]
        masked = masked[:HEAD_TOKENS] + "1" + masked[HEAD_TOKENS + left_out :]
        # The omitted tokens are one piece now.
        labels = [
            (at if at <= HEAD_TOKENS else at - left_out + 1, text)
            for at, text in labels
            if not HEAD_TOKENS < at < HEAD_TOKENS + left_out
        ]
    score = raw.get("score")
    texts = ("uid", "input", "gts", "status", "stop_reason", "failure")
    return {
        **{name: None if raw.get(name) is None else str(raw[name]) for name in texts},
        "score": score if isinstance(score, int | float) and math.isfinite(score) else None,
        "tokens": tokens,
        "of_drafts": of_drafts,
        "gap": HEAD_TOKENS if tokens > MAX_TOKENS else None,
        "pieces": pieces,
        "log_probs": list(log_probs),
        "drafted": drafted,
        "masked": masked,
        "labels": dict(labels),
    }


def _labels(parts: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """The turns and answers of an episode: the index of the first token, and a label."""
    found: list[tuple[int, str]] = []
    turn = branch = 0
    for part in parts:
        role = str(part["role"])
        if role == "assistant":
            turn += 1
            role = f"turn {turn}"
        if int(part["branch"]) != branch:
            branch = int(part["branch"])
            role = f"branch {branch + 1}, {role}"
        rewards = [f"{name} {float(value):+.3g}" for name, value in part["rewards"].items()]
        found.append((int(part["at"]), ", ".join([role, *rewards])))
    return found


def _whole_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.endswith("\n"):
                return
            yield line
