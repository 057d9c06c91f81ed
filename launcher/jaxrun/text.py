"""Ranks, numbers, signals and tables as text: one writer and one parser for all, in the launcher and in the workers."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from jaxrun.errors import UsageError

Ranks = tuple[range, ...]
V = TypeVar("V", bound=Hashable)
_PLURALS = {
    **{"is": "are", "has": "have", "was": "were", "waits": "wait", "sleeps": "sleep", "goes": "go"},
    "stays": "stay",
    **{"it": "they", "its": "their", "does": "do", "grows": "grow"},
}
_MAX_SECONDS = 1e9
_MAX_LINE_CHARS = 2000
_SECONDS_OF_UNIT = {"ms": 0.001, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
UNKNOWN_HOST = "?"  # the host of a rank whose agent has not reported yet


def format_ranges(ranks: Iterable[int], separator: str = ", ") -> str:
    """Write `[0, 1, 2, 5]` as `0-2, 5`."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return separator.join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def format_ranks(ranks: Iterable[int]) -> str:
    """Write `[3]` as `rank 3` and `[0, 1, 2, 5]` as `ranks 0-2, 5`."""
    known = set(ranks)
    return f"rank{'s' if len(known) != 1 else ''} {format_ranges(known)}"


def format_ranks_on_hosts(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Write `[5]` as `rank 5 (h3)`, or as `rank 5` where the whole job is on one host."""
    known = sorted(set(ranks))
    if not has_several_hosts(hosts):
        return format_ranks(known)
    names = ", ".join(dict.fromkeys(hosts[rank] for rank in known if hosts[rank] != UNKNOWN_HOST))
    return f"{format_ranks(known)} ({names})" if names else format_ranks(known)


def format_rank(rank: int, hosts: Mapping[int, str]) -> str:
    """Write 5 as `rank 5 of 8 on h3`, without the host where the whole job is on one; `hosts` has every rank."""
    where = f" on {hosts[rank]}" if has_several_hosts(hosts) else ""
    return f"rank {rank} of {len(hosts)}{where}"


def group_alike(values: Mapping[int, V]) -> list[tuple[V, tuple[int, ...]]]:
    """Return each value with the ranks that have it, the largest group first."""
    ranks: dict[V, list[int]] = {}
    for rank in sorted(values):
        ranks.setdefault(values[rank], []).append(rank)
    return sorted(
        ((value, tuple(alike)) for value, alike in ranks.items()), key=lambda group: (-len(group[1]), group[1])
    )


def agree(predicate: str, count: int) -> str:
    """Write `waits for its end` for one, and `wait for their end` for several."""
    return predicate if count == 1 else " ".join(_PLURALS.get(word, word) for word in predicate.split(" "))


def has_several_hosts(hosts: Mapping[int, str]) -> bool:
    """Whether the job has more than one host, so that a rank's host is worth saying."""
    return len(set(hosts.values())) > 1


def parse_ranks(text: str, option: str) -> Ranks:
    """Parse `3` or `1-3,7`. Raises UsageError that names `option` and the part that is wrong."""
    ranks = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if match is None:
            raise UsageError(f"{option} takes ranks such as 1-3,7; {part!r} in {text!r} is not a rank")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(f"{option} {text!r}: {part.strip()} runs backwards; write {last}-{first}")
        ranks.append(range(first, last + 1))
    return tuple(ranks)


def format_seconds(value: float) -> str:
    """Write 0.0312 as `0.03 s`, 41.31 as `41.3 s`, 3725 as `1 h 2 min`."""
    value = min(max(0.0, value), _MAX_SECONDS)  # of what a rank has written, it may be infinite
    if value < 0.995:
        return f"{value:.2f} s"
    if value < 119.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_sizes(sizes: Iterable[tuple[int, float]], *, is_over: bool = True) -> str:
    """Write `size: 3 hosts 2 min 10 s, 2 hosts 14 min 0 s, 3 hosts since`; empty if the number was always the same.

    The last size has a time, too, if all is over.
    """
    merged: list[tuple[int, float]] = []
    for hosts, seconds in sizes:
        before = merged.pop()[1] if merged and merged[-1][0] == hosts else 0.0
        merged.append((hosts, before + seconds))
    texts = [f"{plural(hosts, 'host')} {format_seconds(seconds)}" for hosts, seconds in merged]
    if not is_over and texts:
        texts[-1] = f"{plural(merged[-1][0], 'host')} since"
    return f"size: {', '.join(texts)}" if len(texts) > 1 else ""


def parse_seconds(text: str) -> float | None:
    """Parse 90, 1.5, 90s, 5m or 1h30m as seconds; None if it is no time. A sign, inf and nan are numbers, too."""
    with contextlib.suppress(ValueError):
        return float(text)
    parts = re.findall(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*(ms|min|s|m|h|d)\s*", text)
    if not parts or "".join(number + unit for number, unit in parts) != re.sub(r"\s", "", text):
        return None
    return sum(float(number) * _SECONDS_OF_UNIT[unit] for number, unit in parts)


def format_signal(number: int) -> str:
    """Write 9 as `SIGKILL (9)`."""
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(number).name} ({number})"
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN} ({number})"
    return f"signal {number}"


def format_status(status: int, auxiliary: str = "") -> str:
    """Write -9 as `killed by SIGKILL (9)`, after the auxiliary verb "was " if given, 3 as `exited with status 3`."""
    if status >= 0:
        return f"exited with status {status}"
    if -status in _CRASHES:
        return f"crashed with {format_signal(-status)}"
    return f"{auxiliary}{'aborted' if -status == signal.SIGABRT else 'killed'} by {format_signal(-status)}"


def format_user(uid: int) -> str:
    """Write 0 as `root`, and 4711 as `user 4711` where that has no name."""
    import pwd

    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return f"user {uid}"


def format_bytes(count: float) -> str:
    """Write 65712160768 as `61.2 GiB`."""
    *units, last = ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units:
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} {last}"


def format_rate(bytes_per_s: float) -> str:
    """Write 1940000000 as `1.94 GB/s`, as networks are measured."""
    for unit in ("B/s", "kB/s", "MB/s"):
        if bytes_per_s < 999.5:
            return f"{bytes_per_s:.3g} {unit}"
        bytes_per_s /= 1000
    return f"{bytes_per_s:.3g} GB/s"


def plural(count: int, noun: str) -> str:
    """Write `1 rank` or `8 ranks`, `2 processes`, `3 directories`."""
    if count == 1:
        return f"{count} {noun}"
    if noun.endswith("y"):
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def clip_lines(text: str) -> str:
    """Leave out the middle of lines that fill a screen, as one that quotes a value of megabytes."""
    half = _MAX_LINE_CHARS // 2
    lines = (line if len(line) <= _MAX_LINE_CHARS else f"{line[:half]} … {line[-half:]}" for line in text.split("\n"))
    return "\n".join(lines)


def format_columns(rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Lay rows of equal length out as lines whose columns are as wide as their widest cell, without trailing blanks."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(map(str.ljust, row, widths)).rstrip() for row in rows]
