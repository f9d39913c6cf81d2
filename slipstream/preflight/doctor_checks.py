"""The checks of `slipstream doctor`: one function per part of the installation, yielding findings.

The checks change nothing on the machine. Findings contain no environment variables except those
that Slipstream reads. Each check imports the heavy modules that it needs itself, so that a broken
module becomes a finding. Called by `preflight.doctor`.
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

MIN_MEMORY = 700_000_000
"""Bytes of memory that the smallest possible run needs: mostly libraries and kernels."""

LOW_MEMORY, LOW_DISK = 2_000_000_000, 1_000_000_000
"""Free bytes of memory and disk below which a run of the quickstart's size may not fit."""

EXTRAS = {
    "tensorboard": "curves in TensorBoard (trainer.logger=tensorboard)",
    "math-verify": "scoring responses of data_source math_verify",
    "reasoning-gym": "data.task=reasoning_gym",
    "gymnasium": "environments of gymnasium (rollout.multi_turn.environment)",
    "openenv": "environments of OpenEnv servers (rollout.multi_turn.environment)",
    "verifiers": "environments of verifiers (rollout.multi_turn.environment)",
    "mcp": "tools of MCP servers (rollout.multi_turn.mcp_config_path)",
    "datasets": "reading folders written by save_to_disk of `datasets`",
    "ray": "several processes (trainer.nnodes, trainer.n_gpus_per_node)",
    "peft": "comparing LoRA adapters with peft's",
    "wandb": "curves in Weights & Biases (trainer.logger=wandb)",
    "mlflow-skinny": "curves in MLflow (trainer.logger=mlflow)",
    "trackio": "curves in Trackio (trainer.logger=trackio)",
}
"""Optional packages, each with the feature that needs it."""

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the output: what was checked, its status and value, and a remedy if needed.

    `facts` holds the same information for programs that read the JSON output. The status is
    "problem" if runs will not work, and "note" if only some features are affected.
    """

    section: str
    name: str
    status: Status
    value: str
    remedy: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirements:
    """Versions that Slipstream needs: a range for Python, and requirements by distribution name.

    `optional` holds the requirements of all extras.
    """

    python: str
    needed: Mapping[str, str]
    optional: Mapping[str, str]


def requirements(root: Path = Path(slipstream.__file__).parents[1]) -> Requirements:
    """Read the requirements from `pyproject.toml` in `root`, or from the installed distribution.

    Raises PackageNotFoundError if `root` is not a source tree of Slipstream and no distribution
    is installed.
    """
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
    """Compare the versions of Python and of each required package with the requirements."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    required = requirements()
    folder = str(Path(slipstream.__file__).parent)
    yield Finding(
        section="versions",
        name="slipstream",
        status="ok",
        value=f"{__version__} in {folder}",
        facts={"version": __version__, "folder": folder},
    )
    python = platform.python_version()
    good = SpecifierSet(required.python).contains(python, prereleases=True)
    yield Finding(
        section="versions",
        name="Python",
        status="ok" if good else "problem",
        value=f"{python} (needs {required.python})",
        remedy="" if good else f"create the environment with Python {required.python}",
        facts={"version": python, "needs": required.python},
    )
    for name, text in required.needed.items():
        marker = Requirement(text).marker
        if marker is None or marker.evaluate():
            yield package(name, text)


