"""How numbers, signals and places are written, everywhere alike; for ranks see ranks.py."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Mapping, Sequence


def format_seconds(value: float) -> str:
    """`0.0312` → `0.03 s`, `41.31` → `41.3 s`, `3725` → `1 h 2 min`."""
    value = max(0.0, value)
    if value < 0.995:
        return f"{value:.2f} s"
    if value < 119.95:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def format_signal(number: int) -> str:
    """`9` → `SIGKILL (9)`."""
    with contextlib.suppress(ValueError):
        return f"{signal.Signals(number).name} ({number})"
    if signal.SIGRTMIN < number < signal.SIGRTMAX:
        return f"SIGRTMIN+{number - signal.SIGRTMIN} ({number})"
    return f"signal {number}"


def plural(count: int, noun: str) -> str:
    """`1 rank`, `8 ranks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_columns(rows: Sequence[Sequence[str]], gap: str = "  ") -> list[str]:
    """Rows of equal length as lines, every column as wide as its widest cell, nothing blank at the end."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [gap.join(map(str.ljust, row, widths)).rstrip() for row in rows]


def has_several_hosts(hosts: Mapping[int, str]) -> bool:
    """Whether a rank's host says anything: where all are on one it does not."""
    return len(set(hosts.values())) > 1


def format_rank(rank: int, hosts: Mapping[int, str]) -> str:
    """`rank 5 of 8 on h3`; without the host where all are on one; `hosts` holds every rank of the job."""
    where = f" on {hosts[rank]}" if has_several_hosts(hosts) else ""
    return f"rank {rank} of {len(hosts)}{where}"
