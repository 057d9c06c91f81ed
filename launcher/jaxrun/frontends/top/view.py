"""The screen of `jaxrun top`: a heading, the rows, and the keys. Colours only repeat what the text says. No I/O."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Sequence

from msgspec import Struct
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxrun.analysis.diagnosis.doing import StandingOut
from jaxrun.analysis.diagnosis.overview import HostMemoryUse
from jaxrun.frontends.top.rows import Row, group_samples
from jaxrun.frontends.top.samples import RankSample
from jaxrun.protocol.flight import ToldStep
from jaxrun.terminal import TerminalFormat
from jaxrun.text import format_seconds, plural

_STYLES = {
    StandingOut.LIKE_OTHERS: "",
    StandingOut.SLOW: "yellow",
    StandingOut.LATE: "yellow",
    StandingOut.STOPPED: "bold red",
    StandingOut.FAILED: "bold red",
}
_NOTE_LINES = 3
_ALL_ROWS = 64  # that are printed where there is no screen to fill
_KEYS = "s stacks   q quit"
_GAP = 2  # between columns
_UNKNOWN = "-"
_INDENT = " " * 6
_MIN_STATE = 20
_MIN_QUOTE = 18  # columns for the last line of a rank; else it stands below its row
_ANY_WIDTH = 1000
_SINCE_S = 1.0  # for how long a rank is in a state, until that is worth saying

LastLine = Callable[[int], str]


class Pace(Struct, frozen=True):
    """The cross-process calls of the median rank.

    rate:      calls per second; None if unknown
    per_step:  calls in a step; 0 if unknown
    made:      calls so far; None if unknown
    idle_s:    seconds since any rank has come to one; None before the first
    """

    rate: float | None = None
    per_step: int = 0
    made: float | None = None
    idle_s: float | None = None


class View(Struct, frozen=True):
    """The content of the screen.

    name:     of the job; phase: "running"; attempt: its number; seconds: since the job began, None if not known
    note:     one sentence that matters more than the rows; may be empty
    hosts:    the memory of each host
    told:     the steps that the program has told; None if none
    """

    name: str
    phase: str
    attempt: int
    seconds: float | None
    samples: tuple[RankSample, ...]
    pace: Pace = Pace()
    note: str = ""
    hosts: tuple[HostMemoryUse, ...] = ()
    told: ToldStep | None = None


def render(view: View, width: int, height: int | None, last_line: LastLine) -> list[Text]:
    """All lines of the screen; with `height` None as many as it takes, without the line of the keys.

    last_line:  returns what a rank wrote last
    """
    lines = [_title(view, width), _pace(view, width), *_note(view, width), Text()]
    room = _ALL_ROWS if height is None else max(1, height - len(lines) - 2)  # the titles, and the keys
    lines += _rows_that_fit(view, width, room, last_line) if view.samples else []
    if height is None:
        return lines
    return _fill(lines, height, _cut(_KEYS, width, "dim"))


def render_pages(text: str, width: int, height: int) -> list[Text]:
    """A text in the place of the screen, as far as it fits."""
    lines = TerminalFormat(width).rewrap(text.expandtabs()).splitlines()
    room = height - 1
    if len(lines) > room:
        more = len(lines) - room + 1
        lines = [*lines[: room - 1], f"… {plural(more, 'more line')}: jaxrun stacks"]
    return _fill([_cut(line, width) for line in lines], height, _cut("any key goes back", width, "dim"))


def _fill(lines: list[Text], height: int, last: Text) -> list[Text]:
    shown = lines[: height - 1]
    return [*shown, *[Text()] * (height - 1 - len(shown)), last]


def _cut(text: str, width: int, style: str = "") -> Text:
    """The text in at most `width` columns of a terminal, with `…` for what is left out."""
    shown = Text(text, style)
    shown.truncate(max(0, width), overflow="ellipsis")
    return shown


def _title(view: View, width: int) -> Text:
    time = format_seconds(view.seconds) if view.seconds is not None else ""
    state = " ".join(filter(None, [view.phase, time]))
    rest = f"  attempt {view.attempt}, {state}"
    return Text.assemble(_cut(f"jaxrun top  {view.name}", width - len(rest), "bold"), rest)


def _pace(view: View, width: int) -> Text:
    hosts = len({sample.host for sample in view.samples})
    ranks = plural(len(view.samples), "rank") if view.samples else ""
    ranks += f" on {hosts} hosts" if hosts > 1 else ""
    return _cut(f"{format_pace(view.pace)}  {ranks}".strip(), width)


def _note(view: View, width: int) -> list[Text]:
    lines = textwrap.wrap(view.note, width, max_lines=_NOTE_LINES, placeholder=" …")
    return [_cut(line, width, "yellow") for line in lines]


def format_pace(pace: Pace) -> str:
    """`12.3 steps/s`, `a step in 25 s`, `150 steps, none for 31.0 s`; by calls if it is unknown what a step is."""
    if pace.rate is None:
        return ""
    noun = "step" if pace.per_step else "call"
    rate = pace.rate / (pace.per_step or 1)
    if rate <= 0.0:
        made = int((pace.made or 0) // (pace.per_step or 1))
        since = f", none for {format_seconds(pace.idle_s)}" if pace.idle_s is not None else ""
        return f"{plural(made, noun)}{since}" if made else f"no {noun}s yet"
    if rate < 0.095:
        return f"a {noun} in {1 / rate:.0f} s"
    return f"{rate:.0f} {noun}s/s" if rate >= 99.5 else f"{rate:.3g} {noun}s/s"


# ---- the table


class _Column(Struct, frozen=True):
    """A column of the table; `most` is its largest width, which one that is wide always has."""

    title: str
    cell: Callable[[Row], str]
    is_figure: bool = False
    is_wide: bool = False
    most: int = 16


_RANK = _Column(
    "  RANK", lambda row: f"{' ' if row.summary.standing_out == StandingOut.LIKE_OTHERS else '!'} {row.ranks}", most=14
)
_HOST = _Column("HOST", lambda row: row.summary.host, most=12)
_STATE = _Column("STATE", lambda row: _state(row.summary), most=44)
_FIGURES = (
    _Column("CALL", lambda row: row.numbers or _UNKNOWN, is_figure=True),
    _Column("LAG", lambda row: _lag(row.summary), is_figure=True),
    _Column("CPU", lambda row: _percent(row.summary.cpu_percent), is_figure=True),
    _Column("MEM", lambda row: format_memory(row.summary.memory_bytes), is_figure=True),
)
_GPU_FIGURES = (
    _Column("GPU", lambda row: _percent(row.summary.gpu_percent), is_figure=True),
    _Column("GPUMEM", lambda row: format_memory(row.summary.gpu_bytes), is_figure=True),
)
_QUOTE = "LAST LINE"


def _rows_that_fit(view: View, width: int, room: int, last_line: LastLine) -> list[Text]:
    """The titles and rows in at most `room` lines besides the titles."""
    most = room
    while True:
        rows, left_out = group_samples(view.samples, most)
        lines = lay_out(rows, width, {row.summary.rank: last_line(row.summary.rank) for row in rows})
        used = len(lines) - 1 + (left_out > 0)
        if used <= room or most <= 1:
            break
        most = max(1, min(most - 1, most * room // used))
    return [*lines, Text(f"  … {plural(left_out, 'more row')}", "dim")] if left_out else lines


def lay_out(rows: Sequence[Row], width: int, last_lines: dict[int, str]) -> list[Text]:
    """The titles and the rows as lines of at most `width` columns; `last_lines` are by rank.

    Where little room is left for what the ranks wrote, it has lines of its own, below the rows.
    """
    columns = _columns(rows)
    needed = _measure(_make_table(rows, columns))
    least = needed - max(0, _measure(_make_table(rows, [_STATE])) - _MIN_STATE)
    has_room = least + _GAP + _MIN_QUOTE <= width
    if has_room:
        quote_width = max(_MIN_QUOTE, width - needed - _GAP)
        columns.append(
            _Column(_QUOTE, lambda row: last_lines.get(row.summary.rank, ""), most=quote_width, is_wide=True)
        )
    console = _console(max(width, least))  # of a screen that is too narrow the last columns are cut off
    lines = ["".join(part.text for part in line) for line in console.render_lines(_make_table(rows, columns))]
    shown = [_cut(lines[0].rstrip(), width, "bold")]
    for row, line in zip(rows, lines[1:], strict=True):
        shown.append(_cut(line.rstrip(), width, _STYLES[row.summary.standing_out]))
        if not has_room and (quote := last_lines.get(row.summary.rank)):
            shown.append(_cut(f"{_INDENT}{quote}", width, "dim"))
    return shown


def _make_table(rows: Sequence[Row], columns: Sequence[_Column]) -> Table:
    """Make the table; if there is too little room, the state column shrinks first."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for column in columns:
        table.add_column(
            column.title,
            justify="right" if column.is_figure else "left",
            min_width=column.most if column.is_wide else None,
            max_width=column.most,
            no_wrap=column.title != _STATE.title,
            overflow="ellipsis",
        )
    for row in rows:
        table.add_row(*(Text(column.cell(row), no_wrap=True, overflow="ellipsis") for column in columns))
    return table


