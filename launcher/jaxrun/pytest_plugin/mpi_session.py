"""pytest within `mpirun -n 4 pytest` or `srun pytest`: the processes that are there become the ranks of the only gang.

All of them collect. Where that finds tests for a gang, rank 0 stays the one pytest that runs and reports, and the
others become workers. Tests that want other processes than these are deselected. Without any such test nothing is
changed.
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
from jaxrun.api import Gang
from jaxrun.errors import EXIT_NOT_UNIFORM, EXIT_SOFTWARE, EXIT_UNAVAILABLE, EXIT_USAGE, JaxrunError
from jaxrun.gang.spec import GangSpec
from jaxrun.job import interpreter
from jaxrun.job.cluster_env import CLUSTER_ENVS, RankInfo
from jaxrun.protocol.flight_file import LOCKSTEP_RECORD
from jaxrun.pytest_plugin import collected
from jaxrun.pytest_plugin.mark import MarkSpec

_SERVE = f"{RUNTIME}.gang_connect"
_FINAL_EXIT_CODES = (
    0,
    EXIT_USAGE,
    EXIT_NOT_UNIFORM,
    EXIT_UNAVAILABLE,
    EXIT_SOFTWARE,
)  # statuses after which no gang follows
_BACKEND = "mpirun"  # the ranks come to us over the network, as those of mpirun do
_COMMANDS = {"slurm": ("srun",), "flux": ("flux", "run")}
_RESTART_INIT_TIMEOUT_S = 30.0  # seconds for all to come to the next gang; rank 0 starts it as soon as one has ended


class MpiSession:
    """The processes that are there. A rank other than 0 says nothing until it is clear that it will not be a worker.

    more:            further words for jaxrun's command line
    title, command:  of what has started the processes
    """

    def __init__(self, config: pytest.Config, place: RankInfo, more: tuple[str, ...]) -> None:
        self.place = place
        self._more = more
        self.title = next((engine.title for engine in CLUSTER_ENVS if engine.key == place.engine), place.engine)
        self.command = (*_COMMANDS.get(place.engine, ("mpirun",)), "-n", str(place.size))
        self._left_out = 0
        self._devices: int | None = None
        self._reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._file: Any = None
        if place.rank and self._reporter is not None:
            self._file, self._reporter._tw._file = self._reporter._tw._file, io.StringIO()

    def select_tests(self, found: list[pytest.Item]) -> list[pytest.Item]:
        """Keep the tests that these processes can run, and all without the mark; returns the others."""
        wishes = {item: collected.mark_spec(item) for item in found}
        asked = [wish.gang.devices for wish in wishes.values() if isinstance(wish, MarkSpec) and self._can_run(wish)]
        self._devices = next((devices for devices in asked if devices is not None), None)
        out = [item for item, wish in wishes.items() if isinstance(wish, MarkSpec) and not self._can_run(wish)]
        self._left_out = len(out)
        found[:] = [item for item in found if item not in set(out)]
        return out

    def summary(self) -> str:
        """What was left out; empty if nothing was."""
        if not self._left_out:
            return ""
        here = f"the {self.place.size} processes of {self.title}"
        return f"{self._left_out} deselected: they want other processes than {here}, in which pytest runs"

    def run_separately(self) -> None:
        """There is no test for a gang: every process is a pytest of its own, as ever."""
        if self._file is not None:
            self._file.write(self._reporter._tw._file.getvalue())
            self._reporter._tw._file, self._file = self._file, None

    def become_worker(self, config: pytest.Config) -> None:
        """Be a rank of the gang, and of the next if one is made anew, until rank 0 closes it, or at a Ctrl-C.

        Then this process ends, and well, whatever became of the ranks: mpirun would stop rank 0.
        """
        capture: Any = config.pluginmanager.get_plugin("capturemanager")
        if capture is not None:
            capture.stop_global_capturing()
        environ = {**os.environ, **interpreter.interpreter_settings(os.environ)}
        shape, python = self._shape(), (sys.executable, "-P", "-m", "jaxrun")
        with contextlib.suppress(KeyboardInterrupt):
            while (
                subprocess.run([*python, *shape.attach()], env=environ, check=False).returncode not in _FINAL_EXIT_CODES
            ):
                shape = replace(shape, again=True)
        os._exit(0)

    def start_gang(self, run_dir: Path) -> Gang:
        """The gang of all these processes, for rank 0."""
        return _MpiGang(self._shape(), run_dir)

    def _shape(self) -> _MpiGangSpec:
        return _MpiGangSpec(devices=self._devices, backend=_BACKEND, options=self._more)

    def _can_run(self, wish: MarkSpec) -> bool:
        shape = wish.gang
        same = self._devices is None or shape.devices in (None, self._devices)
        plain = shape.lockstep == LOCKSTEP_RECORD and not (shape.hosts or shape.env or wish.fresh)
        return shape.processes == self.place.size and same and plain


@dataclass(frozen=True, slots=True, kw_only=True)
class _MpiGangSpec(GangSpec):
    """`again`: the processes have been a gang before."""

    again: bool = False

    def command_line(self, run_dir: Path) -> tuple[str, ...]:
        return self.attach("--run-dir", str(run_dir))

    def attach(self, *more: str) -> tuple[str, ...]:
        devices = () if self.devices is None else ("--devices-per-process", str(self.devices))
        soon = ("--init-timeout", str(_RESTART_INIT_TIMEOUT_S)) if self.again else ()
        return ("attach", *devices, "--grace", "1", *soon, *more, *self.options, "-m", _SERVE)


class _MpiGang(Gang):
    def __init__(self, shape: _MpiGangSpec, run_dir: Path) -> None:
        self._wanted = shape
        super().__init__(devices=shape.devices, backend=shape.backend, options=shape.options, run_dir=run_dir)

    def _start(self) -> None:
        self.shape, self._wanted = self._wanted, replace(self._wanted, again=True)
        super()._start()

    def close(self) -> None:
        if not self.healthy and self._instance is not None:
            with contextlib.suppress(JaxrunError):
                self.restart()  # or the others would wait for it
        super().close()
