"""Findings of a check of hosts, and sentences about several hosts at once."""

from __future__ import annotations

import enum
from collections.abc import Mapping

from msgspec import Struct


class Level(enum.StrEnum):
    """How bad a finding is: a job can run in spite of a warning."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


class Finding(Struct, frozen=True):
    """One line for people; `advice` says what to type or to change, and is empty if nothing is wrong."""

    level: Level
    text: str
    advice: str = ""


def ok(text: str) -> Finding:
    return Finding(Level.OK, text)


def warning(text: str, advice: str) -> Finding:
    return Finding(Level.WARNING, text, advice)


def failure(text: str, advice: str) -> Finding:
    return Finding(Level.FAILURE, text, advice)


def group_hosts(values: Mapping[str, str]) -> dict[str, str]:
    """Turn host → value into value → hosts ("h1, h3"), the most common value first."""
    groups: dict[str, list[str]] = {}
    for host, value in values.items():
        groups.setdefault(value, []).append(host)
    return {value: ", ".join(hosts) for value, hosts in sorted(groups.items(), key=lambda item: -len(item[1]))}


def describe_values(values: Mapping[str, str]) -> str:
    """Write host → value as "8 cores" if all hosts have the same, else as "8 cores on h1, h3; 4 cores on h2"."""
    groups = group_hosts(values)
    return next(iter(groups)) if len(groups) == 1 else "; ".join(f"{text} on {where}" for text, where in groups.items())
