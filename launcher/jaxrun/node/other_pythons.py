"""Finds out whether a module that the program misses is installed for another Python that the user has at hand.

Those are the Pythons of the active environment (VIRTUAL_ENV, CONDA_PREFIX) and on PATH. They are only started after a
program has failed to import a module, for a moment, and answer by one line each.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping

from msgspec import Struct

from jaxrun.protocol.error_chain import ChainedError
from jaxrun.protocol.worker_messages import Failed

_LIMIT_S = 3.0  # for all of them together; a Python starts in 0.05 s, on a slow file system in a second
_MISSING = re.compile(r"No module named '?([A-Za-z_]\w*(?:\.\w+)*)'?")
_ENVIRONMENTS = ("VIRTUAL_ENV", "CONDA_PREFIX")
_COMMANDS = ("python", "python3")
_ANSWER = "jaxrun-answer"
# Works with every Python 3. What -c finds in the working directory, the program may not find.
_QUESTION = f"""\
import sys
from importlib.util import find_spec
sys.path = [path for path in sys.path if path]
def found(name):
    try:
        return find_spec(name) is not None
    except Exception:
        return False
print("\\n{_ANSWER}", found(sys.argv[1]), found("jaxrun"), sys.prefix)
"""


class OtherPython(Struct, frozen=True):
    """A Python that has the module.

    command:     as people type it: "python", or its path
    path:        its file
    has_jaxrun:  whether jaxrun is installed for it, too
    """

    command: str
    path: str
    has_jaxrun: bool


def missing_module(failure: Failed) -> str:
    """Return the name of the module whose import failed first; empty if another error ended the program."""
    chain = failure.chain or (ChainedError(failure.error, failure.message),)
    if failure.error not in ("ModuleNotFoundError", "ImportError"):
        return ""
    messages = (error.message for error in chain if error.error == "ModuleNotFoundError")
    match = _MISSING.match(next(messages, ""))
    return match[1] if match else ""


def find_other_python(module: str, environ: Mapping[str, str]) -> OtherPython | None:
    """Return the first other Python that can import `module`; None if there is none, or none that answers in time."""
    until = time.monotonic() + _LIMIT_S
    for command, path in _candidates(environ):
        left = until - time.monotonic()
        answer = _ask(path, module, environ, left) if left > 0 else None
        if answer is not None:
            has_module, has_jaxrun, prefix = answer
            if has_module == "True" and os.path.realpath(prefix) != os.path.realpath(sys.prefix):
                return OtherPython(command, path, has_jaxrun == "True")
    return None


def describe_other_python(module: str, other: OtherPython) -> tuple[str, str]:
    """Return two sentences: what is wrong, and what to do."""
    means = f"{module} is not installed for {sys.executable}, which runs jaxrun and its ranks, but for {other.path}."
    run = f"{other.command} -m jaxrun …"
    if other.has_jaxrun:
        return means, f"start the job with that Python: {run}"
    return means, f"install jaxrun there and start it from there: {other.command} -m pip install jaxrun; {run}"


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (command, path) of each Python once, except the one that runs jaxrun."""
    on_path = [(name, found) for name in _COMMANDS if (found := shutil.which(name, path=environ.get("PATH")))]
    active = [os.path.join(environ[name], "bin", "python") for name in _ENVIRONMENTS if environ.get(name)]
    typed = {os.path.abspath(path): name for name, path in reversed(on_path)}
    seen = {sys.executable}
    for path in map(os.path.abspath, (*active, *(path for _, path in on_path))):
        if path not in seen and os.access(path, os.X_OK):
            seen.add(path)
            yield typed.get(path, path), path


def _ask(python: str, module: str, environ: Mapping[str, str], limit_s: float) -> tuple[str, ...] | None:
    import subprocess  # takes milliseconds, at the end of a job that has failed

    try:
        done = subprocess.run(
            [python, "-c", _QUESTION, module],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=limit_s,
            text=True,
            errors="replace",
        )
    except (OSError, subprocess.SubprocessError):
        return None
    answers = (line.split(" ", 3) for line in done.stdout.splitlines() if line.startswith(f"{_ANSWER} "))
    found = next((tuple(words[1:]) for words in answers if len(words) == 4), None)
    return found if done.returncode == 0 else None
