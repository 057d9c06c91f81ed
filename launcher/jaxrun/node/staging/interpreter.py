"""Makes a copied virtual environment usable on a host whose Python is elsewhere, or another build of the same version.

The interpreter of a virtual environment is a link to the Python from which it was made. A host that lacks this Python
gets an environment of its own beside the copy: all in it leads to the copy, except the interpreter, the host's own.

    BASE/jaxrun-stage-UID/NAME/copy/…                  as it came
                              /python-HASH/bin/python  leads to the host's Python; all else to ../copy
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import sys
from pathlib import Path

from jaxrun.files.own_files import draft_name, remove_directory

_CONFIGURATION = "pyvenv.cfg"
_INTERPRETER = re.compile(r"python(3(\.\d+)?t?)?")
_MADE_BY_HOST = re.compile(r"(home|executable|command)\s*=")


def base_python() -> str:
    """The interpreter that this process runs, outside of any virtual environment."""
    return getattr(sys, "_base_executable", "") or sys.executable


def usable_environment(copy: str, python: str, base: str, beside: str) -> str:
    """Return a directory with the same packages as a copied environment, and with an interpreter that runs here.

    copy:    the copied environment, which is returned if its interpreter runs here
    python:  the interpreter in it, as a path below it
    base:    this host's Python, of the same version
    beside:  where an environment is made if it is needed

    Raises OSError.
    """
    leads_to = os.path.realpath(f"{copy}/{python}")
    if leads_to.startswith(f"{os.path.realpath(copy)}/") or leads_to == os.path.realpath(base):
        return copy
    made = f"{beside}/python-{hashlib.sha256(f'{copy} {base}'.encode()).hexdigest()[:16]}"
    if not os.path.isdir(made):
        draft = f"{beside}/{draft_name()}"
        os.mkdir(draft, 0o700)
        try:
            _fill(Path(draft), Path(copy), base)
            os.rename(draft, made)
        except OSError as error:
            with contextlib.suppress(OSError):
                remove_directory(draft)
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):  # else another job has made the same
                raise
    return made


def _fill(environment: Path, copy: Path, base: str) -> None:
    for entry in copy.iterdir():
        if entry.name not in ("bin", _CONFIGURATION):
            (environment / entry.name).symlink_to(entry)
    (environment / "bin").mkdir()
    for entry in (copy / "bin").iterdir():
        is_interpreter = _INTERPRETER.fullmatch(entry.name)
        (environment / "bin" / entry.name).symlink_to(base if is_interpreter else entry)
    lines = (copy / _CONFIGURATION).read_text().splitlines()
    kept = [line for line in lines if not _MADE_BY_HOST.match(line)]
    (environment / _CONFIGURATION).write_text("\n".join([f"home = {os.path.dirname(base)}", *kept, ""]))
