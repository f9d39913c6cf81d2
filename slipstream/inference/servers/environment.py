"""What a Python environment has of a serving engine, without importing the engine."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import EngineError
from slipstream.reading import reason

TIMEOUT_S = 60.0
"""Time limit of the question, in seconds."""

_PROGRAM = """
import importlib.metadata as metadata, importlib.util, json, sys
package = sys.argv[1]
found = {}
for name in (package, f"{package}-cpu", "torch"):
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps([importlib.util.find_spec(package) is not None, found]))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A Python environment. `distributions` holds the versions of what is installed of the engine's
    package, its build for CPUs (`PACKAGE-cpu`), and torch. `importable` is whether Python finds the
    package."""

    python: Path
    package: str
    importable: bool
    distributions: dict[str, str]

    @property
    def version(self) -> str | None:
        """The version of the engine; None if it is not known."""
        names = (self.package, f"{self.package}-cpu")
        return next((self.distributions[n] for n in names if n in self.distributions), None)

    @property
    def for_cpu(self) -> bool | None:
        """Whether the engine was built for CPUs; None if that is not known."""
        if f"{self.package}-cpu" in self.distributions:
            return True
        found = [self.distributions.get(name, "") for name in (self.package, "torch")]
        if not any(found):
            return None
        return any(version.endswith("+cpu") for version in found)


def environment_of(python: Path, package: str) -> Environment:
    """Ask a Python interpreter what it has of `package`.

    Raises EngineError if the interpreter does not answer.
    """
    command = [str(python.absolute()), "-c", _PROGRAM, package]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True, cwd="/"
        )
        importable, distributions = json.loads(done.stdout.splitlines()[-1])
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no output"])[-1]
        raise EngineError(f"{python} does not run a Python program: {last}") from error
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise EngineError(f"{python} does not run a Python program: {reason(error)}") from error
    return Environment(
        python=python, package=package, importable=importable, distributions=distributions
    )


def numbers(version: str, count: int = 2) -> tuple[int, ...]:
    """The first `count` numbers of a version, such as (0, 32); fewer if it has fewer."""
    parts = version.split("+")[0].split(".")[:count]
    return tuple(int(part) for part in parts if part.isdigit())
