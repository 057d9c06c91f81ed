"""The engines that jobs are tried with, the two directions in which each is used, and the command line for both."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest
import sshd

from jaxrun.spec.backends.mpirun import identify_version

ENGINES = Path(__file__).parents[2] / ".engines"
PYTHON = sys.executable
LAUNCHED, ATTACHED = "launched", "attached"


@dataclass(frozen=True)
class Engine:
    """`name` is its directory below .engines; empty for Slurm and OpenSSH, which the testbed brings."""

    label: str
    name: str = ""
    program: str = "mpirun"
    libmpi: str = ""

    @property
    def mpirun(self) -> str:
        return str(ENGINES / self.name / "bin" / self.program)

    @property
    def title(self) -> str:
        """Its title, with the version that it prints."""
        return _title(self)

    def missing(self) -> str:
        """Why it cannot be used here, and what to do; empty where it can."""
        if not self.name or os.access(self.mpirun, os.X_OK):
            return ""
        return f"{self.label} is not in .engines/{self.name}: run scripts/engines"

    def env(self) -> dict[str, str]:
        """The variables with which mpi4py finds its library, or with which `ssh` in the testbed is OpenSSH's."""
        if self is OPENSSH:
            return {sshd.REAL: "1"}
        return {"MPI4PY_LIBMPI": str(ENGINES / self.name / "lib" / self.libmpi)} if self.libmpi else {}


OPEN_MPI_5 = Engine("Open MPI 5", "openmpi-5.0.11", libmpi="libmpi.so.40")
OPEN_MPI_4 = Engine("Open MPI 4", "openmpi-4.1.8", libmpi="libmpi.so.40")
MPICH = Engine("MPICH", "mpich-5.0.2", libmpi="libmpi.so.12")
INTEL = Engine("Intel MPI", "impi-rt-2021.18.1", "mpiexec.hydra", libmpi="libmpi.so.12")
SLURM = Engine("Slurm")
OPENSSH = Engine("OpenSSH")


@dataclass(frozen=True)
class LaunchMode:
    engine: Engine
    direction: str

    def __str__(self) -> str:
        return f"{self.engine.label} {self.direction}"

    @property
    def host(self) -> str:
        """Where a user would type the command."""
        return "ctl" if self.engine is SLURM else "h1"

    def command(self, hosts: tuple[str, ...], *words: str, variables: Iterable[str] = ()) -> list[str]:
        """`jaxrun WORDS`, with a process on each of these hosts; one that is there twice has two, and so have all.

        variables: the names of those that each process must have, beside the engine's own
        """
        number, slots_of = str(len(hosts)), Counter(hosts)
        each = str(slots_of[hosts[0]])
        if self.engine is SLURM:
            nodes = ["-N", str(len(slots_of)), "--ntasks-per-node", each, "--nodelist", ",".join(slots_of)]
            if self.direction == LAUNCHED:
                return ["salloc", "--quiet", *nodes, *_jaxrun("--backend", "slurm", *words)]
            return ["srun", *nodes, *_jaxrun("attach", *words)]
        slots = ",".join(f"{host}:{count}" for host, count in slots_of.items())
        if self.engine is OPENSSH:
            return _jaxrun("--backend", "ssh", "-H", slots, *words)
        if self.direction == LAUNCHED:
            return _jaxrun("--backend", "mpirun", "--mpirun", self.engine.mpirun, "-H", slots, *words)
        if self.engine in (OPEN_MPI_5, OPEN_MPI_4):
            names = [word for name in (*self.engine.env(), *variables) for word in ("-x", name)]
            options = ["--allow-run-as-root", *names, "--host", slots]
        else:
            options = ["-hosts", ",".join(slots_of), "-ppn", each]
        root = ["env", f"I_MPI_ROOT={ENGINES / self.engine.name}"] if self.engine is INTEL else []
        return [*root, self.engine.mpirun, *options, "-n", number, *_jaxrun("attach", *words)]


def _jaxrun(*words: str) -> list[str]:
    return [PYTHON, "-m", "jaxrun", *words]


MPI = (OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL)
# Rows that every engine might do in its own way, and those where MPICH stands for Intel MPI, too.
ALL = tuple(LaunchMode(engine, direction) for engine in (*MPI, SLURM) for direction in (LAUNCHED, ATTACHED))
SSH = LaunchMode(OPENSSH, LAUNCHED)


def ssh_env(engine: Engine) -> dict[str, str]:
    """The variables with which `ssh` in the testbed is OpenSSH's, if that is the engine."""
    return engine.env() if engine is OPENSSH else {}


SOME = tuple(mode for mode in ALL if mode.engine is not INTEL)
# Rows that agents, head and verdict decide, and of which an engine sees nothing: one of each family and direction.
ANY = (LaunchMode(OPEN_MPI_5, LAUNCHED), LaunchMode(SLURM, ATTACHED))
# What a row that is always tried is tried with; all others, and all other rows, are for scripts/test --all.
BASIC = (LaunchMode(OPEN_MPI_5, LAUNCHED), LaunchMode(SLURM, LAUNCHED))


def row(title: str, *among: LaunchMode, always: tuple[LaunchMode, ...] = ()) -> pytest.MarkDecorator:
    """A test that is a row of the matrix; its fixture `runner` starts jobs in one of these ways."""
    params = [
        pytest.param((mode, title), id=str(mode), marks=() if mode in always else pytest.mark.extended)
        for mode in among
    ]
    return pytest.mark.parametrize("runner", params, indirect=True)


@cache
def versions() -> str:
    return f"JAX {version('jax')} on Python {platform.python_version()}"


@cache
def _title(engine: Engine) -> str:
    command = [engine.mpirun, "--version"] if engine.name else ["slurmctld", "-V"]
    if engine is OPENSSH:
        done = subprocess.run(["/usr/bin/ssh", "-V"], capture_output=True, text=True, timeout=30, check=True)
        return done.stderr.split()[0].strip(",").replace("_", " ")
    environ = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.CalledProcessError):
        return engine.label
    version_text = done.stdout
    if not engine.name:
        return f"{engine.label} {version_text.split()[-1]}"
    found = identify_version(version_text)
    return f"{found[0].title} {found[1].version(version_text)}" if found else engine.label
