"""Python scripts that use gangs, run by processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

from harness import TIME_LIMIT

from jaxrun.agent.guard import find_marked

_HEAD = """
import os, signal, sys, threading, time
import jaxrun

def rank():
    import jax
    return jax.process_index()

def meet():
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    return multihost_utils.process_allgather(jnp.ones(2)).shape

def sleep():
    print("asleep")
    time.sleep(60)

def waits_in_cpp(pid):
    # For a while: what is compiled already goes from Python to its wait at once.
    for _ in range(20):
        time.sleep(0.01)
        if "futex" not in open(f"/proc/{pid}/wchan").read():
            return False
    return True

def stuck(pid_of_0):
    if rank() == 0:
        meet()
    else:
        while not waits_in_cpp(pid_of_0):
            pass
        print("asleep")
        while True:
            try:
                time.sleep(60)
            except KeyboardInterrupt:
                pass
"""


class GangScript:
    """A script that is running. `temporary` is where its temporary files go."""

    def __init__(self, folder: Path, source: str) -> None:
        self.temporary = folder / ("tmp" * 40)  # longer than a socket's name may be
        self.temporary.mkdir()
        script = folder / "script.py"
        script.write_text(_HEAD + dedent(source))
        name, self._value = "TEST_SESSION", f"{os.getpid()}-{folder}"
        self._mark = f"{name}={self._value}"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "always", script],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary), name: self._value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        """All that live of what was started by it, or by what it has started."""
        return list(find_marked(self._mark))

    def wait_for(self, line: str) -> None:
        """Until it has printed this line."""
        assert self.process.stdout is not None
        for printed in self.process.stdout:
            if printed.rstrip("\n") == line:
                return
        raise AssertionError(f"no {line!r}: {self.process.communicate()}")

    def interrupt(self) -> None:
        """As a terminal does it: all processes of its group are meant."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, status: int = 0) -> tuple[str, str]:
        """The rest of stdout and stderr; it ends with this status, and leaves no process and no file."""
        out, err = self.process.communicate(timeout=TIME_LIMIT)
        assert self.process.returncode == status, (out, err)
        assert "Warning" not in err, err
        self.vanish()
        assert list(self.temporary.iterdir()) == []
        return out, err

    def vanish(self) -> None:
        """All its processes end by themselves."""
        deadline = time.monotonic() + TIME_LIMIT
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.processes() == []


@contextmanager
def gang_scripts(folder: Path) -> Iterator[Callable[[str], GangScript]]:
    """Yields start(source), which starts a script in `folder`; whatever the test does, nothing survives it."""
    begun: list[GangScript] = []

    def start(source: str) -> GangScript:
        begun.append(GangScript(folder, source))
        return begun[-1]

    yield start
    for each in begun:
        each.process.kill()
        each.process.communicate()
        for pid in each.processes():
            os.kill(pid, signal.SIGKILL)
