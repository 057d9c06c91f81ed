"""Shows in a notebook what the ranks of a gang print, while they do, and who is still running."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jaxrun
from jaxrun.gang.call import GangCall, Printed
from jaxrun.notebook import errors
from jaxrun.notebook.transcript import Page, Transcript, format_progress
from jaxrun.text import format_ranks, format_seconds, plural

_REFRESH_INTERVAL_S = 0.25  # seconds at least between two changes of what is shown
_LAUNCHER_DIR = str(Path(jaxrun.__file__).parent) + os.sep
_PROGRESS_DELAY_S = 2.0  # seconds until a call is worth a line of its own


def find_kernel_shell() -> Any:
    """IPython's, where this process is a notebook's kernel; else None. Does not import it."""
    ipython = sys.modules.get("IPython")
    found = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    return found if getattr(found, "kernel", None) is not None else None


class NotebookDisplay:
    """What one gang shows: each call has outputs of its own."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._begin()

    def _begin(self) -> None:
        self._transcript = Transcript()
        self._names: dict[Page, str] = {}
        self._below = self._transcript.pages[-1], ""
        self._started_at: float | None = None  # a call begins with its first wait
        self._shown_at = 0.0

    def show(self, printed: Printed) -> None:
        """A rank has printed something."""
        self._transcript.add(printed.rank, printed.stream, printed.data.decode(errors="replace"))

    def refresh(self, talk: GangCall) -> float:
        """Show what is due; returns the seconds after which there may be more to show."""
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = self._shown_at = now
        running = now - self._started_at
        if now - self._shown_at >= _REFRESH_INTERVAL_S:
            self._shown_at = now
            self._show(
                format_progress(tuple(talk.outcomes), talk.running, running) if running >= _PROGRESS_DELAY_S else ""
            )
        return (
            _REFRESH_INTERVAL_S
            if running >= _PROGRESS_DELAY_S
            else min(_REFRESH_INTERVAL_S, _PROGRESS_DELAY_S - running)
        )

    def end_call(self, talk: GangCall, error: BaseException | None, *, healthy: bool) -> None:
        """The call is over, by an `error` maybe: show the rest; after an interrupt, say what it has come to."""
        self._transcript.finish()
        left_out = self._transcript.omitted_lines
        below = f"{plural(left_out, 'more line')} not shown" if left_out else ""
        if self._started_at is not None and self._below[1] and not self._transcript.pages[-1].bundle()["text/plain"]:
            # The output that said who is running cannot be taken away again.
            below = (
                f"{plural(len(talk.outcomes), 'rank')} done in {format_seconds(time.monotonic() - self._started_at)}"
            )
        self._show(below)
        if isinstance(error, KeyboardInterrupt):
            publish(self._shell, {"text/plain": _interrupted(talk, healthy)})
        if error is not None:
            error._render_traceback_ = lambda: _frames_of_user(self._shell, error)  # type: ignore[attr-defined]
        self._begin()

    def _show(self, below: str) -> None:
        """Show the pages that have changed; `below` is the last line of the last one."""
        pages = dict.fromkeys(self._transcript.pop_changed())
        last = self._transcript.pages[-1]
        before, self._below = self._below, (last, below)
        if before != self._below:
            pages |= dict.fromkeys(page for page, line in (before, self._below) if line)
        for page in pages:
            shown_before = page in self._names
            name = self._names.setdefault(page, os.urandom(8).hex())
            publish(self._shell, page.bundle(below if page is last else ""), name, again=shown_before)


def publish(shell: Any, bundle: Mapping[str, str], name: str = "", *, again: bool = False) -> None:
    """Show `bundle` as an output of the cell that runs; what has a name may be shown `again`, in its place."""
    shell.display_pub.publish(dict(bundle), {}, transient={"display_id": name} if name else {}, update=again)


def _frames_of_user(shell: Any, error: BaseException) -> list[str]:
    """The traceback as IPython shows it, without our frames."""
    last, frame = None, error.__traceback__
    while frame is not None:
        ours = frame.tb_frame.f_code.co_filename.startswith(_LAUNCHER_DIR)
        if ours and isinstance(error, KeyboardInterrupt):
            break  # where in our waiting it has come says nothing
        last = last if ours else frame
        frame = frame.tb_next
    if last is not None:
        last.tb_next = None
    shown = shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
    return [errors.name_cells(part) for part in shown]


def _interrupted(talk: GangCall, healthy: bool) -> str:
    stuck = f"{format_ranks(talk.running)} could not be interrupted; " if talk.running else ""
    if healthy:
        return "jaxrun: interrupted; the gang goes on, its ranks know what they knew"
    return f"jaxrun: interrupted; {stuck}the gang is started anew when it is used next, and what its ranks knew is lost"
