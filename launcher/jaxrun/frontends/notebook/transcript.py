"""The output of a gang's ranks as displays of a notebook. No I/O, no clock."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxrun.text import format_ranges, format_ranks, plural

MimeBundle = dict[str, str]  # a display: content by MIME type

_MAX_LINES = 5_000  # of one call
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


@dataclass(eq=False, slots=True)
class _Line:
    text: str
    ranks: set[int] = field(default_factory=set)

    def __str__(self) -> str:
        return f"[{format_ranges(self.ranks)}] {self.text}"


class Transcript:
    """What the ranks print during one call: the lines of the main rank, and folded below, those that it does not print.

    A line that several ranks print is one line with all their ranks, matched by text and count, whichever is ahead:

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
