"""Shows the output of a gang's ranks in a notebook, which ranks are still running, and their values and errors."""

from __future__ import annotations

import html
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from jaxrun.frontends.gang.call_events import Printed, ShownCall
from jaxrun.frontends.gang.gang_errors import RemoteFailure, group_failures
from jaxrun.frontends.gang.ipython import find_kernel_shell, publish
from jaxrun.text import format_ranges, format_ranks, plural

MimeBundle = dict[str, str]  # a display: content by MIME type

_MAX_LINES = 5_000  # per call
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_REFRESH_INTERVAL_S = 0.25  # at least, between two changes of what is shown
_MAX_CHARS_PER_S = 400_000  # of output that is shown repeatedly; Jupyter drops more than a megabyte a second
_PROGRESS_DELAY_S = 2.0  # after which a call has a line that says which ranks run
_LAUNCHER_DIR = str(Path(__file__).parents[2]) + os.sep
_CELL = re.compile(r'^( *)File "(In\[\d+\])", line', re.MULTILINE)


class NotebookDisplay:
    """The output of one gang in a notebook. Each call has an output of its own."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._begin()

    def _begin(self) -> None:
        self._transcript = Transcript()
        self._name = ""  # the name of the output, once it is shown
        self._shown: MimeBundle = {"text/plain": ""}
        self._started_at: float | None = None  # the time of the call's first refresh
        self._shown_at = 0.0

    def show(self, printed: Printed) -> None:
        """Add output of a rank; `refresh` shows it."""
        self._transcript.add(printed.rank, printed.stream, printed.data.decode(errors="replace"))

    def refresh(self, call: ShownCall) -> float:
        """Show changes. Returns the seconds until the next refresh."""
        now = time.monotonic()
        if self._started_at is None:
            self._started_at = self._shown_at = now
            self._transcript.main_rank = call.main_rank
        running = now - self._started_at
        late = running >= _PROGRESS_DELAY_S
        interval = max(_REFRESH_INTERVAL_S, sum(map(len, self._shown.values())) / _MAX_CHARS_PER_S)
        if now - self._shown_at >= interval:
            self._shown_at = now
            self._show(format_progress(tuple(call.returned), call.running, running) if late else "")
        return interval if late else min(interval, _PROGRESS_DELAY_S - running)

    def end_call(self, call: ShownCall, error: BaseException | None, *, healthy: bool) -> None:
        """Show the rest of a call that has ended, perhaps by an `error`; after an interrupt, its consequences."""
        self._transcript.finish()
        omitted = self._transcript.omitted_lines
        last_line = f"{plural(omitted, 'more line')} not shown" if omitted else ""
        self._show(last_line)
        if isinstance(error, KeyboardInterrupt):
            publish(self._shell, {"text/plain": _describe_interrupt(call, healthy)})
        if error is not None:
            show_user_frames(self._shell, error)
        self._begin()

    def _show(self, last_line: str) -> None:
        """Show changes; `last_line` is below them."""
        bundle = self._transcript.bundle(last_line)
        if bundle != self._shown:
            again = bool(self._name)
            self._name = self._name or os.urandom(8).hex()
            self._shown = bundle
            publish(self._shell, bundle, self._name, again=again)


def find_display() -> NotebookDisplay | None:
    """Return a display for a gang of a notebook's kernel; None if this process is not a kernel."""
    shell = find_kernel_shell()
    return NotebookDisplay(shell) if shell is not None else None


def show_user_frames(shell: Any, error: BaseException) -> None:
    """Have IPython show an error without jaxrun's frames."""
    error._render_traceback_ = lambda: _user_traceback(shell, error)  # type: ignore[attr-defined]


def _describe_interrupt(call: ShownCall, healthy: bool) -> str:
    stuck = f"{format_ranks(call.running)} could not be interrupted; " if call.running else ""
    if healthy:
        return "jaxrun: interrupted; the gang continues, and its ranks keep their state"
    return f"jaxrun: interrupted; {stuck}the gang starts again at its next use, and its ranks' state is lost"


# ---- the ranks' output, and the values of a cell


class _Line(Struct, eq=False):
    text: str
    ranks: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"[{format_ranges(self.ranks)}] {self.text}"


