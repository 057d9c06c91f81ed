"""Lays the rows of the screen out in columns, for a width. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxrun.frontends.top.rows import Row
from jaxrun.frontends.top.samples import LIKE_OTHERS
from jaxrun.text import plural

_GAP = "  "
_UNKNOWN = "-"
_MARK = "!"
_INDENT = "      "
_QUOTE = "LAST LINE"
_MAX_RANKS, _MAX_HOST, _MAX_STATE, _MIN_STATE = 12, 12, 44, 20
_MIN_LINE = 18  # columns for the last line of a rank; else it stands below its row
_MAX_SECONDS = 3.6e6
_SINCE_S = 1.0  # for how long a rank is in a state, until that is worth saying


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table; `most` is its largest width."""

    title: str
    cell: Callable[[Row], str]
    is_right: bool = False
    most: int = 16


_RANK = Column("RANK", lambda row: row.ranks, most=_MAX_RANKS)
_HOST = Column("HOST", lambda row: row.host, most=_MAX_HOST)
_STATE = Column("STATE", lambda row: _state(row), most=_MAX_STATE)
_FIGURES = (
    Column("CALL", lambda row: row.number or _UNKNOWN, is_right=True),
    Column("LAG", lambda row: _lag(row), is_right=True),
    Column("CPU", lambda row: _percent(row.cpu_percent), is_right=True),
    Column("MEM", lambda row: format_memory(row.memory_bytes), is_right=True),
)
_GPU_FIGURES = (
    Column("GPU", lambda row: _percent(row.gpu_percent), is_right=True),
    Column("GPUMEM", lambda row: format_memory(row.gpu_bytes), is_right=True),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table; `row` is None in that of the titles. `is_quote`: it is nothing but what a rank wrote."""

    text: str
    row: Row | None = None
    is_quote: bool = False


def lay_out(rows: Sequence[Row], width: int, last_lines: Mapping[int, str]) -> list[Line]:
    """The titles and the rows as lines of at most `width` columns; `last_lines` are by the rows' speakers.

    Where little room is left for what the ranks wrote, it has lines of its own, below the rows.
    """
    from rich.cells import cell_len

    columns = _columns(rows)
    cells = [[column.title for column in columns], *([column.cell(row) for column in columns] for row in rows)]
    widths = [max(map(cell_len, texts)) for texts in zip(*cells, strict=True)]
    widths = [min(column.most, needed) for column, needed in zip(columns, widths, strict=True)]
    spare = width - len(_MARK) - 1 - sum(widths) - len(_GAP) * (len(widths) - 1)
    state = columns.index(_STATE)
    can_give = max(0, widths[state] - _MIN_STATE)
    wanted = _MIN_LINE + len(_GAP)
    is_double = spare + can_give < wanted
    given = min(can_give, max(0, -spare if is_double else wanted - spare))
    widths[state] -= given
    quote_width = width - len(_INDENT) if is_double else spare + given - len(_GAP)
    lines = _lines(rows, columns, cells, widths, quote_width, last_lines, is_double=is_double)
    return [replace(line, text=shorten(line.text, width)) for line in lines]


def _lines(
    rows: Sequence[Row],
    columns: Sequence[Column],
    cells: Sequence[Sequence[str]],
    widths: Sequence[int],
    quote_width: int,
    last_lines: Mapping[int, str],
    *,
    is_double: bool,
) -> Iterator[Line]:
    titles = _join(" ", columns, cells[0], widths)
    yield Line(titles if is_double else f"{titles}{_GAP}{_QUOTE}")
    for row, texts in zip(rows, cells[1:], strict=True):
        line = _join(_MARK if row.standing_out > LIKE_OTHERS else " ", columns, texts, widths)
        quote = shorten(last_lines.get(row.speaker, ""), quote_width)
        if not is_double:
            yield Line(f"{line}{_GAP}{quote}".rstrip(), row)
            continue
        yield Line(line.rstrip(), row)
        if quote:
            yield Line(f"{_INDENT}{quote}", row, is_quote=True)


def shorten(text: str, width: int) -> str:
    """The text in at most `width` columns of a terminal, with `…` for what is left out."""
    from rich.cells import cell_len, set_cell_size

    return text if cell_len(text) <= width else f"{set_cell_size(text, max(0, width - 1)).rstrip()}…"


def _join(mark: str, columns: Sequence[Column], texts: Sequence[str], widths: Sequence[int]) -> str:
    from rich.cells import cell_len

    parts = []
    for column, text, width in zip(columns, texts, widths, strict=True):
        shown = shorten(text, width)
        blanks = " " * (width - cell_len(shown))
        parts.append(blanks + shown if column.is_right else shown + blanks)
    return f"{mark} {_GAP.join(parts)}"


def _columns(rows: Sequence[Row]) -> list[Column]:
    """Without those that would say the same of all rows: the only host, GPUs where there are none."""
    hosts = len({row.host for row in rows}) > 1 or any(" " in row.host for row in rows)
    gpus = any(row.gpu_percent is not None or row.gpu_bytes is not None for row in rows)
    return [_RANK, *([_HOST] if hosts else []), _STATE, *_FIGURES, *(_GPU_FIGURES if gpus else ())]


def _state(row: Row) -> str:
    """With the time that it takes after the first word, as what is too long is cut at its end."""
    if row.since_s is None or row.since_s < _SINCE_S:
        return row.state
    verb, _, rest = row.state.partition(" ")
    return f"{verb} {format_seconds_briefly(row.since_s)} {rest}".rstrip()


def _lag(row: Row) -> str:
    if row.late_s is not None:
        return format_seconds_briefly(row.late_s)
    return plural(row.behind, "call") if row.behind else ""


def format_seconds_briefly(seconds: float) -> str:
    """`38 ms`, `12 s`, `3m07`, `2h05`: as short as it can be, for a cell of the table; text has `format_seconds`."""
    seconds = min(max(0.0, seconds), _MAX_SECONDS)  # of what a rank has written, it may be infinite
    if seconds < 0.995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{round(seconds) // 60}m{round(seconds) % 60:02}" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02}"


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
