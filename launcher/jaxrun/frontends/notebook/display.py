"""Shows in a notebook, while a gang works, what its ranks print and which of them still run; and their errors."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jaxrun
from jaxrun.frontends.gang.call import GangCall
from jaxrun.frontends.gang.call_events import Printed
from jaxrun.frontends.gang.exceptions import RemoteFailure, group_failures
from jaxrun.frontends.notebook.ipython import find_kernel_shell, publish
from jaxrun.frontends.notebook.transcript import MimeBundle, Transcript, fold, format_progress
from jaxrun.text import format_ranks, format_seconds, plural

_REFRESH_INTERVAL_S = 0.25  # at least, between two changes of what is shown
_MAX_CHARS_PER_S = 400_000  # of what is shown again and again; Jupyter drops more than a megabyte a second
_PROGRESS_DELAY_S = 2.0  # after which a call has a line that says which ranks run
_LAUNCHER_DIR = str(Path(jaxrun.__file__).parent) + os.sep
_CELL = re.compile(r'^( *)File "(In\[\d+\])", line', re.MULTILINE)


class NotebookDisplay:
    """The output of one gang in a notebook. Each call has an output of its own."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._begin()

    def _begin(self) -> None:
        self._transcript = Transcript()
        self._name = ""  # of the output, once it is shown
        self._shown: MimeBundle = {"text/plain": ""}
        self._started_at: float | None = None  # the time of the call's first refresh
        self._shown_at = 0.0

    def show(self, printed: Printed) -> None:
        """Add what a rank has printed; `refresh` shows it."""
        self._transcript.add(printed.rank, printed.stream, printed.data.decode(errors="replace"))

    def refresh(self, call: GangCall) -> float:
        """Show what has changed. Returns the seconds until the next refresh."""
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = self._shown_at = now
            self._transcript.main_rank = call.main_rank
        running = now - self._started_at
        late = running >= _PROGRESS_DELAY_S
        interval = max(_REFRESH_INTERVAL_S, sum(map(len, self._shown.values())) / _MAX_CHARS_PER_S)
        if now - self._shown_at >= interval:
            self._shown_at = now
            self._show(format_progress(tuple(call.outcomes), call.running, running) if late else "")
        return interval if late else min(interval, _PROGRESS_DELAY_S - running)

    def end_call(self, call: GangCall, error: BaseException | None, *, healthy: bool) -> None:
        """Show the rest of a call that has ended, perhaps by an `error`; after an interrupt, its consequences."""
        self._transcript.finish()
        omitted = self._transcript.omitted_lines
        last_line = f"{plural(omitted, 'more line')} not shown" if omitted else ""
        only_progress = self._name and not self._transcript.bundle()["text/plain"]
        if only_progress and self._started_at is not None:  # an output can be replaced, but not removed
            took = format_seconds(time.monotonic() - self._started_at)
            last_line = f"{plural(len(call.outcomes), 'rank')} done in {took}"
        self._show(last_line)
        if isinstance(error, KeyboardInterrupt):
            publish(self._shell, {"text/plain": _describe_interrupt(call, healthy)})
        if error is not None:
            error._render_traceback_ = lambda: _user_traceback(self._shell, error)  # type: ignore[attr-defined]
        self._begin()

    def _show(self, last_line: str) -> None:
        """Show what has changed; `last_line` is below it."""
        bundle = self._transcript.bundle(last_line)
        if bundle != self._shown:
            again = bool(self._name)
            self._name = self._name or os.urandom(8).hex()
            self._shown = bundle
            publish(self._shell, bundle, self._name, again=again)


def find_display() -> NotebookDisplay | None:
    """A display for a gang of a notebook's kernel; None where this process is none."""
    shell = find_kernel_shell()
    return NotebookDisplay(shell) if shell is not None else None


def _describe_interrupt(call: GangCall, healthy: bool) -> str:
    stuck = f"{format_ranks(call.running)} could not be interrupted; " if call.running else ""
    if healthy:
        return "jaxrun: interrupted; the gang goes on, its ranks know what they knew"
    return f"jaxrun: interrupted; {stuck}the gang starts again when you next use it, and what its ranks knew is lost"


# ---- errors of a cell


def format_main_error(failures: Sequence[RemoteFailure], size: int, waiting: str = "") -> str:
    """The error that was raised first, with its ranks, and below where others wait. `size`: number of ranks."""
    first, *others = group_failures(failures)
    which = "all ranks" if len(first) == size > 1 else format_ranks(failure.rank for failure in first)
    same = " the same" if len(first) > 1 else ""
    other_ranks = [failure.rank for group in others for failure in group]
    folded = f"; other errors of {format_ranks(other_ranks)} are folded above" if others else ""
    return "\n".join([f"{which} raised{same}{folded}", _traceback(first[0]), *filter(None, [waiting])])


def fold_other_errors(failures: Sequence[RemoteFailure]) -> list[MimeBundle]:
    """All errors but the one that was raised first, each folded."""
    return [
        fold(f"{format_ranks(failure.rank for failure in group)} raised {_headline(group[0])}", _traceback(group[0]))
        for group in group_failures(failures)[1:]
    ]


def _traceback(failure: RemoteFailure) -> str:
    return _name_cells(failure.traceback.rstrip() or _headline(failure))  # a sys.exit has no traceback


def _headline(failure: RemoteFailure) -> str:
    first = failure.message.partition("\n")[0]
    return f"{failure.error}: {first}" if first else failure.error


def _name_cells(traceback: str) -> str:
    """The traceback with cells named as IPython names them."""
    return _CELL.sub(r"\1Cell \2, line", traceback)


def _user_traceback(shell: Any, error: BaseException) -> list[str]:
    """The traceback as IPython shows it, without jaxrun's frames."""
    last, frame = None, error.__traceback__
    while frame is not None:
        ours = frame.tb_frame.f_code.co_filename.startswith(_LAUNCHER_DIR)
        if ours and isinstance(error, KeyboardInterrupt):
            break  # the frames from here on only show that jaxrun was waiting
        last = last if ours else frame
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None
    shown = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
    return [_name_cells(part) for part in shown]