def package(name: str, requirement: str) -> Finding:
    """Return a finding: does the installed version satisfy `requirement` ("numpy>=1.26")?"""
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
    """Yield the device type that torch was built for: CPU, or a CUDA version."""
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
    """Yield the CPU model, its instruction sets, matrix product kernels, cores and threads."""
    import torch

    from slipstream.kernels import processor as kernels
    from slipstream.kernels.team import kernels_supported
    from slipstream.models.numerics import (
        default_dtype,
        has_kernels,
        products_are_exact,
    )

    machine = this_machine()
    yield Finding(
        section="processor",
        name="model",
        status="ok",
        value=machine.cpu,
        facts={"model": machine.cpu},
    )
    yield Finding(
        section="processor",
        name="features",
        status="ok",
        value=", ".join(machine.cpu_flags) or "no instruction sets that the kernels use",
        facts={"features": list(machine.cpu_flags)},
    )
    device = torch.device("cpu")
    dtype = str(default_dtype(device)).removeprefix("torch.")
    products = kernels.bf16_products()
    amx_disabled = os.environ.get(kernels.NO_AMX, "0") not in ("", "0")
    yield Finding(
        section="processor",
        name="dtype=auto",
        status="note" if amx_disabled else "ok",
        value=f"{dtype}; bf16 matrix products use {products}",
        remedy=f"AMX is disabled because {kernels.NO_AMX} is set; unset it to use AMX"
        if amx_disabled
        else "",
        facts={"dtype": dtype, "bf16_products": products},
    )
    compiled = kernels_supported() and has_kernels(torch.float32, device)
    exact = compiled or products_are_exact()
    yield Finding(
        section="processor",
        name="products",
        status="ok" if exact else "note",
        value=("compiled kernels" if compiled else "torch's operations")
        + (", the same bits for any batch size" if exact else ", bits depend on the batch size"),
        remedy=""
        if exact
        else "log-probs of rollout and trainer may differ in their last bits; for exact mode use a "
        "torch with OpenBLAS or oneDNN, or a processor with fused multiply-adds",
        facts={"kernels": compiled, "exact": exact},
    )
    yield _threads(torch.get_num_threads())


def _threads(threads: int) -> Finding:
    from slipstream.threads import usable_cores

    total, usable = os.cpu_count() or 1, usable_cores()
    variable = os.environ.get("OMP_NUM_THREADS")
    # Without the variable torch chooses, and a run measures which number is fastest.
    idle = variable is not None and threads < usable
    value = f"{usable} of {total} usable, {threads} thread{'s' if threads > 1 else ''}"
    return Finding(
        section="processor",
        name="cores",
        status="note" if idle else "ok",
        value=value + (f" (OMP_NUM_THREADS={variable})" if variable else ""),
        remedy=f"{usable - threads} idle: unset OMP_NUM_THREADS, or set "
        f"trainer.num_threads={usable}"
        if idle
        else "",
        facts={"cores": total, "usable": usable, "threads": threads, "omp_num_threads": variable},
    )


def memory() -> Iterator[Finding]:
    """Compare the memory that this process may still allocate with the needs of a small run."""
    import torch

    from slipstream.inference.engine.memory import free_bytes

    total, available = psutil.virtual_memory().total, psutil.virtual_memory().available
    free = free_bytes(torch.device("cpu"))
    status: Status = "ok"
    remedy = ""
    if free < MIN_MEMORY:
        status = "problem"
        remedy = (
            f"a run needs at least {_gb(MIN_MEMORY)}: end other programs, or raise the memory "
            "limit of the container"
        )
    elif free < LOW_MEMORY:
        status = "note"
        remedy = "enough for small models only"
    value = f"{_gb(free)} of {_gb(total)} free for this process"
    # The margin of 5% is needed because available memory changes all the time.
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
    """Check that `folder`, or its nearest existing parent, is writable and has free space."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    status: Status = "ok"
    remedy = ""
    if not writable:
        status, remedy = "problem", "set trainer.default_local_dir to a writable folder"
    elif free < LOW_DISK:
        status = "note"
        remedy = "free disk space: a checkpoint is three times as large as the weights in fp32"
    yield Finding(
        section="memory and disk",
        name="disk",
        status=status,
        value=f"{_gb(free)} free in {existing.absolute()}" + ("" if writable else ", not writable"),
        remedy=remedy,
        facts={"folder": str(existing.absolute()), "free": free, "writable": writable},
    )


def gpus() -> Iterator[Finding]:
    """Yield each GPU that torch can use. If it can use none, report GPUs that the system has."""
    import torch

    visible = detect_hardware().gpus
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        yield Finding(
            section="GPUs",
            name="GPUs",
            status="note" if visible else "ok",
            value=f"{visible} present, but torch can use none of them"
            if visible
            else "none; runs will use the CPU",
            remedy="install a torch built for CUDA, or check the driver (nvidia-smi)"
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
    """Return the driver version that `nvidia-smi` prints; None if it is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip().partition("\n")[0] or None


def engines() -> Iterator[Finding]:
    """Yield the rollout engines that compute in the run itself."""
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
        value="transformers is installed" if found else "transformers is not installed",
        remedy="" if found else "pip install transformers",
        facts={"found": found},
    )


