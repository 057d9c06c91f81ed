"""pytest under `mpirun -n 4 pytest` or `srun pytest`: mpirun's processes become the ranks of the only gang.

All processes collect. If there are tests that these processes can run as a gang, rank 0 stays the pytest that runs and
reports, and the others become workers; marked tests that need other processes are deselected. Without any marked test
each process is a pytest of its own.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from jaxrun import RUNTIME
from jaxrun.errors import EXIT_NOT_UNIFORM, EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE, JaxrunError
from jaxrun.frontends.gang.gang import Gang
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.frontends.pytest_plugin.mark import MarkSpec, mark_spec
from jaxrun.protocol.flight_file import LOCKSTEP_RECORD
from jaxrun.spec.job.cluster_env import CLUSTER_ENVS, RankInfo
from jaxrun.spec.job.environment import interpreter_settings

_RANK_PROGRAM = f"{RUNTIME}.gang.connect"
# `jaxrun attach` with one of these exit codes is not started again.
_FINAL_EXIT_CODES = (0, EXIT_USAGE, EXIT_NOT_UNIFORM, EXIT_UNAVAILABLE, EXIT_SOFTWARE)
_BACKEND = "mpirun"  # the ranks connect over the network, as mpirun's do, whatever has started them
_COMMANDS = {"slurm": ("srun",), "flux": ("flux", "run")}
_RESTART_INIT_TIMEOUT_S = 30.0  # for all processes to join a restarted gang


class MpiSession:
    """The processes of an MPI job in which pytest was started, seen from one of them.

    A rank other than 0 writes nothing until it is clear that it is a pytest of its own.

    jaxrun_args:     further words for jaxrun's command line
    title, command:  what has started the processes, for people and as words of a command line
    """

    def __init__(self, config: pytest.Config, rank_info: RankInfo, jaxrun_args: tuple[str, ...]) -> None:
        self.rank_info = rank_info
        engine = rank_info.engine
        self.title = next((cluster_env.title for cluster_env in CLUSTER_ENVS if cluster_env.key == engine), engine)
        self.command = (*_COMMANDS.get(engine, ("mpirun",)), "-n", str(rank_info.size))
        self._jaxrun_args = jaxrun_args
        self._deselected = 0
        self._devices: int | None = None
        self._reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._output: Any = None
        if rank_info.rank and self._reporter is not None:
            self._output, self._reporter._tw._file = self._reporter._tw._file, io.StringIO()

    def select_tests(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """Remove from `items` the marked tests that these processes cannot run; returns the removed ones."""
        specs = {item: spec for item in items if isinstance(spec := mark_spec(item), MarkSpec)}
        devices = [spec.gang.devices for spec in specs.values() if self._can_run(spec)]
        self._devices = next((count for count in devices if count is not None), None)
        removed = {item: None for item, spec in specs.items() if not self._can_run(spec)}
        self._deselected = len(removed)
        items[:] = [item for item in items if item not in removed]
        return list(removed)

    def summary(self) -> str:
        """How many tests were deselected and why; empty if none was."""
        if not self._deselected:
            return ""
        here = f"the {self.rank_info.size} processes of {self.title}"
        return f"{self._deselected} deselected: they want other processes than {here}, in which pytest runs"

    def run_separately(self) -> None:
        """Let this process be a pytest of its own, because there is no test for a gang."""
        if self._output is not None:
            self._output.write(self._reporter._tw._file.getvalue())
            self._reporter._tw._file, self._output = self._output, None

    def become_worker(self, config: pytest.Config) -> None:
        """Be a rank of the gang, and of each restarted gang, until rank 0 closes it or at a Ctrl-C. Never returns.

        The exit status is 0 whatever became of the ranks, because mpirun would stop rank 0 otherwise.
        """
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.stop_global_capturing()
        environ = {**os.environ, **interpreter_settings(os.environ)}
        spec, exit_code = self._gang_spec(), None
        with contextlib.suppress(KeyboardInterrupt):
            while exit_code not in _FINAL_EXIT_CODES:
                command = [sys.executable, "-P", "-m", "jaxrun", *spec.attach()]
                exit_code = subprocess.run(command, env=environ, check=False).returncode
                spec = replace(spec, restarted=True)
        os._exit(0)

    def start_gang(self, run_dir: Path) -> Gang:
        """Start the gang of all these processes; called on rank 0."""
        return _MpiGang.from_spec(self._gang_spec(), run_dir)

    def _gang_spec(self) -> _MpiGangSpec:
        return _MpiGangSpec(devices=self._devices, backend=_BACKEND, options=self._jaxrun_args)

    def _can_run(self, spec: MarkSpec) -> bool:
        wanted = spec.gang
        same_devices = self._devices is None or wanted.devices in (None, self._devices)
        plain = wanted.lockstep == LOCKSTEP_RECORD and not (wanted.hosts or wanted.env or spec.fresh)
        return wanted.processes == self.rank_info.size and same_devices and plain


@dataclass(frozen=True, slots=True, kw_only=True)
class _MpiGangSpec(GangSpec):
    """A gang of processes that exist already. `restarted`: they have been a gang before."""

    restarted: bool = False

    def for_restart(self) -> _MpiGangSpec:
        return replace(self, restarted=True)

    def command_line(self, run_dir: Path) -> tuple[str, ...]:
        return self.attach("--run-dir", str(run_dir))

    def attach(self, *more: str) -> tuple[str, ...]:
        """The words after `jaxrun` on each process."""
        devices = () if self.devices is None else ("--devices-per-process", str(self.devices))
        timeout = ("--init-timeout", str(_RESTART_INIT_TIMEOUT_S)) if self.restarted else ()
        return ("attach", *devices, "--grace", "1", *timeout, *more, *self.options, "-m", _RANK_PROGRAM)


class _MpiGang(Gang):
    def close(self) -> None:
        if self.broken:
            with contextlib.suppress(JaxrunError):
                self.restart()  # the other processes wait for the next gang, and end with it
        super().close()
