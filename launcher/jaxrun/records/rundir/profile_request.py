"""Has a running job take a JAX profile on all ranks: `jaxrun profile`."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.requests import Answer, ProfileRequest
from jaxrun.records.rundir.running_job import RequestRefused, RunningJob, ask
from jaxrun.text import format_bytes, plural

PROFILE_DIR = "profile"  # in the run directory
_LEADS_S = (1.0, 4.0, 16.0)  # for the order to reach all ranks, at each attempt
_RETRY_S = 0.5


def take_profile(job: RunningJob, steps: int, output: Path | None, show: Callable[[str], None]) -> str:
    """Have all ranks profile the same `steps` steps; returns what was written, and how it is looked at.

    output:  the directory for profiles, instead of that in the run directory; `show` is called with what is under way.

    Raises UsageError and UnavailableError.
    """
    directory = (output or job.run_dir / PROFILE_DIR).absolute()
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--output {directory} is a file, not a directory. Name a new or an existing directory.")
    session = time.strftime("%Y_%m_%d_%H_%M_%S")  # as JAX names them
    answer = _ask_until_planned(job, steps, directory, session, show)
    return _describe(answer, directory, session)


def _ask_until_planned(
    job: RunningJob, steps: int, directory: Path, session: str, show: Callable[[str], None]
) -> Answer:
    """Ask again where not all ranks have made a call yet, and with more time where the order came too late for some."""
    shown, late = "", 0
    while True:
        request = ProfileRequest(steps, str(directory), session, _LEADS_S[late])
        try:
            return ask(job, request, None, lambda calls: show(f"profiling {plural(steps, 'step')}: {calls} ..."))
        except RequestRefused as refused:
            content = refused.answer.content or {}
            if not content.get("again") or late + 1 == len(_LEADS_S):
                raise UnavailableError(f"no profile of all ranks: {refused}") from None
            late += "files" in content
            if str(refused) != shown:
                shown = str(refused)
                show(f"{shown}; trying again")
        time.sleep(_RETRY_S)


def _describe(answer: Answer, directory: Path, session: str) -> str:
    files, size = int(answer.content["files"]), float(answer.content["bytes"])
    shown = Path(os.path.relpath(directory)) if directory.is_relative_to(Path.cwd()) else directory
    where = shown / "plugins" / "profile" / session
    command = shlex.join(["xprof", "--logdir", str(shown)])
    written = f"{plural(files, 'profile')}, {format_bytes(size)}, in {where}"
    written += f"; {answer.text}" if answer.text else ""
    return f"{written}\nto see them: {command}   (pip install xprof)"
