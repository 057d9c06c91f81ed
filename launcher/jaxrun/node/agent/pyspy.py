"""Reads the C frames of workers by py-spy, where it is installed; its processes run while the agent goes on.

py-spy halts a process by ptrace while it reads: for a tenth of a second, or for a whole one where symbols of JAX's
library are needed. Of a process that a signal has stopped it reads no C frames.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S, Frame

_CONCURRENT_DUMPS = 4  # each takes up to a second of a core, and 100 MB
_MAX_NAME = 90  # characters of a C++ name
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"


@dataclass(frozen=True, slots=True)
class Target:
    """A process to read; `stopped`: by a signal."""

    rank: int
    pid: int
    stopped: bool = False


class NativeDump:
    """One dump of several processes. Times are seconds of any clock."""

    def __init__(self, targets: Iterable[Target], now: float, py_spy: str | None = None) -> None:
        """`py_spy`: the program; by default that of this Python or in PATH."""
        self.deadline = now + NATIVE_STACKS_TIMEOUT_S
        self.texts: dict[int, str] = {}
        self._to_do = list(targets)
        self._running: list[_PySpy] = []
        self._py_spy = py_spy or find_pyspy()
        self.poll(now)

    @property
    def done(self) -> bool:
        return not self._to_do and not self._running

    def poll(self, now: float) -> None:
        """Collect the dumps that are done and start further ones; at the deadline, give up those that are not done.

        To be called at the deadline, and when a child has ended.
        """
        if self._py_spy is None:
            self._give_up(f"  py-spy is not installed for {sys.executable}; install it: pip install py-spy")
        if now >= self.deadline:
            self._give_up(f"  py-spy has not answered in {NATIVE_STACKS_TIMEOUT_S:g} s")
        for process in [process for process in self._running if process.has_ended]:
            self._running.remove(process)
            self.texts[process.target.rank] = process.text()
        while self._to_do and len(self._running) < _CONCURRENT_DUMPS:
            assert self._py_spy is not None
            target = self._to_do.pop(0)
            try:
                self._running.append(_PySpy(self._py_spy, target))
            except OSError as error:
                self.texts[target.rank] = f"  {self._py_spy} could not be started: {error.strerror}"

    def close(self) -> None:
        self._give_up("")

    def _give_up(self, why: str) -> None:
        for process in self._running:
            process.kill()
        for target in (*self._to_do, *(process.target for process in self._running)):
            self.texts[target.rank] = why
        self._to_do.clear()
        self._running.clear()


class _PySpy:
    """A running py-spy. The agent may reap it, so its output says how it went, not its status."""

    def __init__(self, program: str, target: Target) -> None:
        self.target = target
        how = ["--nonblocking"] if target.stopped else ["--native"]
        self._out, self._err = (os.memfd_create(f"py-spy-{target.rank}") for _ in range(2))
        try:
            self._process = subprocess.Popen(
                [program, "dump", "--json", *how, "--pid", str(target.pid)],
                stdin=subprocess.DEVNULL,
                stdout=self._out,
                stderr=self._err,
            )
        except OSError:
            self._close()
            raise

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def text(self) -> str:
        """Return the frames that it wrote; to be called once."""
        try:
            return format_dump(_content(self._out), _content(self._err), self.target)
        finally:
            self._close()

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._process.kill()  # the kernel then resumes the process that it reads
        self._process.poll()
        self._close()

    def _close(self) -> None:
        os.close(self._out)
        os.close(self._err)


def find_pyspy() -> str | None:
    """Find py-spy beside this Python, whose virtual environment need not be active, or else in PATH."""
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")


def format_dump(out: str, err: str, target: Target) -> str:
    """Format py-spy's output like a traceback: innermost last, the main thread first; or say why there is none."""
    try:
        threads = json.loads(out)
        main = [thread for thread in threads if thread["os_thread_id"] == target.pid]
        others = [thread for thread in threads if thread not in main and any(map(_is_shown, _pythons(thread)))]
        lines = ["  (a stopped process is seen without C frames)"] if target.stopped else []
        for thread in main:
            lines += _lines(thread["frames"])
        for thread in others:
            lines += [f"  thread {thread['thread_name'] or thread['os_thread_id']}:", *_lines(thread["frames"])]
        return "\n".join(lines) or "  no frames"
    except (ValueError, KeyError, TypeError):
        return f"  {_why_not(err, target)}"


def _pythons(thread: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [frame for frame in thread["frames"] if not frame["module"]]


def _is_shown(frame: Mapping[str, Any]) -> bool:
    return not _frame(frame).is_scaffold


def _frame(frame: Mapping[str, Any]) -> Frame:
    return Frame(frame["filename"], frame["line"], frame["name"])


def _lines(frames: Sequence[Mapping[str, Any]]) -> list[str]:
    """The frames down to the program's outermost line; of frames without a name only the library is shown."""
    shown = [index for index, frame in enumerate(frames) if not frame["module"] and _is_shown(frame)]
    lines: list[str] = []
    for frame in frames[: shown[-1] + 1] if shown else frames:
        library = os.path.basename(frame["module"] or "")
        if frame["filename"] == "?":
            continue  # an address without symbol or file
        if not library:
            lines.append(f'  File "{frame["filename"]}", line {frame["line"]}, in {frame["name"]}')
        else:
            name = frame["name"] if not frame["name"].startswith("0x") else "?"
            line = f"    {name[:_MAX_NAME]}{'…' if len(name) > _MAX_NAME else ''}   {library}"
            lines += [line] if lines[-1:] != [line] else []
    return lines[::-1]


def _why_not(err: str, target: Target) -> str:
    if "Permission" in err or "not permitted" in err:
        scope = _restriction()
        how = f"sudo sysctl kernel.yama.ptrace_scope=0 allows it (it is {scope})" if scope else "ask as root"
        return f"py-spy may not look into process {target.pid}: {how}; in a container: --cap-add=SYS_PTRACE"
    lines = [line.strip() for line in err.partition("Stack backtrace")[0].splitlines() if line.strip()]
    said = [re.sub(r"^(?:Error|\d+): ", "", line) for line in lines[:1] + lines[-1:]]  # what failed, and its root
    return f"py-spy could not look into process {target.pid}: {': '.join(dict.fromkeys(said)) or 'it said nothing'}"


def _restriction() -> str:
    """The kernel's ptrace_scope, if it restricts who may trace whom; else empty."""
    with contextlib.suppress(OSError):
        with open(_YAMA) as file:
            return file.read().strip().strip("0")
    return ""


def _content(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
