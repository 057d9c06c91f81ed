"""The screen of `jaxrun top`: a heading, the rows, and the keys. Colours only repeat what the text says."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from jaxrun.terminal import TerminalFormat
from jaxrun.text import format_seconds, plural
from jaxrun.top.layout import Line, lay_out, shorten
from jaxrun.top.rates import BARS, PLAIN_BARS, format_pace, sparkline
from jaxrun.top.rows import Order, make_table
from jaxrun.top.samples import FAILED, LATE, LIKE_OTHERS, SLOW, STOPPED, RankSample

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


def render(view: View, width: int, height: int | None, last_line: LastLine, *, plain: bool = False) -> Text:
    """All lines of the screen; with `height` None as many as it takes, without the line of the keys.

    last_line:  returns what a rank wrote last
    plain:      the terminal shows nothing but ASCII
    """
    lines = [_title(view, width), _pace(view, width, PLAIN_BARS if plain else BARS), *_note(view, width), Text()]
    room = _ALL_ROWS if height is None else max(1, height - len(lines) - 2)  # the titles, and the keys
    lines += _table(view, width, room, last_line) if view.samples else []
    if height is not None:
        lines = lines[: height - 1]
        lines += [Text()] * (height - 1 - len(lines))
        lines.append(Text(shorten(_KEYS.format(order=view.order.value), width), style="dim"))
    return Text("\n").join(lines)


def render_pages(text: str, width: int, height: int) -> Text:
    """A text in the place of the screen, as far as it fits."""
    lines = TerminalFormat(width).rewrap(text.expandtabs()).splitlines()
    room = height - 1
    if len(lines) > room:
        more = len(lines) - room + 1
        lines = [*lines[: room - 1], f"… {plural(more, 'more line')}: jaxrun stacks"]
    shown = [Text(shorten(line, width)) for line in lines] + [Text()] * (room - len(lines))
    return Text("\n").join([*shown, Text(shorten("any key goes back", width), style="dim")])


def _title(view: View, width: int) -> Text:
    time = format_seconds(view.seconds) if view.seconds is not None else ""
    state = " ".join(filter(None, [view.phase, time]))
    rest = f"  attempt {view.attempt}, {state}"
    return Text.assemble((shorten(f"jaxrun top  {view.name}", width - len(rest)), "bold"), rest)


def _pace(view: View, width: int, bars: str) -> Text:
    hosts = len({sample.host for sample in view.samples})
    ranks = plural(len(view.samples), "rank") if view.samples else ""
    ranks += f" on {hosts} hosts" if hosts > 1 else ""
    pace = format_pace(view.pace_now, view.calls_per_step).ljust(_PACE_WIDTH)
    room = width - len(pace) - len(ranks) - 3
    line = sparkline(view.pace, room, bars) if len(view.pace) > 1 else ""
    return Text.assemble(pace, " ", (line, "cyan"), " " * (room - len(line) + 2), ranks)


def _note(view: View, width: int) -> list[Text]:
    if not view.note:
        return []
    lines = textwrap.wrap(view.note, width, max_lines=_NOTE_LINES, placeholder=" …")
    return [Text(shorten(line, width), style="yellow") for line in lines]


def _table(view: View, width: int, room: int, last_line: LastLine) -> list[Text]:
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
        shown.append(Text(f"  … {plural(table.left_out, 'more row')}", style="dim"))
    return shown


def _line(line: Line) -> Text:
    if line.row is None:
        return Text(line.text, style="bold")
    if line.is_quote:
        return Text(line.text, style="dim")
    return Text(line.text, style="" if line.row.standing_out == LIKE_OTHERS else _STYLES[line.row.standing_out])
