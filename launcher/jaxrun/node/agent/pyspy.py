"""Reads the C frames of workers with py-spy, if it is installed, while the agent continues.

py-spy halts a process by ptrace while it reads: for a tenth of a second, or for a whole one if symbols of JAX's
library are needed. It reads no C frames of a process that a signal has stopped, or that is in a process namespace.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrun.analysis.diagnosis.stacks import NATIVE_STACKS_TIMEOUT_S, Frame
from jaxrun.files.procfs import pid_in_namespace

_MAX_NAME = 90  # characters of a C++ name
_YAMA = "/proc/sys/kernel/yama/ptrace_scope"


class PySpy:
    """A dump of one process. The agent may reap py-spy, so the result is judged by its output, not its status."""

    def __init__(self, pid: int, now: float, *, stopped: bool = False, program: str | None = None) -> None:
        """`stopped`: by a signal; `program`: by default the one of this Python or in PATH; `now`: of any clock."""
        self.deadline = now + NATIVE_STACKS_TIMEOUT_S
        self._pid, self._inner_pid = pid, pid_in_namespace(pid)
        self._without_c = "a stopped process" if stopped else ""
        if not stopped and self._inner_pid != pid:  # py-spy would ask the kernel for the threads of the inner numbers
            self._without_c = "a process in a process namespace"
        self._trouble = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._out, self._err = (os.memfd_create(f"py-spy-{pid}") for _ in range(2))
        program = program or find_pyspy()
        if program is None:
            self._trouble = f"py-spy is not installed for {sys.executable}; install it: pip install py-spy"
            return
        how = ["--nonblocking"] if stopped else [] if self._without_c else ["--native"]
        command = [program, "dump", "--json", *how, "--pid", str(pid)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._err)
        except OSError as error:
            self._trouble = f"{program} could not be started: {error.strerror}"

    def has_ended(self, now: float) -> bool:
        """Whether there is a text; at the deadline, a py-spy that has not answered is abandoned."""
        if self._process is None or self._process.poll() is not None:
            return True
        if now >= self.deadline:
            self._trouble = f"py-spy has not answered in {NATIVE_STACKS_TIMEOUT_S:g} s"
        return now >= self.deadline

    def text(self) -> str:
        """Return the frames, or why there are none; to be called once."""
        dump = format_dump(_content(self._out), _content(self._err), self._inner_pid, without_c=self._without_c)
        self.close()
        return f"  {self._trouble}" if self._trouble else dump

    def close(self) -> None:
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._process.kill()  # the kernel then resumes the process that it reads
            self._process.poll()
        os.close(self._out)
        os.close(self._err)


def find_pyspy() -> str | None:
    """Find py-spy beside this Python, whose virtual environment need not be active, or else in PATH."""
    return shutil.which("py-spy", path=os.path.dirname(sys.executable)) or shutil.which("py-spy")


def format_dump(out: str, err: str, pid: int, *, without_c: str = "") -> str:
    """Format py-spy's output like a traceback: innermost last, the main thread first; or say why there is none.

    `pid` is what the process calls itself; `without_c`: what is seen without C frames.
    """
    try:
        threads = json.loads(out)
        main = [thread for thread in threads if thread["os_thread_id"] == pid]
        others = [thread for thread in threads if thread not in main and any(map(_is_shown, thread["frames"]))]
        lines = [f"  ({without_c} is seen without C frames)"] if without_c else []
        for thread in main:
            lines += _lines(thread["frames"])
        for thread in others:
            lines += [f"  thread {thread['thread_name'] or thread['os_thread_id']}:", *_lines(thread["frames"])]
        return "\n".join(lines) or "  no frames"
    except (ValueError, KeyError, TypeError):
        return f"  {_why_not(err, pid)}"


def _is_shown(frame: Mapping[str, Any]) -> bool:
    """Whether a frame is Python code, and neither jaxrun's nor part of what Python puts around programs and threads."""
    return not frame["module"] and not Frame(frame["filename"], frame["line"], frame["name"]).is_scaffold


def _lines(frames: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the frames down to the program's outermost line; for frames without a name, only the library is shown."""
    shown = [index for index, frame in enumerate(frames) if _is_shown(frame)]
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


def _why_not(err: str, pid: int) -> str:
    if "Permission" in err or "not permitted" in err:
        scope = ""
        with contextlib.suppress(OSError), open(_YAMA) as file:
            scope = file.read().strip().strip("0")
        how = f"sudo sysctl kernel.yama.ptrace_scope=0 allows it (it is {scope})" if scope else "ask as root"
        return f"py-spy may not look into process {pid}: {how}; in a container: --cap-add=SYS_PTRACE"
    lines = [line.strip() for line in err.partition("Stack backtrace")[0].splitlines() if line.strip()]
    said = [re.sub(r"^(?:Error|\d+): ", "", line) for line in lines[:1] + lines[-1:]]  # what failed, and its root
    return f"py-spy could not look into process {pid}: {': '.join(dict.fromkeys(said)) or 'it said nothing'}"


def _content(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
