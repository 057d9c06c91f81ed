"""The screen of `jaxrun top`: a heading, the rows, and the keys. Colours only repeat what the text says."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from jaxrun.frontends.top.layout import Line, lay_out, shorten
from jaxrun.frontends.top.rates import BARS, PLAIN_BARS, format_pace, sparkline
from jaxrun.frontends.top.rows import Order, make_table
from jaxrun.frontends.top.samples import FAILED, LATE, LIKE_OTHERS, SLOW, STOPPED, RankSample
from jaxrun.terminal import TerminalFormat
from jaxrun.text import format_seconds, plural

_STYLES = {SLOW: "yellow", LATE: "yellow", STOPPED: "bold red", FAILED: "bold red"}
_PACE_WIDTH = 16
_NOTE_LINES = 3
_ALL_ROWS = 64  # that are printed where there is no screen to fill
_KEYS = "s stacks   o order: {order}   q quit"


@dataclass(frozen=True, slots=True)
class View:
    """What is shown.

    name:     of the job; phase: "running"; attempt: its number; seconds: since the job began, None if not known
    pace:     calls per second at each time that it was looked at; pace_now: None where that is not known
    note:     one sentence that matters more than the rows; may be empty
    """

    name: str
    phase: str
    attempt: int
    seconds: float | None
    samples: tuple[RankSample, ...]
    pace: list[float]
    pace_now: float | None
    calls_per_step: int
    note: str = ""
    order: Order = Order.STANDING_OUT


LastLine = Callable[[int], str]
ScreenLine = tuple[tuple[str, str], ...]  # its parts, each with a style of rich
_EMPTY: ScreenLine = ()


def render(view: View, width: int, height: int | None, last_line: LastLine, *, plain: bool = False) -> list[ScreenLine]:
    """All lines of the screen; with `height` None as many as it takes, without the line of the keys.

    last_line:  returns what a rank wrote last
    plain:      the terminal shows nothing but ASCII
    """
    lines = [_title(view, width), _pace(view, width, PLAIN_BARS if plain else BARS), *_note(view, width), _EMPTY]
    room = _ALL_ROWS if height is None else max(1, height - len(lines) - 2)  # the titles, and the keys
    lines += _table(view, width, room, last_line) if view.samples else []
    if height is not None:
        lines = lines[: height - 1]
        lines += [_EMPTY] * (height - 1 - len(lines))
        lines.append(((shorten(_KEYS.format(order=view.order.value), width), "dim"),))
    return lines


def render_pages(text: str, width: int, height: int) -> list[ScreenLine]:
    """A text in the place of the screen, as far as it fits."""
    lines = TerminalFormat(width).rewrap(text.expandtabs()).splitlines()
    room = height - 1
    if len(lines) > room:
        more = len(lines) - room + 1
        lines = [*lines[: room - 1], f"… {plural(more, 'more line')}: jaxrun stacks"]
    shown: list[ScreenLine] = [((shorten(line, width), ""),) for line in lines]
    return [*shown, *[_EMPTY] * (room - len(lines)), ((shorten("any key goes back", width), "dim"),)]


def _title(view: View, width: int) -> ScreenLine:
    time = format_seconds(view.seconds) if view.seconds is not None else ""
    state = " ".join(filter(None, [view.phase, time]))
    rest = f"  attempt {view.attempt}, {state}"
    return (shorten(f"jaxrun top  {view.name}", width - len(rest)), "bold"), (rest, "")


def _pace(view: View, width: int, bars: str) -> ScreenLine:
    hosts = len({sample.host for sample in view.samples})
    ranks = plural(len(view.samples), "rank") if view.samples else ""
    ranks += f" on {hosts} hosts" if hosts > 1 else ""
    pace = format_pace(view.pace_now, view.calls_per_step).ljust(_PACE_WIDTH)
    room = width - len(pace) - len(ranks) - 3
    line = sparkline(view.pace, room, bars) if len(view.pace) > 1 else ""
    return (f"{pace} ", ""), (line, "cyan"), (" " * (room - len(line) + 2) + ranks, "")


def _note(view: View, width: int) -> list[ScreenLine]:
    if not view.note:
        return []
    lines = textwrap.wrap(view.note, width, max_lines=_NOTE_LINES, placeholder=" …")
    return [((shorten(line, width), "yellow"),) for line in lines]


def _table(view: View, width: int, room: int, last_line: LastLine) -> list[ScreenLine]:
    """The titles and rows in at most `room` lines besides the titles."""
    most = room
    while True:
        table = make_table(view.samples, most, view.order)
        quotes = {row.speaker: last_line(row.speaker) for row in table.rows}
        lines = lay_out(table.rows, width, quotes)
        used = len(lines) - 1 + (table.left_out > 0)
        if used <= room or most <= 1:
            break
        most = max(1, min(most - 1, most * room // used))
    shown = [_line(line) for line in lines]
    if table.left_out:
        shown.append(((f"  … {plural(table.left_out, 'more row')}", "dim"),))
    return shown


def _line(line: Line) -> ScreenLine:
    if line.row is None:
        return ((line.text, "bold"),)
    if line.is_quote:
        return ((line.text, "dim"),)
    return ((line.text, "" if line.row.standing_out == LIKE_OTHERS else _STYLES[line.row.standing_out]),)
