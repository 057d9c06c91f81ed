"""Reads the answers of NCCL's own service (RAS), in all formats since NCCL 2.24, and finds the job's ranks in them.

As JSON (2.28.7 and later), the answer has everything that each rank knows; as text, only what NCCL finds notable.

NCCL counts launches on the hosts, so the counts of a healthy job differ from moment to moment. Only the differences
that two answers share count (`find_lasting`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.lazy_pattern import lazy_pattern
from jaxrun.protocol.nccl_report import (
    MAX_NAMED_RANKS,
    Communicator,
    LaunchCount,
    NcclGroup,
    NcclRank,
    NcclReport,
    OperationCounts,
)

NCCL_TIMEOUT_S = 4.0  # for both answers; the service waits for other hosts no longer than the request says
Version = tuple[int, int, int]
_HAS_SERVICE: Version = (2, 24, 3)
# In earlier versions the request can crash a rank: while a communicator is being made (nccl#1669, up to 2.26), or
# when a rank does not answer (nccl#1762, up to 2.28). Later versions have a crash too, but only if the answer is text
# (nccl#2346), so they are asked for JSON.
_IS_SAFE: Version = (2, 29, 2)
_PREAMBLE = lazy_pattern(r"(?:(?:SERVER PROTOCOL \d+|OK)\r?\n)*")
_UNKNOWN_PID = -1


def has_service(version: Version) -> bool:
    return version >= _HAS_SERVICE


def is_safe_to_ask(version: Version) -> bool:
    """Whether no known fault of NCCL can make this request crash a rank."""
    return version >= _IS_SAFE


def request_text(version: Version, wait_s: int) -> bytes:
    """Everything that a client sends: how long the service may wait for other hosts, the format, and the question."""
    how = "SET FORMAT json\nSTATUS\n" if is_safe_to_ask(version) else "VERBOSE STATUS\n"
    return f"CLIENT PROTOCOL 2\nTIMEOUT {wait_s}\n{how}".encode()


def parse_answer(answer: str) -> NcclReport | None:
    """Parse an answer, read up to end-of-file; None if it is incomplete or no answer at all."""
    body = answer[_PREAMBLE.match(answer).end() :].lstrip()  # type: ignore[union-attr]
    if body.startswith("{"):
        try:
            return _read_json(json.loads(body))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            return None
    return _read_text(body)


def find_lasting(first: NcclReport | None, second: NcclReport | None) -> NcclReport | None:
    """Return the second report, with only those differences that the first one has as well."""
    if first is None or second is None:
        return None
    return replace(second, differing=tuple(one for one in second.differing if one in first.differing))


class ProcessIdentity(Struct, frozen=True):
    """The pair by which NCCL identifies a rank: the process id within its own namespace, and the host's addresses."""

    pid: int
    addresses: tuple[str, ...] = ()


def locate_ranks(report: NcclReport, processes: Mapping[int, ProcessIdentity]) -> NcclReport:
    """Fill in which of the job's ranks each NCCL process is; `processes` are by rank."""

    def locate(one: NcclRank) -> NcclRank:
        there = [rank for rank, process in processes.items() if one.pid and process.pid == one.pid]
        exact = [rank for rank in there if one.node in processes[rank].addresses] or there
        return replace(one, rank=exact[0]) if len(exact) == 1 else one

    def group(ranks: NcclGroup) -> NcclGroup:
        return replace(ranks, named=tuple(map(locate, ranks.named)))

    def operation(counts: OperationCounts) -> OperationCounts:
        return replace(counts, counts=tuple(replace(one, ranks=group(one.ranks)) for one in counts.counts))

    differing = tuple(
        replace(
            one,
            missing=group(one.missing),
            left=group(one.left),
            operations=tuple(map(operation, one.operations)),
        )
        for one in report.differing
    )
    return replace(report, differing=differing)


def _group(ranks: Sequence[NcclRank]) -> NcclGroup:
    return NcclGroup(len(ranks), tuple(ranks) if len(ranks) <= MAX_NAMED_RANKS else ())


# ---- JSON


def _read_json(content: Any) -> NcclReport:
    found = [_read_communicator(one) for one in content["communicators"]]
    return NcclReport(
        version=str(content["nccl_version"]),
        communicators=sum(one.size > 0 for one in found),  # a communicator that is still being made may be empty
        differing=tuple(one for one in found if one.differs),
    )


def _read_communicator(one: Mapping[str, Any]) -> Communicator:
    absent = [(_read_rank(rank), bool(rank["status"]["unresponsive"])) for rank in one["missing_ranks"]]
    counted = [(_read_rank(rank), rank["collective_counts"]) for rank in one["ranks"]]
    kinds = dict.fromkeys(kind for _, counts in counted for kind in counts)
    operations = (_compare(kind, [(rank, int(counts.get(kind, 0))) for rank, counts in counted]) for kind in kinds)
    return Communicator(
        name=str(one["hash"]).removeprefix("0x"),
        size=int(one["size"]),
        missing=_group([rank for rank, is_silent in absent if is_silent]),
        left=_group([rank for rank, is_silent in absent if not is_silent]),
        operations=tuple(found for found in operations if len(found.counts) > 1),
    )


def _read_rank(one: Mapping[str, Any]) -> NcclRank:
    pid = int(one["pid"])
    known = pid != _UNKNOWN_PID
    return NcclRank(int(one["rank"]), str(one["host"]) if known else "", pid if known else 0)


