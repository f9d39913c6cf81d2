"""One Markdown table of the comparisons with other systems: decoding (`decode`) and GRPO (`trl`).

The rows come from a measurement or from files. Run it as `slipstream bench peers` or
`python -m bench.peers_table`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.trl_compare import summary, training_rows
from bench.trl_parity import TOLERANCE
from slipstream.bench.ab import FROZEN, PLAIN
from slipstream.bench.contenders import OURS, PEERS
from slipstream.bench.decode import best_of
from slipstream.bench.record import ResultRow, Spread, median_of
from slipstream.errors import DataError

_HEADINGS = (
    "measured",
    "system",
    "dtype",
    "median [least .. most]",
    "its time over Slipstream's",
    "held-out accuracy [95 %]",
)

_NAMES = {"hf": "transformers", "vllm": "vLLM", "llamacpp": "llama.cpp"}

_OURS_TRAINING = {PLAIN: "Slipstream", FROZEN: "Slipstream, with drafts"}


def table(rows: Sequence[ResultRow]) -> str:
    """Markdown: the table, then notes on machine and settings. A decoding peer is shown with its
    fastest setting, TRL with all. Raises DataError if there are no rows of either benchmark."""
    decoding = [row for row in rows if row.benchmark == "decode"]
    training = training_rows([row for row in rows if row.benchmark == "trl"])
    lines = [*_decoding(decoding), *_training(training)]
    if not lines:
        raise DataError(
            "no rows of `slipstream bench decode` or `slipstream bench trl`; give files to --from "
            "that their --json FILE wrote"
        )
    shown = [_HEADINGS, ("---",) * len(_HEADINGS), *lines]
    notes = [*_circumstances(decoding), *_circumstances(training), *_training_notes(rows)]
    return "\n".join(
        ["| " + " | ".join(cells) + " |" for cells in shown]
        + [""]
        + [f"- {note}" for note in dict.fromkeys(notes)]
    )


def _decoding(rows: Sequence[ResultRow]) -> list[tuple[str, ...]]:
    lines = list[tuple[str, ...]]()
    for shape, case in dict.fromkeys((row.settings["shape"], row.case) for row in rows):
        of_case = [r for r in rows if (r.settings["shape"], r.case) == (shape, case)]
        shown = [next(row for row in of_case if row.contender == OURS)]
        shown += [best for peer in PEERS if (best := best_of(of_case, peer)) is not None]
        for row in shown:
            ours = row.contender == OURS
            lines.append(
                (
                    f"decoding, {shape}, {case}: tokens/s",
                    "Slipstream" if ours else f"{_peer(row)} ({row.contender})",
                    row.dtype,
                    _shown(row.values["tokens_per_second"]),
                    "1" if ours else _shown(row.values["slipstream_speedup"]),
                    "",
                )
            )
    return lines


def _peer(row: ResultRow) -> str:
    return next(_NAMES[peer] for peer, names in PEERS.items() if row.contender in names)


def _training(rows: Sequence[ResultRow]) -> list[tuple[str, ...]]:
    lines = list[tuple[str, ...]]()
    for row in rows:
        ours = _OURS_TRAINING.get(row.contender)
        over = median_of(row.values["slipstream_speedup"])
        error = median_of(row.values["slipstream_speedup_error"])
        accuracy = ""
        if "accuracy_mean" in row.values:
            mean, low, high = (
                median_of(row.values[f"accuracy_{name}"]) for name in ("mean", "low", "high")
            )
            accuracy = f"{mean:.3f} [{low:.3f} .. {high:.3f}]"
        lines.append(
            (
                "GRPO step: seconds",
                "TRL" if ours is None else ours,
                row.dtype,
                _shown(row.seconds),
                "1" if row.contender == PLAIN else f"{over:.2f} ±{error:.2f}",
                accuracy,
            )
        )
    return lines


def _training_notes(rows: Sequence[ResultRow]) -> list[str]:
    trained = training_rows(rows)
    if not trained:
        return []
    found = summary(rows)
    first = trained[0].settings
    notes = [
        f"GRPO: {first['rounds']} seeds of {first['steps']} interleaved steps, "
        f"{first['prompts_per_step']} prompts of {first['group_size']} completions of up to "
        f"{first['max_completion_length']} tokens, loss `{first['loss_type']}`"
    ]
    if found["parity"] is not None:
        notes.append(
            f"loss, advantages and gradients of a fixed batch are within {found['parity']:.1e} of "
            f"TRL's in fp32 (allowed: {TOLERANCE:g})"
        )
    tokens = "; ".join(
        f"{_OURS_TRAINING.get(row.contender, row.contender)} {_shown(row.values['tokens'], 6)} "
        f"tokens in {_shown(row.values['steps'])} steps"
        for row in trained
    )
    return [*notes, f"trained on, by seed: {tokens}"]


def _circumstances(rows: Sequence[ResultRow]) -> list[str]:
    """Notes on the machines, and on each set of versions."""
    notes = []
    for row in rows:
        flags = " ".join(row.machine.cpu_flags)
        # A peer that chooses its number of threads has no such note.
        if row.threads is not None:
            notes.append(
                f"{row.machine.cpu} [{flags}], {row.machine.cores} cores, {row.threads} threads"
            )
        notes.append(" ".join(f"{name} {number}" for name, number in row.machine.versions.items()))
    return notes


def _shown(value: float | Spread, digits: int = 3) -> str:
    if isinstance(value, Spread):
        low, middle, high = (f"{v:,.{digits}g}" for v in (value.min, value.median, value.max))
        if "e" in low + middle + high:
            low, middle, high = (f"{v:,.0f}" for v in (value.min, value.median, value.max))
        return middle if low == high else f"{middle} [{low} .. {high}]"
    return f"{value:.{digits}g}"


if __name__ == "__main__":
    from slipstream import cli

    sys.exit(cli.main(["bench", "peers", *sys.argv[1:]]))
