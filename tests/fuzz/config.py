"""Fuzz of settings: odd values of all options, on the command line and in files.

    python -m tests.fuzz.config --count 2000

Each input takes the path of `slipstream rl --cfg job`: reading, checking, printing. What it accepts
is printed as YAML that gives the same settings, and it passes the checks before a run's first work.
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream.cli import main
from slipstream.config.load import load_config, to_yaml
from slipstream.config.mode import resolve_mode
from slipstream.config.tree import options
from slipstream.errors import SlipstreamError
from tests.fuzz.harness import Result, command, try_input
from tests.fuzz.values import as_text, nested, odd_value

COUNT = 2000

_KEYS = (
    "a" * 5000,
    "trainer." + "a" * 5000,
    ".".join("a" * 3000),
    "",
    ".",
    "trainer.",
    ".seed",
    "trainer..seed",
    "trainer.seed.x",
    "trainer.seed.0",
    "data.train_files.0",
    "data.train_files.99",
    "actor_rollout_ref.actor.optim.betas.0",
    "actor_rollout_ref.actor.optim.betas." + "9" * 5000,
    "data.task_kwargs.a",
    "data.task_kwargs.a.b.c",
    "data.task_kwargs.0",
    "é",
    "trainer.\ud800",
    "+trainer.seed",
    "++x",
    "~trainer",
    "~data.task_kwargs.a.b",
    "~",
    "hydra.x",
    "defaults",
    "data@x",
)
_MODEL = "actor_rollout_ref.model.path=model"
_FILES: tuple[bytes, ...] = (
    b"",
    b"\xff\xfe",
    b"\xef\xbb\xbftrainer: {seed: 2}",
    b"\0",
    b"trainer: {seed: 2",
    b"- 1",
    b"3",
    b"trainer",
    b"trainer: {}",
    b"trainer:",
    b"trainer: 5",
    b"? [a, b]\n: 1",
    b"1: 2",
    b"null: 2",
    b"trainer: {1: 2, true: 3, null: 4, 1.5: 6}",
    b"trainer: &a {seed: 1, x: *a}",
    b"a: &a [1]\nb: *c",
    b"&a [*a]",
    b"defaults: 5",
    b"defaults: [odd]",
    b"defaults: [{a: b}]",
    b"defaults: [null, 3, [1]]",
    b"defaults: [_self_, nothing]",
    b"trainer: {seed: !!python/object:os.system x}",
    b"trainer: {seed: !!binary aGk=}",
    b"trainer: {seed: !!set {a}}",
    b"trainer: {seed: 2024-13-45}",
    b"trainer: {seed: 2024-01-01}",
    b"trainer: {seed: 1:2:3}",
    b"<<: {trainer: {seed: 2}}",
    b"trainer: {<<: 5}",
    b"trainer: {seed: 1, seed: 2}",
    b"%YAML 9.9\n---\ntrainer: {}",
    b"--- {}\n--- {}",
    b"trainer: {seed: ${trainer.seed}}",
    b"trainer: {seed: '${trainer.seed}', project_name: '${trainer.'}",
    b"trainer: {project_name: '${trainer.experiment_name}',"
    b" experiment_name: '${trainer.project_name}'}",
    b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(
        f"{n}: &{n} [{', '.join([f'*{o}'] * 9)}]\n".encode()
        for o, n in zip("abcdefghi", "bcdefghij", strict=True)
    ),
    b"trainer: {seed: " + b"9" * 6000 + b"}",
    b"trainer: {seed: 0x" + b"f" * 6000 + b"}",
    b"trainer: " + b"[" * 2000 + b"]" * 2000,
    b"trainer: " + b"{a: " * 2000 + b"1" + b"}" * 2000,
    b"a" * 5000 + b": 1",
    b"trainer: {" + b"a" * 5000 + b": 1}",
    b"trainer: {project_name: " + b"a" * 5000 + b"}",
    b'trainer: {project_name: "\\uD800"}',
    b'trainer: {project_name: "\\0"}',
    b"data: {task_kwargs: " + as_text(nested(80, "mapping")).encode() + b"}",
)


def run(count: int, *, offset: int = 0) -> Result:
    """Try `count` inputs in a temporary folder, and return the outcomes."""
    result = Result()
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for number in range(offset, offset + count):
            _try(result, number, Path(name))
    return result


def _try(result: Result, number: int, folder: Path) -> None:
    draw = random.Random(f"config {number}")
    keys = [key for key, option in options().items() if option.section is None]
    sections = [key for key, option in options().items() if option.section is not None]
    file = folder / "odd.yaml"
    kind = draw.random()
    if kind < 0.08:
        content = _FILES[number % len(_FILES)]
        file.write_bytes(content)
        attempt, named = _command("--config", str(file), _MODEL), _names_of_file(content)
        try_input(result, f"{number} file {content[:60]!r}", attempt, *named)
        return
    if kind < 0.16:
        key = draw.choice(_KEYS)
    elif kind < 0.24:
        key = draw.choice(sections)
    else:
        # All options have a turn.
        key = keys[number % len(keys)]
    value = odd_value(draw)
    name = f"{number} {key[:80]}={as_text(value)[:60]}"
    in_file = draw.random() < 0.3 and key.lstrip("+~") == key and key
    if in_file and not key.startswith("actor_rollout_ref"):
        file.write_text(_yaml(key, value), encoding="utf-8", errors="surrogatepass")
        attempt = _command("--config", str(file), _MODEL)
        named = (*_named(key), str(file))
    else:
        text = value if isinstance(value, str) and draw.random() < 0.5 else as_text(value)
        attempt, named = _command("--recipe", "tiny", f"{key}={text}"), _named(key)
    try_input(result, name.encode("ascii", "backslashreplace").decode(), attempt, *named)


def _names_of_file(content: bytes) -> tuple[str, ...]:
    return (
        "odd.yaml",
        "trainer",
        "seed",
        "data",
        "1:",
        content[:20].decode("utf-8", "replace").strip(),
    )


def _named(key: str) -> tuple[str, ...]:
    """Return the key, and its section, which names it in a rule about several options."""
    section = _short(key).rpartition(".")[0]
    return (_short(key), section) if section in options() else (_short(key),)


def _short(key: str) -> str:
    # A message shows the start and the end of a long name.
    key = key.replace("/", ".").lstrip("+").removesuffix(".0")[:60]
    return key.encode("utf-8", "backslashreplace").decode()


def _yaml(key: str, value: Any) -> str:
    lines, parts = "", key.split(".")
    for depth, part in enumerate(parts[:50]):
        lines += " " * depth + as_text(part) + ":" + ("\n" if part is not parts[:50][-1] else " ")
    return lines + as_text(value) + "\n"


def _command(*arguments: str) -> Callable[[], str]:
    def attempt() -> str:
        out, err = io.StringIO(), io.StringIO()
        before = Path.cwd()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                status = main(["rl", "--cfg", "job", *arguments])
            except SystemExit as error:  # argparse refuses an argument that looks like a flag
                status = int(error.code or 0)
        assert Path.cwd() == before
        if status != 0:
            return err.getvalue() or f"nothing said, status {status}"
        _again(out.getvalue())
        return ""

    return attempt


def _again(printed: str) -> None:
    """Check that the printed settings can be read to the same settings, and used."""
    file = Path("printed.yaml")
    file.write_text(printed, encoding="utf-8")
    config = load_config(file=file, notify=lambda text: None)
    assert to_yaml(config) == printed, "the printed settings are others"
    with contextlib.suppress(SlipstreamError):
        resolve_mode(config)


if __name__ == "__main__":
    sys.exit(command("settings", COUNT, run))
