"""Describes what NCCL's own service reports about the ranks' communicators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from jaxrun.protocol.nccl_report import Communicator, NcclGroup, NcclReport, OperationCounts
from jaxrun.text import agree, format_ranks_on_hosts, plural

_MAX_SENTENCES = 3


def describe_nccl(report: NcclReport | None, hosts: Mapping[int, str]) -> list[str]:
    """Return a sentence for each difference, or one sentence that there is none.

    Empty if NCCL reports no communicators.
    """
    if report is None or not report.communicators:
        return []
    found = [sentence for one in report.differing for sentence in _describe(one, hosts)]
    if not found:
        many = plural(report.communicators, "communicator")
        return [f"NCCL {report.version} sees no difference: in {many}, all ranks have launched the same operations."]
    left = [f"NCCL names {plural(len(found) - _MAX_SENTENCES, 'more difference')}."] * (len(found) > _MAX_SENTENCES)
    return [*found[:_MAX_SENTENCES], *left]


def _describe(one: Communicator, hosts: Mapping[int, str]) -> Iterator[str]:
    of_size = f" ({plural(one.size, 'rank')})" if one.size else ""
    where = f"in NCCL's communicator {one.name}{of_size}"
    if one.missing.size:
        who = _Who(one.missing, hosts)
        are_stopped = "is its process stopped, or dead" if who.is_one else "are their processes stopped, or dead"
        yield f"{where}, {who.does('does')} not answer NCCL: {are_stopped}?"
    if one.left.size:
        yield f"{where}, {_Who(one.left, hosts).does('is')} no member any more."
    for operation in one.operations:
        yield f"{where}, {_compare(operation, hosts)}."


def _compare(operation: OperationCounts, hosts: Mapping[int, str]) -> str:
    """Write `rank 5 (h2) has launched 640 AllGathers, and 31 ranks 641: they wait for rank 5 (h2)`."""
    half = sum(count.ranks.size for count in operation.counts) / 2
    *ahead, (late, count) = (
        (_Who(one.ranks, hosts, is_named=one.ranks.size <= half), one.count) for one in operation.counts
    )
    kind = f"{operation.operation or 'operation'}{'s' * (count != 1)}"
    others = ", ".join(f"{who.name} {more}" for who, more in ahead)
    launched = f"{late.does('has')} launched {count or 'no'} {kind}, and {others}"
    return f"{launched}: they wait for {late.name if late.is_named else 'the former'}"


class _Who:
    """Describes ranks of a communicator.

    name:  `ranks 12-13 (h1)`, or `process 323032 on 10.1.0.4` if it is no known rank; otherwise the number of ranks
    """

    def __init__(self, group: NcclGroup, hosts: Mapping[int, str], *, is_named: bool = True) -> None:
        """`is_named`: whether to name the ranks, if all of them are known."""
        ranks = sorted({one.rank for one in group.named if one.rank in hosts})
        others = (one for one in group.named if one.rank not in hosts)
        strangers = dict.fromkeys(_name_process(one.number, one.pid, one.node) for one in others)
        self.is_named = is_named and 0 < group.size == len(group.named)
        self.is_one = (len(ranks) + len(strangers) if self.is_named else group.size) == 1
        known = [format_ranks_on_hosts(ranks, hosts)] if ranks else []
        self.name = " and ".join([*known, *strangers]) if self.is_named else plural(group.size, "rank")

    def does(self, predicate: str) -> str:
        """Write `rank 1 (h2) does` or `ranks 1-2 (h2) do`."""
        return f"{self.name} {agree(predicate, 1 if self.is_one else 2)}"


def _name_process(number: int, pid: int, node: str) -> str:
    """Name a process that is no known rank. NCCL's own rank numbers differ from the job's, so they are marked."""
    return f"process {pid} on {node}" if pid else f"NCCL's rank {number}"
