"""The screen of --live: `jaxrun top` beside the launcher, on its terminal, until the job is over or `q` is typed."""

from __future__ import annotations

import os
import subprocess
import sys

from jaxrun.errors import UsageError
from jaxrun.protocol.settings import STDIN_NONE
from jaxrun.records.output.held_screen import HeldScreen
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.job.job import Job

_STREAMS = ("standard input", "stdout", "stderr")
# In the background of a shell that ends at once, it is no descendant of the launcher, which kills all of those.
_BACKGROUND = 'exec 3<&0; "$@" 0<&3 3<&- &'


def check_live(job: Job) -> None:
    """Raise UsageError where there is no terminal to show the screen on."""
    for fd, name in enumerate(_STREAMS):
        if not os.isatty(fd):
            raise UsageError(f"--live shows the job on the terminal, and {name} is none; leave --live out")
    if job.stdin not in ("", STDIN_NONE):
        raise UsageError(f"--live reads the keys that are typed, and --stdin {job.stdin} as well; give one of them")
    if job.no_run_dir:
        raise UsageError("--live reads the run directory, and --no-run-dir leaves none; give one of them")


def start_screen(directory: RunDir) -> HeldScreen:
    """Start it: to be called before the guard is there, which would end it with the launcher."""
    ended, holds = os.pipe()
    command = (sys.executable, "-m", "jaxrun", "top", "--launcher", str(os.getpid()), directory.name)
    try:
        subprocess.run(["/bin/sh", "-c", _BACKGROUND, "jaxrun", *command], pass_fds=(holds,), check=False)
    finally:
        os.close(holds)
    return HeldScreen(ended)
