"""Imports modules in a process that has imported jax, as the fork server does, and prints as JSON what that changed.

    python look.py MODULE[,MODULE...] [FILE]

FILE is a program that uses them. It runs in a fork of this process, before and after the fork makes a backend.
Use it to examine a package before it gets a line in the table; jaxrun itself is not involved.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import process_state

_LIMIT_S = 100
_AUDITED = {
    "socket.__new__": "socket",
    "socket.connect": "connect",
    "subprocess.Popen": "process",
    "os.fork": "fork",
    "os.posix_spawn": "process",
    "os.system": "process",
    "tempfile.mkdtemp": "temporary directory",
    "tempfile.mkstemp": "temporary file",
    "os.mkdir": "mkdir",
    "os.chdir": "chdir",
    "os.kill": "kill",
    "ctypes.dlopen": "dlopen",
}


class Watch:
    """Records calls and reads by code of other modules, from `start` on: texts by kind, with the caller's module."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, None]] = {}
        self._active = False

    def start(self) -> None:
        self._wrap(os, "getpid", "process id")
        self._wrap(os, "urandom", "random bytes")
        self._wrap(socket, "gethostname", "host name")
        self._wrap(time, "time", "time")
        self._wrap(atexit, "register", "atexit")
        self._wrap(os, "register_at_fork", "register_at_fork")
        self._wrap(signal, "signal", "signal handler")
        self._wrap(threading.Thread, "start", "thread")
        environ: Any = type(os.environ)
        original = environ.__getitem__

        def get(mapping: Any, key: str) -> str:
            self._note("variables", str(key))
            return str(original(mapping, key))

        environ.__getitem__ = get
        sys.addaudithook(self._audit)
        self._active = True

    def stop(self) -> None:
        self._active = False

    def _wrap(self, owner: Any, name: str, kind: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            text = getattr(args[0], "__qualname__", "") if args and callable(args[0]) else ""
            self._note(kind, f"{text} by {sys._getframe(1).f_globals.get('__name__')}".strip())
            return original(*args, **kwargs)

        setattr(owner, name, call)

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event in _AUDITED:
            self._note(_AUDITED[event], repr(args)[:200])
        elif (
            event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+") and "pycache" not in repr(args)
        ):
            self._note("file written", repr(args[0])[:200])

    def _note(self, kind: str, text: str) -> None:
        if self._active:
            self.found.setdefault(kind, {})[text] = None


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is new and what is gone, for each part of the state that differs."""
    found = {}
    for part, old in before.items():
        new = after[part]
        if isinstance(old, dict) and isinstance(new, dict):
            old, new = ([f"{name}={value}" for name, value in one.items()] for one in (old, new))
        if isinstance(old, list) and isinstance(new, list):
            plus, minus = _less(new, old), _less(old, new)
            if plus or minus:
                found[part] = {"+": plus, "-": minus}
        elif old != new:
            found[part] = {"+": [new], "-": [old]}
    return found


def _less(these: list[Any], those: list[Any]) -> list[Any]:
    left = list(those)
    more = []
    for one in these:
        if one in left:
            left.remove(one)
        else:
            more.append(one)
    return more


def main(argv: list[str]) -> int:
    modules, program = argv[0].split(","), argv[1] if argv[1:] else ""
    import jax.numpy  # noqa: F401

    before = process_state.read_state()
    watch = Watch()
    watch.start()
    began = time.process_time()
    for name in modules:
        importlib.import_module(name)
    seconds = time.process_time() - began
    watch.stop()
    after = process_state.read_state()
    report: dict[str, Any] = {"modules": modules, "cpu seconds": round(seconds, 2), "calls": {}}
    new = set(after["sys.modules"]) - set(before["sys.modules"])
    report["imported"] = sorted({name.partition(".")[0] for name in new} - set(sys.stdlib_module_names))
    for state in (before, after):
        for part in ("sys.modules", "values"):
            del state[part]
    report["changes"] = changes(before, after)
    report["calls"] = {kind: list(texts) for kind, texts in watch.found.items()}
    if program:
        report["use"] = {"in a fork": use_in_fork(program)}
    print(json.dumps(report, indent=1))
    return 0


def use_in_fork(program: str) -> str:
    """Run the program in a fork of this process. Returns its status and output; empty if it ended with 0."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(_LIMIT_S)
        os.dup2(write, 1)
        os.dup2(write, 2)
        status = 1
        try:
            exec(compile(Path(program).read_text(), program, "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    os.close(write)
    with os.fdopen(read, errors="replace") as output:
        text = output.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"{status}: {text.strip()[-1500:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