def _compare(operation: str, counted: Iterable[tuple[NcclRank, int]]) -> OperationCounts:
    by_count: dict[int, list[NcclRank]] = {}
    for rank, count in counted:
        by_count.setdefault(count, []).append(rank)
    counts = (LaunchCount(count, _group(ranks)) for count, ranks in sorted(by_count.items(), reverse=True))
    return OperationCounts(operation, tuple(counts))


# ---- text

_VERSION = lazy_pattern(r"NCCL version (\d+\.\d+\.\d+)")
_ROW = lazy_pattern(r"^ +(\d+) +(\d+) +\d+ +\d+(?:-\d+)? +(\d+) +\d+ +[A-Z]+ +[A-Z,]+$")
_SECTION = lazy_pattern(r"^#(\d+)-\d+ \(([0-9a-f]+)\) (\w+)")
_PROCESS = r" -- (?:GPU .+? managed by process (?P<pid>\d+) on node (?P<node>\S+)|\[process information not found\])"
_LAUNCHED = r"(?:launched up to operation (?P<count>\d+)|not launched any operations)"
_LINES = {
    kind: lazy_pattern(pattern)
    for kind, pattern in {
        "missing": r"Missing communicator data from (?P<size>\d+) ranks?$",
        "missing numbers": r"The missing ranks?: (?P<numbers>\d+(?:, ?\d+)*)$",
        "operation": r"Communicator ranks have different (?P<operation>\w+)(?: \w+)? counts$",
        "launched": rf"(?P<size>\d+) ranks have {_LAUNCHED}$",
        "one launched": rf"Rank (?P<number>\d+) has {_LAUNCHED}{_PROCESS}",
        "left": r"(?P<size>\d+) ranks have status (?:NOCOMM|UNKNOWN)$",
        "one left": rf"Rank (?P<number>\d+) has status (?:NOCOMM|UNKNOWN)(?:{_PROCESS})?",
        "status": r"(?:\d+ ranks have|Rank \d+ has) status \w+",
        "rank": rf"Rank (?P<number>\d+){_PROCESS}",
    }.items()
}
_ALL_KINDS = "collective"  # what NCCL 2.24 and 2.25 print


class _Group(Struct):
    """A NcclGroup under construction, while the lines about it are read."""

    size: int = 0
    ranks: list[NcclRank] = field(default_factory=list)

    def freeze(self) -> NcclGroup:
        named = tuple(self.ranks) if len(self.ranks) <= MAX_NAMED_RANKS else ()
        return NcclGroup(max(self.size, len(self.ranks)), named)


class _Communicator(Struct):
    """A Communicator under construction; `current` is the group to which the next ranks belong."""

    name: str
    size: int
    missing: _Group = field(default_factory=_Group)
    left: _Group = field(default_factory=_Group)
    operations: dict[str, dict[int, _Group]] = field(default_factory=dict)
    operation: str = ""
    current: _Group = field(default_factory=_Group)

    def read_line(self, kind: str, found: Mapping[str, str | None]) -> None:
        size = int(found.get("size") or 0)
        match kind:
            case "missing":
                self.missing.size, self.current = size, self.missing
            case "missing numbers":
                self.missing.ranks += [NcclRank(int(number)) for number in (found["numbers"] or "").split(",")]
            case "operation":
                self.operation = found["operation"] or ""
                self.operations[self.operation] = {}
            case "launched" | "one launched":
                counts = self.operations.setdefault(self.operation, {})
                self.current = counts[int(found["count"] or 0)] = _Group(size)
            case "left" | "one left":
                self.left.size, self.current = size, self.left
            case "status":
                self.current = _Group()
        if found.get("number") is not None:
            self.current.ranks.append(
                NcclRank(int(found["number"] or 0), found.get("node") or "", int(found.get("pid") or 0))
            )

    def freeze(self) -> Communicator:
        def operation(name: str, counts: Mapping[int, _Group]) -> OperationCounts:
            groups = (LaunchCount(count, group.freeze()) for count, group in sorted(counts.items(), reverse=True))
            return OperationCounts("" if name == _ALL_KINDS else name, tuple(groups))

        operations = tuple(operation(name, counts) for name, counts in self.operations.items() if len(counts) > 1)
        return Communicator(self.name, self.size, self.missing.freeze(), self.left.freeze(), operations)


def _read_text(text: str) -> NcclReport | None:
    version = _VERSION.match(text)
    # "Warnings" is the last heading: without it the answer was cut off, and the missing part may be what matters.
    if version is None or not re.search(r"^Warnings\r?$", text, re.MULTILINE):
        return None
    rows = [found for line in text.splitlines() if (found := _ROW.match(line))]
    sizes = {found[1]: int(found[3]) for found in rows}
    communicators: dict[str, _Communicator] = {}
    current: _Communicator | None = None
    for line in text.splitlines():
        if section := _SECTION.match(line):
            current = communicators.setdefault(section[2], _Communicator(section[2], sizes.get(section[1], 0)))
        elif not line.startswith(" "):
            current = current if not line.strip() else None
        elif current is not None:
            _read_line(current, line.strip())
    frozen = (one.freeze() for one in communicators.values())
    total = sum(int(row[2]) for row in rows)
    return NcclReport(version[1], total, tuple(one for one in frozen if one.differs))


def _read_line(communicator: _Communicator, line: str) -> None:
    for kind, pattern in _LINES.items():
        if (found := pattern.match(line)) is not None:
            communicator.read_line(kind, found.groupdict())
            return
