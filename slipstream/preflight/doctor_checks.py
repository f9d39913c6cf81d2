"""What `slipstream doctor` looks at: one function for each part, which returns findings.

Nothing here changes anything, and no finding holds more of the environment than the variables that
Slipstream itself reads. Heavy modules are imported by the checks that need them: a broken one is a
finding. Called by `preflight.doctor`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

import slipstream
from slipstream import __version__
from slipstream.config.hardware import detect_hardware
from slipstream.metrics.machine import this_machine

Status = Literal["ok", "note", "problem"]

DISTRIBUTION = "slipstream-rl"

LEAST_MEMORY = 700_000_000
"""Bytes that the smallest run takes: libraries, kernels, and next to nothing else."""

LITTLE_MEMORY, LITTLE_DISK = 2_000_000_000, 1_000_000_000
"""Bytes below which a run of the quickstart's size may not fit."""

EXTRAS = {
    "tensorboard": "curves in TensorBoard (trainer.logger=tensorboard)",
    "math-verify": "the scorer of data_source math_verify",
    "reasoning-gym": "data.task=reasoning_gym",
    "datasets": "reading folders that `datasets` saved",
    "ray": "several processes (trainer.nnodes, trainer.n_gpus_per_node)",
    "peft": "comparing LoRA adapters with peft's",
    "wandb": "curves in Weights & Biases (trainer.logger=wandb)",
    "mlflow-skinny": "curves in MLflow (trainer.logger=mlflow)",
    "trackio": "curves in Trackio (trainer.logger=trackio)",
}
"""Packages that some settings need, and what for."""

PEERS = ("vllm", "sglang")
PEERS_PYTHON = Path(slipstream.__file__).parents[1] / ".venv-vllm/bin/python"
"""Of the environment that `make peers` makes beside the source."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: what was looked at, how it is, and what to do where it is not fine. `facts` are the
    same for programs. "problem": a run would not work."""

    section: str
    name: str
    status: Status
    value: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """What Slipstream asks for: a range of Pythons, and requirements by distribution name; of the
    extras, too."""

    python: str
    needed: Mapping[str, str]
    optional: Mapping[str, str]


def requirements(root: Path = Path(slipstream.__file__).parents[1]) -> Requirements:
    """From `pyproject.toml` in `root`, a source tree, or else from the installed distribution.
    Raises PackageNotFoundError where there is neither."""
    file = root / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == DISTRIBUTION:
            extras = project.get("optional-dependencies", {}).values()
            return Requirements(
                python=project["requires-python"],
                needed=_by_name(project["dependencies"]),
                optional=_by_name(text for texts in extras for text in texts),
            )
    installed = metadata.metadata(DISTRIBUTION)
    texts = [*(installed.get_all("Requires-Dist") or [])]
    return Requirements(
        python=installed["Requires-Python"],
        needed=_by_name(text for text in texts if "extra ==" not in text),
        optional=_by_name(text.partition(";")[0] for text in texts if "extra ==" in text),
    )