def sandbox() -> Iterator[Finding]:
    """Run a small Python program and a small C++ program in the sandbox for rewards."""
    from slipstream.errors import RewardError
    from slipstream.rewards.sandbox.local import BubblewrapSandbox
    from slipstream.rewards.sandbox.protocol import Program, SandboxError

    programs = {
        "python": "print(6 * 7)",
        "cpp": '#include <cstdio>\nint main() { std::printf("%d\\n", 6 * 7); }',
    }
    for language, code in programs.items():
        try:
            (result,) = BubblewrapSandbox().run(Program(code, language), [""])
            failure = "" if result.stdout == "42\n" else f"{result.verdict}: {result.stderr[-200:]}"
        except (RewardError, SandboxError, ValueError) as error:
            failure = str(error)
        yield Finding(
            section="sandbox",
            name=f"bubblewrap, {language}",
            status="note" if failure else "ok",
            value="does not work" if failure else "runs programs in isolation",
            remedy=f"{failure} (only rewards that run programs need it)" if failure else "",
            facts={"works": not failure},
        )


def sandbox_memory() -> Iterator[Finding]:
    """Yield whether a cgroup limits the memory of programs in the sandbox for rewards."""
    from slipstream.rewards.sandbox.memory_cgroup import REMEDY, memory_groups

    found = memory_groups()
    groups = found.groups
    yield Finding(
        section="sandbox",
        name="memory limit",
        status="note" if groups is None else "ok",
        value="measured, without cgroups: memory of the kernel for a program is not counted"
        if groups is None
        else f"by cgroups (version {groups.version}), memory of the kernel included",
        remedy=f"{found.reason}; {REMEDY}" if groups is None else "",
        facts={"cgroups": None if groups is None else groups.version},
    )


def scoring_workers() -> Iterator[Finding]:
    """Start a worker process for scoring, and ask whether it is locked down."""
    from slipstream.errors import RewardError
    from slipstream.rewards.workers import TooMuchWorkError, WorkerPool

    workers = WorkerPool("slipstream.rewards.lock_down:still_allowed", size=1)
    try:
        failure = str(workers.call())
    except (RewardError, TooMuchWorkError, ValueError) as error:
        failure = str(error)
    finally:
        workers.close()
    yield Finding(
        section="sandbox",
        name="scoring workers",
        status="note" if failure else "ok",
        value="are not locked down" if failure else "cannot write, start programs or use a network",
        remedy=f"{failure} (only math and reasoning-gym rewards use them)" if failure else "",
        facts={"locked_down": not failure},
    )


def extras() -> Iterator[Finding]:
    """Yield the optional packages, installed or not."""
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
    """Report the cache folder of compiled kernels and the number and size of its files."""
    from slipstream.kernels.compiling import cache_folder, cached_files

    folder = cache_folder()
    if folder is None:
        yield Finding(
            section="kernels",
            name="compiled code",
            status="note",
            value="no writable cache folder, so each start compiles all kernels",
            remedy="set NUMBA_CACHE_DIR to a writable folder",
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
        remedy="" if sizes else "the first start compiles the kernels once (one or two minutes)",
        facts={"folder": folder, "files": len(sizes), "bytes": sum(sizes)},
    )


def self_test() -> Iterator[Finding]:
    """Run the self-test in the default dtype of the device and in fp32.

    The device is the GPU if torch can use one, else the CPU.
    """
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
            same = f"engine and trainer compute the same bits for all {result.tokens} log-probs"
            different = (
                f"{result.differing} of {result.tokens} log-probs differ between engine and "
                f"trainer, by at most {result.largest:.2g}"
            )
            yield Finding(
                section="self-test",
                name=f"{name} on {device.type}",
                status="ok" if result.passed else "problem",
                value=different if result.differing else same,
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
    "this device supports exact mode, so they must be equal: delete the folder of compiled code "
    "(see kernels), run again, and report a bug with the output of `slipstream doctor --json`"
)


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def by_section(findings: Sequence[Finding]) -> dict[str, list[Finding]]:
    """Group the findings by section; sections and findings keep their order."""
    found: dict[str, list[Finding]] = {}
    for finding in findings:
        found.setdefault(finding.section, []).append(finding)
    return found