class Transcript:
    """The ranks' output during one call: the lines of the main rank and, folded below, lines that only others print.

    A line that several ranks print appears once with all their ranks, matched by text and count, in any order:

        [0-3] loss 0.3
        [0] saved
        ▸ ranks 1-3 printed 3 other lines

    main_rank:      0 unless a cell leaves it out; to be set before there are any lines
    omitted_lines:  number of lines beyond the limit
    """

    def __init__(self) -> None:
        self.main_rank = 0
        self.omitted_lines = 0
        self._lines: list[_Line] = []
        self._others: dict[_Line, None] = {}  # not printed by the main rank, so far
        self._unfinished: dict[tuple[int, str], str] = {}
        self._lines_by_text: dict[str, list[_Line]] = {}
        self._printed: Counter[tuple[int, str]] = Counter()

    def add(self, rank: int, stream: str, text: str) -> None:
        """Add `text` that a rank has printed on a stream. An unfinished line is kept until its end arrives."""
        *whole, rest = (self._unfinished.pop((rank, stream), "") + text).split("\n")
        for line in whole:
            self._add_line(rank, _apply_carriage_returns(line))
        if rest:
            self._unfinished[rank, stream] = rest

    def finish(self) -> None:
        """Add the unfinished lines; the call has ended."""
        for rank, stream in tuple(self._unfinished):
            self.add(rank, stream, "\n")

    def bundle(self, below: str = "") -> MimeBundle:
        """All lines as a display; `below` is one more."""
        shown, last = [str(line) for line in self._lines], [below] if below else []
        if not self._others:
            return {"text/plain": "\n".join([*shown, *last])}
        ranks = {rank for line in self._others for rank in line.ranks}
        title = f"{format_ranks(ranks)} printed {plural(len(self._others), 'other line' if shown else 'line')}"
        more = fold(title, "\n".join(map(str, sorted(self._others, key=lambda line: min(line.ranks)))))
        above, under = (format_pre(lines) if lines else "" for lines in (shown, last))
        return {
            "text/plain": "\n".join([*shown, more["text/plain"], *last]),
            "text/html": above + more["text/html"] + under,
        }

    def _add_line(self, rank: int, text: str) -> None:
        same, before = self._lines_by_text.get(text, []), self._printed[rank, text]
        if before == len(same):
            if len(self._lines) + len(self._others) >= _MAX_LINES:
                self.omitted_lines += 1
                return
            same.append(_Line(text))
            self._lines_by_text[text] = same
        self._printed[rank, text] = before + 1
        line = same[before]
        line.ranks.add(rank)
        if rank == self.main_rank:
            self._others.pop(line, None)
            self._lines.append(line)
        elif self.main_rank not in line.ranks:
            self._others[line] = None


def format_progress(done: Sequence[int], missing: Sequence[int], seconds: float) -> str:
    """Write `ranks 0-2 done, rank 3 running, 12 s`, or `4 ranks running, 12 s`."""
    running = f"{format_ranks(missing)} running" if done else f"{plural(len(missing), 'rank')} running"
    before = f"{format_ranks(done)} done, " if done else ""
    return f"{before}{running}, {seconds:.0f} s"


def fold(title: str, text: str) -> MimeBundle:
    """Return a display that shows only its title until it is opened; as plain text, it shows everything."""
    inside = f"<details><summary>{html.escape(title)}</summary>{format_pre([text])}</details>"
    return {"text/plain": f"{title}:\n{text}", "text/html": inside}


def merge_by_rank(values: Mapping[int, MimeBundle]) -> MimeBundle:
    """Return the values of a cell as one display: the first rank's and, folded, differing values of others."""
    main = values[min(values)]
    differing: dict[str, list[int]] = {}
    for rank, bundle in sorted(values.items()):
        if bundle != main:
            differing.setdefault(bundle.get("text/plain", "None"), []).append(rank)
    if not differing:
        return main
    text = main.get("text/plain", "None")
    others = "\n".join(f"[{format_ranges(ranks)}] {shown}" for shown, ranks in differing.items())
    more = fold(f"other on {format_ranks(rank for ranks in differing.values() for rank in ranks)}", others)
    return {
        **main,
        "text/plain": f"{text}\n{more['text/plain']}",
        "text/html": main.get("text/html", format_pre([text])) + more["text/html"],
    }


def format_pre(lines: Iterable[str]) -> str:
    """Return lines as preformatted HTML, without colours."""
    return f"<pre>{html.escape(_ESCAPES.sub('', chr(10).join(lines)))}</pre>"


def _apply_carriage_returns(line: str) -> str:
    """Return the visible part of a line with carriage returns."""
    return next((part for part in reversed(line.split("\r")) if part), "")


# ---- errors of a cell


def format_failures(failures: Sequence[RemoteFailure], size: int, waiting: str = "") -> str:
    """Describe the earliest error, the others in a line each, and where other ranks wait. `size`: number of ranks."""
    first, *others = group_failures(failures)
    which = "all ranks" if len(first) == size > 1 else format_ranks(failure.rank for failure in first)
    same = " the same" if len(first) > 1 else ""
    traceback = first[0].traceback.rstrip() or first[0].headline  # a sys.exit has no traceback
    lines = [f"{which} raised{same}", _name_cells(traceback)]
    lines += [f"{format_ranks(failure.rank for failure in group)} raised {group[0].headline}" for group in others]
    return "\n".join([*lines, *filter(None, [waiting])])


def _name_cells(traceback: str) -> str:
    """Return the traceback with cells named as IPython names them."""
    return _CELL.sub(r"\1Cell \2, line", traceback)


def _user_traceback(shell: Any, error: BaseException) -> list[str]:
    """Return the traceback as IPython shows it, without jaxrun's frames."""
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
