"""The output of a gang's ranks as displays of a notebook. No I/O, no clock.

The lines of the main rank, which is 0 unless a cell leaves it out, are shown in pages. A line that several ranks print
is one line with all their ranks; lines that the main rank does not print are folded below. Lines are matched by text
and count, whichever rank is ahead:

    [0-3] loss 0.3
    [0] saved
    ▸ ranks 1-3 printed 3 other lines
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxrun.text import format_ranges, format_ranks, plural

MimeBundle = dict[str, str]  # a display: content by MIME type

PAGE_LINES = 200  # a page is shown again as a whole when one of its lines changes
_MAX_LINES = 5_000  # of one call
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


@dataclass(eq=False, slots=True)
class _Line:
    text: str
    page: Page
    ranks: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"[{format_ranges(self.ranks)}] {self.text}"


@dataclass(eq=False, slots=True)
class Page:
    """A part of the output: the main rank's `lines`, and the `others` that it has not printed (so far)."""

    lines: list[_Line] = field(default_factory=list)
    others: dict[_Line, None] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return len(self.lines) + len(self.others) >= PAGE_LINES

    def bundle(self, below: str = "") -> MimeBundle:
        """The page as a display; `below` is one more line."""
        shown = [str(line) for line in self.lines]
        if not self.others:
            return {"text/plain": "\n".join([*shown, *filter(None, [below])])}
        ranks = {rank for line in self.others for rank in line.ranks}
        count = len(self.others)
        title = f"{format_ranks(ranks)} printed {plural(count, 'other line' if self.lines else 'line')}"
        more = fold(title, "\n".join(map(str, sorted(self.others, key=lambda line: min(line.ranks)))))
        parts = [format_pre(shown)] if shown else []
        parts += [more["text/html"], *([format_pre([below])] if below else [])]
        return {
            "text/plain": "\n".join([*shown, more["text/plain"], *filter(None, [below])]),
            "text/html": "".join(parts),
        }


class Transcript:
    """The output of one call, in pages.

    main_rank:      whose lines are not folded; to be set before there are any
    omitted_lines:  number of lines beyond the limit
    """

    def __init__(self) -> None:
        self.main_rank = 0
        self.pages = [Page()]
        self.omitted_lines = 0
        self._changed: dict[Page, None] = {}
        self._unfinished: dict[tuple[int, str], str] = {}
        self._count = 0
        self._lines_by_text: dict[str, list[_Line]] = {}
        self._printed: Counter[tuple[int, str]] = Counter()

    def add(self, rank: int, stream: str, text: str) -> None:
        """Add `text` that a rank has printed on a stream. An unfinished line is kept until its end comes."""
        *whole, rest = (self._unfinished.pop((rank, stream), "") + text).split("\n")
        for line in whole:
            self._add_line(rank, _apply_carriage_returns(line))
        if rest:
            self._unfinished[rank, stream] = rest

    def finish(self) -> None:
        """Add the unfinished lines; the call has ended."""
        for rank, stream in tuple(self._unfinished):
            self.add(rank, stream, "\n")

    def pop_changed(self) -> list[Page]:
        """The pages that have changed since the last time this was called."""
        pages = list(self._changed)
        self._changed.clear()
        return pages

    def _add_line(self, rank: int, text: str) -> None:
        same, before = self._lines_by_text.get(text, []), self._printed[rank, text]
        if before == len(same):
            if self._count >= _MAX_LINES:
                self.omitted_lines += 1
                return
            self._count += 1
            if self.pages[-1].full:
                self.pages.append(Page())
            same.append(_Line(text, self.pages[-1]))
            self._lines_by_text[text] = same
        self._printed[rank, text] = before + 1
        line = same[before]
        line.ranks.add(rank)
        if rank == self.main_rank:
            line.page.others.pop(line, None)
            line.page.lines.append(line)
        elif self.main_rank not in line.ranks:
            line.page.others[line] = None
        self._changed[line.page] = None


def format_progress(done: Sequence[int], missing: Sequence[int], seconds: float) -> str:
    """`ranks 0-2 done, rank 3 running, 12 s`; `4 ranks running, 12 s`."""
    running = f"{format_ranks(missing)} running" if done else f"{plural(len(missing), 'rank')} running"
    before = f"{format_ranks(done)} done, " if done else ""
    return f"{before}{running}, {seconds:.0f} s"


def fold(title: str, text: str) -> MimeBundle:
    """A display that shows only its title until it is opened; as plain text, all of it."""
    inside = f"<details><summary>{html.escape(title)}</summary>{format_pre([text])}</details>"
    return {"text/plain": f"{title}:\n{text}", "text/html": inside}


def merge_by_rank(values: Mapping[int, MimeBundle]) -> MimeBundle:
    """The values of a cell as one display: the first rank's, and folded, the differing ones of others."""
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
    """Lines as preformatted HTML, without their colours."""
    return f"<pre>{html.escape(_ESCAPES.sub('', chr(10).join(lines)))}</pre>"


def _apply_carriage_returns(line: str) -> str:
    """What is left of a line in which carriage returns start anew."""
    return next((part for part in reversed(line.split("\r")) if part), "")