def _measure(table: Table) -> int:
    """The columns of a terminal that it takes."""
    return _console(_ANY_WIDTH).measure(table).maximum


def _console(width: int) -> Console:
    return Console(width=width, file=io.StringIO())


def _columns(rows: Sequence[Row]) -> list[_Column]:
    """Return the columns, without those that are the same in all rows: the only host, GPUs if there are none."""
    hosts = len({row.summary.host for row in rows}) > 1 or any(" " in row.summary.host for row in rows)
    gpus = any(row.summary.gpu_percent is not None or row.summary.gpu_bytes is not None for row in rows)
    return [_RANK, *([_HOST] if hosts else []), _STATE, *_FIGURES, *(_GPU_FIGURES if gpus else ())]


def _state(sample: RankSample) -> str:
    """Write the state with its duration after the first word, because a long text is cut at its end."""
    if sample.since_s is None or sample.since_s < _SINCE_S:
        return sample.state
    verb, _, rest = sample.state.partition(" ")
    return f"{verb} {format_seconds(sample.since_s)} {rest}".rstrip()


def _lag(sample: RankSample) -> str:
    if sample.late_s is not None:
        return format_seconds(sample.late_s)
    return plural(sample.behind, "call") if sample.behind else ""


def _percent(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}%"


def format_memory(count: float | None) -> str:
    """`412M`, `1.2G`: 1024 of each make one of the next; `-` where it is not known."""
    if count is None:
        return _UNKNOWN
    for unit in "KMG":
        count /= 1024
        if count < 999.5:
            return f"{count:.1f}{unit}" if unit == "G" and count < 9.95 else f"{count:.0f}{unit}"
    return f"{count / 1024:.1f}T"
