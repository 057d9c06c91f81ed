"""A Python process that uses gangs, for tests of its end; `session` is their fixture."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from harness import TIME_LIMIT, kill, wait_until

from jaxrun.node.agent.guard import find_marked

_HEAD = """
import os, signal, sys, threading, time
import jaxrun
import jaxrun.frontends.gang.call
from jaxrun.frontends.gang import gang_job

jaxrun.frontends.gang.call.FAILURE_GRACE_S = 60

def rank():
    import jax
    return jax.process_index()

def meet():
    import jax.numpy as jnp
    from jax.experimental import multihost_utils
    return multihost_utils.process_allgather(jnp.ones(2)).shape
"""


class GangScript:
    """A script that is running. `temporary` is where its temporary files go."""

    def __init__(self, folder: Path, source: str) -> None:
        self.temporary = folder / ("tmp" * 40)  # longer than a socket's name may be
        self.temporary.mkdir()
        script = folder / "script.py"
        script.write_text(_HEAD + dedent(source))
        name, value = "TEST_SESSION", f"{os.getpid()}-{folder}"
        self._mark = f"{name}={value}"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "always", script],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(self.temporary), name: value},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        """All that live of what was started by it, or by what it has started."""
        return list(find_marked(self._mark))

    def wait_for(self, line: str) -> list[str]:
        """Until it has printed this line; returns what came before."""
        assert self.process.stdout is not None
        before = []
        for printed in self.process.stdout:
            if printed.rstrip("\n") == line:
                return before
            before.append(printed.rstrip("\n"))
        raise AssertionError(f"no {line!r}: {before} {self.process.communicate()}")

    def interrupt(self) -> None:
        """As a terminal does it: all processes of its group are meant."""
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self, status: int = 0, *, unclosed: bool = False) -> tuple[str, str]:
        """The rest of stdout and stderr; it ends with this status, and leaves no process and no file.

        unclosed:  a Ctrl-C may have come between the making of a socket and its name: Python closes it, and warns
        """
        out, err = self.process.communicate(timeout=TIME_LIMIT)
        assert self.process.returncode == status, (out, err)
        warnings = re.findall(r"\w*Warning: .*", err)
        assert not warnings or (unclosed and all(one.startswith("ResourceWarning: ") for one in warnings)), err
        self.vanish()
        return out, err

    def vanish(self) -> None:
        """All its processes end by themselves, and leave no file."""
        wait_until(lambda: not self.processes() and not list(self.temporary.iterdir()), "end of all")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        kill(self.processes())


@pytest.fixture
def session(tmp_path):
    """session(source) starts a script; whatever the test does, nothing survives it."""
    begun = []

    def start(source: str) -> GangScript:
        begun.append(GangScript(tmp_path, source))
        return begun[-1]

    yield start
    for script in begun:
        script.close()