def _by_name(texts: Iterable[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        match = _NAME.match(text)
        if match is not None:
            found[match[0]] = text.strip()
    return found


def versions() -> Iterator[Finding]:
    """Slipstream, Python, and every package that is needed, against what is asked for."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    wanted = requirements()
    folder = str(Path(slipstream.__file__).parent)
    yield Finding(
        section="versions",
        name="slipstream",
        status="ok",
        value=f"{__version__} in {folder}",
        facts={"version": __version__, "folder": folder},
    )
    python = platform.python_version()
    good = SpecifierSet(wanted.python).contains(python, prereleases=True)
    yield Finding(
        section="versions",
        name="Python",
        status="ok" if good else "problem",
        value=f"{python} (needs {wanted.python})",
        remedy="" if good else f"make the environment with a Python {wanted.python}",
        facts={"version": python, "needs": wanted.python},
    )
    for name, text in wanted.needed.items():
        marker = Requirement(text).marker
        if marker is None or marker.evaluate():
            yield package(name, text)


def package(name: str, requirement: str) -> Finding:
    """A needed package against its `requirement`, such as "numpy>=1.26"."""
    from packaging.requirements import Requirement

    parsed = Requirement(requirement)
    remedy = f'pip install "{requirement}"'
    needs = str(parsed.specifier)
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(
            section="versions",
            name=name,
            status="problem",
            value=f"not installed (needs {needs})",
            remedy=remedy,
            facts={"version": None, "needs": needs},
        )
    good = parsed.specifier.contains(found, prereleases=True)
    return Finding(
        section="versions",
        name=name,
        status="ok" if good else "problem",
        value=f"{found} (needs {needs})",
        remedy="" if good else remedy,
        facts={"version": found, "needs": needs},
    )


def torch_build() -> Iterator[Finding]:
    """What this torch was built for."""
    import torch

    cuda = torch.version.cuda
    yield Finding(
        section="versions",
        name="torch's build",
        status="ok",
        value="for CPUs" if cuda is None else f"for CUDA {cuda}",
        facts={"cuda": cuda},
    )


def cpu() -> Iterator[Finding]:
    """The processor, what it multiplies with, and how many cores and threads there are."""
    import torch

    from slipstream.kernels import processor as kernels
    from slipstream.kernels.team import kernels_supported
    from slipstream.models.numerics import (
        default_dtype,
        has_kernels,
        products_are_exact,
    )

    here = this_machine()
    yield Finding(
        section="processor",
        name="model",
        status="ok",
        value=here.cpu,
        facts={"model": here.cpu},
    )
    yield Finding(
        section="processor",
        name="features",
        status="ok",
        value=", ".join(here.cpu_flags) or "none of those that matter",
        facts={"features": list(here.cpu_flags)},
    )
    device = torch.device("cpu")
    usual = str(default_dtype(device)).removeprefix("torch.")
    products = kernels.bf16_products()
    forbidden = os.environ.get(kernels.NO_AMX, "0") not in ("", "0")
    yield Finding(
        section="processor",
        name="dtype=auto",
        status="note" if forbidden else "ok",
        value=f"{usual}; bf16 is multiplied by {products}",
        remedy=f"{kernels.NO_AMX} is set: unset it to use the matrix unit" if forbidden else "",
        facts={"dtype": usual, "bf16_products": products},
    )
    compiled = kernels_supported() and has_kernels(torch.float32, device)
    exact = compiled or products_are_exact()
    yield Finding(
        section="processor",
        name="products",
        status="ok" if exact else "note",
        value=("compiled kernels" if compiled else "torch's operations")
        + (", exact for any batch" if exact else ", not exact"),
        remedy=""
        if exact
        else "rollout and trainer may differ in last bits; a torch with OpenBLAS or oneDNN, or a "
        "processor with fused multiply-adds, is exact",
        facts={"kernels": compiled, "exact": exact},
    )
    yield _threads(torch.get_num_threads())


def _threads(threads: int) -> Finding:
    from slipstream.threads import usable_cores

    there, usable = os.cpu_count() or 1, usable_cores()
    given = os.environ.get("OMP_NUM_THREADS")
    # Without the variable it is the library's choice, and a run's to measure.
    idle = given is not None and threads < usable
    value = f"{usable} usable of {there}, {threads} thread{'s' if threads > 1 else ''}"
    return Finding(
        section="processor",
        name="cores",
        status="note" if idle else "ok",
        value=value + (f" (OMP_NUM_THREADS={given})" if given else ""),
        remedy=f"{usable - threads} idle: unset OMP_NUM_THREADS, or set "
        f"trainer.num_threads={usable}"
        if idle
        else "",
        facts={"cores": there, "usable": usable, "threads": threads, "omp_num_threads": given},
    )


def memory() -> Iterator[Finding]:
    """What there is, what is free, and what a control group allows."""
    import torch

    from slipstream.inference.engine.memory import free_bytes

    total, available = psutil.virtual_memory().total, psutil.virtual_memory().available
    free = free_bytes(torch.device("cpu"))
    status: Status = "ok"
    remedy = ""
    if free < LEAST_MEMORY:
        status, remedy = "problem", "end other programs, or raise the limit of the container"
    elif free < LITTLE_MEMORY:
        status = "note"
        remedy = "enough for small models alone"
    value = f"{_gb(free)} free for this process, of {_gb(total)}"
    # What is available changes from one moment to the next.
    if free < 0.95 * available:
        value += " (limited by a control group)"
    yield Finding(
        section="memory and disk",
        name="memory",
        status=status,
        value=value,
        remedy=remedy,
        facts={"total": total, "available": available, "free_for_process": free},
    )


def disk(folder: Path) -> Iterator[Finding]:
    """Room where runs are to be."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    status: Status = "ok"
    remedy = ""
    if not writable:
        status, remedy = "problem", "set trainer.default_local_dir to a folder that can be written"
    elif free < LITTLE_DISK:
        status, remedy = "note", "checkpoints take three times the weights in fp32: make room"
    yield Finding(
        section="memory and disk",
        name="disk",
        status=status,
        value=f"{_gb(free)} free in {there.absolute()}" + ("" if writable else ", not writable"),
        remedy=remedy,
        facts={"folder": str(there.absolute()), "free": free, "writable": writable},
    )


def gpus() -> Iterator[Finding]:
    """Those that torch can use, and those that the system has beside."""
    import torch

    visible = detect_hardware().gpus
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding(
            section="GPUs",
            name="GPUs",
            status="note" if visible else "ok",
            value=f"{visible} here, none that torch can use"
            if visible
            else "none: runs compute on the CPU",
            remedy="install a torch built for CUDA, or see to the driver (nvidia-smi)"
            if visible
            else "",
            facts={"visible": visible, "usable": 0},
        )
        return
    driver = driver_version()
    for index in range(count):
        found = torch.cuda.get_device_properties(index)
        capability = f"{found.major}.{found.minor}"
        yield Finding(
            section="GPUs",
            name=f"GPU {index}",
            status="ok",
            value=f"{found.name}, {_gb(found.total_memory)}, compute capability {capability}, "
            f"driver {driver or 'unknown'}",
            facts={
                "name": found.name,
                "memory": found.total_memory,
                "compute_capability": capability,
                "driver": driver,
            },
        )


def driver_version() -> str | None:
    """What `nvidia-smi` says of the driver; None where it is not there or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    line = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip().partition("\n")[0] or None


def engines() -> Iterator[Finding]:
    """What can roll out, and what `slipstream bench` could compare with."""
    yield Finding(
        section="engines",
        name="embedded",
        status="ok",
        value="built in (the default)",
        facts={"found": True},
    )
    found = importlib.util.find_spec("transformers") is not None
    yield Finding(
        section="engines",
        name="hf",
        status="ok" if found else "problem",
        value="transformers is here" if found else "transformers is not here",
        remedy="" if found else "pip install transformers",
        facts={"found": found},
    )
    for name in PEERS:
        place = None
        if importlib.util.find_spec(name) is not None:
            place = "importable"
        elif name == "vllm" and PEERS_PYTHON.exists():
            place = f"in {PEERS_PYTHON.parents[1]}"
        yield Finding(
            section="engines",
            name=name,
            status="ok",
            value=f"{place}, for `slipstream bench`" if place else "not here, and not needed",
            remedy="" if place or name != "vllm" else "to compare with: make peers",
            facts={"found": place is not None},
        )


def sandbox() -> Iterator[Finding]:
    """Whether programs of responses run here, isolated: one in Python and one in C++."""
    from slipstream.errors import RewardError
    from slipstream.rewards.sandbox.local import BubblewrapSandbox
    from slipstream.rewards.sandbox.protocol import Program, SandboxError

    programs = {
        "python": "print(6 * 7)",
        "cpp": '#include <cstdio>\nint main() { std::printf("%d\\n", 6 * 7); }',
    }
    for language, code in programs.items():
        try:
            (ran,) = BubblewrapSandbox().run(Program(code, language), [""])
            wrong = "" if ran.stdout == "42\n" else f"{ran.verdict}: {ran.stderr[-200:]}"
        except (RewardError, SandboxError, ValueError) as error:
            wrong = str(error)
        yield Finding(
            section="sandbox",
            name=f"bubblewrap, {language}",
            status="note" if wrong else "ok",
            value="does not work" if wrong else "runs programs in isolation",
            remedy=f"only rewards that run programs need it: {wrong}" if wrong else "",
            facts={"works": not wrong},
        )


def extras() -> Iterator[Finding]:
    """Packages that only some settings need."""
    known = requirements().optional
    for name, use in EXTRAS.items():
        try:
            found = metadata.version(name)
        except metadata.PackageNotFoundError:
            found = None
        yield Finding(
            section="optional packages",
            name=name,
            status="ok" if found else "note",
            value=f"{found}; {use}" if found else f"not installed; {use}",
            remedy="" if found else f'pip install "{known.get(name, name)}"',
            facts={"version": found},
        )


def kernels() -> Iterator[Finding]:
    """Where compiled code is kept, and whether there is some."""
    from slipstream.kernels.compiling import cache_folder, cached_files

    folder = cache_folder()
    if folder is None:
        yield Finding(
            section="kernels",
            name="compiled code",
            status="note",
            value="cannot be kept: every start compiles",
            remedy="set NUMBA_CACHE_DIR to a folder that can be written",
            facts={"folder": None, "files": 0, "bytes": 0},
        )
        return
    sizes = [path.stat().st_size for path in cached_files()]
    yield Finding(
        section="kernels",
        name="compiled code",
        status="ok" if sizes else "note",
        value=f"{len(sizes)} files, {sum(sizes) / 1e6:.0f} MB, in {folder}"
        if sizes
        else f"none yet in {folder}",
        remedy="" if sizes else "the first start compiles it, once: a minute or two",
        facts={"folder": folder, "files": len(sizes), "bytes": sum(sizes)},
    )


def self_test() -> Iterator[Finding]:
    """A rollout, an update and another rollout of a model of two layers, in each dtype that a run
    may take."""
    import torch

    from slipstream.models.numerics import default_dtype
    from slipstream.preflight.self_test import self_test as run
    from slipstream.training.compute_thread import ComputeThread

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compute = ComputeThread()
    try:
        for dtype in dict.fromkeys((default_dtype(device), torch.float32)):
            result = run(dtype, device, compute)
            name = str(dtype).removeprefix("torch.")
            same = f"the same bits for {result.tokens} log-probs"
            apart = (
                f"{result.differing} of {result.tokens} log-probs differ, by "
                f"{result.largest:.2g} at most"
            )
            yield Finding(
                section="self-test",
                name=f"{name} on {device.type}",
                status="ok" if result.passed else "problem",
                value=f"engine and trainer compute {same}" if not result.differing else apart,
                remedy="" if result.passed else _DIFFERING,
                facts={
                    "tokens": result.tokens,
                    "differing": result.differing,
                    "largest": result.largest,
                    "exact": result.exact,
                },
            )
    finally:
        compute.close()


_DIFFERING = (
    "they are promised to be equal here: remove the folder of compiled code (above), and report it "
    "with the output of `slipstream doctor --json`"
)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def of_sections(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """Findings by section, in order."""
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        found.setdefault(finding.section, []).append(finding)
    return found
