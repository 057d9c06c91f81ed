"""The line for the login shell of a host, and the message for the interpreter that this line starts.

The line has nothing that a shell changes within single quotes: no `'`, `\\`, `!` and no line break. So it means the
same to sh, bash, zsh, fish and csh. It prints a mark, behind whatever the shell has printed, and runs the first line of
its standard input that is not empty. That line is the text of bootstrap.py; a length, so many bytes of JSON and, where
jaxrun is carried, its kit follow.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrun.node.ssh import bootstrap
from jaxrun.node.ssh.carried_sources import CarriedSources
from jaxrun.protocol.hidden_fields import HidesFields
from jaxrun.protocol.names import CARRIED_LOCK

_CODE = (
    "import os,sys;"
    "os.write(1,(chr(10)+sys.argv[1]+chr(32)+sys.version.split()[0]+chr(10)).encode());"
    "f=os.fdopen(0,sys.argv[2],0,None,None,None,False);"
    "exec(next(l for l in f if l.strip()))"
)
_ONE = "exec {python} -c '{code}' {mark} rb"
# Without a path, the first of several that is there.
_SEVERAL = 'exec /bin/sh -c \'for p in {pythons}; do if command -v $p >/dev/null; then exec $p -c "{code}" {mark} rb; '
_SEVERAL += "fi; done; echo none of {pythons} is there >&2; exit 127'"


class HostStart(HidesFields, frozen=True):
    """What is sent to a host.

    argv:       what to run; the words that are `python`, this interpreter's path, become the path of the one there
    version:    of jaxrun, which must be there unless it is carried
    env:        to add to the environment of the login
    carried:    jaxrun itself, if hosts need not have it
    stage_dir:  the value of --stage-dir, where it is kept
    directory_comes:  variables for the agent, if the directory may be missing because it comes to the host; else none
    """

    hidden = frozenset({"env"})

    argv: Sequence[str]
    python: str
    directory: str
    version: str
    env: Mapping[str, str]
    carried: CarriedSources | None = None
    stage_dir: str = ""
    directory_comes: Mapping[str, str] | None = None


def remote_command(pythons: Sequence[str], mark: str) -> str:
    """Return the line for the login shell; it runs the first interpreter that is there. Their paths need no quotes."""
    if len(pythons) == 1:
        return _ONE.format(python=pythons[0], code=_CODE, mark=mark)
    return _SEVERAL.format(pythons=" ".join(pythons), code=_CODE, mark=mark)


def start_message(mark: str, start: HostStart) -> bytes:
    """Return what is sent once the mark has come."""
    carried = start.carried
    message: dict[str, Any] = {
        "mark": mark,
        "argv": list(start.argv),
        "python": start.python,
        "directory": start.directory,
        "version": start.version,
        "env": dict(start.env),
        "directory_comes": dict(start.directory_comes or {}),
        "carried": {
            "name": carried.name,
            "machine": carried.machine,
            "stage_dir": start.stage_dir,
            "lock_variable": CARRIED_LOCK,
            "kit_bytes": len(carried.kit),
            "archive_bytes": len(carried.archive),
        }
        if carried is not None
        else None,
    }
    data = json.dumps(message).encode()
    return f"{_bootstrap_line()}\n{len(data)}\n".encode() + data + (carried.kit if carried is not None else b"")


@functools.cache
def _bootstrap_line() -> str:
    """The bootstrap as one line of Python, which has the opened standard input as `f`."""
    text = Path(bootstrap.__file__).read_text()
    return f"exec({text!r});main(f)"
