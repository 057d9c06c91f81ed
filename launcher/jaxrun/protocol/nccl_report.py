"""A report of NCCL's own service (RAS) about a job's communicators: which ranks of each differ, or are missing."""

from __future__ import annotations

from msgspec import Struct

MAX_NAMED_RANKS = 16  # of one group: a report of thousands of ranks stays a short message


class NcclRank(Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of a communicator, as NCCL knows it.

    number:  its number in the communicator
    node:    its host's IP address; empty if unknown
    pid:     the process id in its own namespace; 0 if unknown
    rank:    its rank in the job; -1 until it has been found
    """

    number: int
    node: str = ""
    pid: int = 0
    rank: int = -1


class NcclGroup(Struct, frozen=True, forbid_unknown_fields=True):
    """Ranks of a communicator in the same state: how many, and which ones, unless there are too many to name."""

    size: int = 0
    named: tuple[NcclRank, ...] = ()


class LaunchCount(Struct, frozen=True, forbid_unknown_fields=True):
    """The ranks of a communicator that have launched `count` operations of one kind."""

    count: int
    ranks: NcclGroup


class OperationCounts(Struct, frozen=True, forbid_unknown_fields=True):
    """A kind of operation that ranks of a communicator have launched different numbers of times, the highest first.

    operation:  "AllReduce"; empty if NCCL counts all kinds together (2.24 and 2.25)
    """

    operation: str
    counts: tuple[LaunchCount, ...]


class Communicator(Struct, frozen=True, forbid_unknown_fields=True):
    """A communicator whose ranks differ.

    name:        NCCL's hash of it, "fa93daea854b060b", which NCCL's own log has, too
    size:        number of its ranks; 0 if unknown
    missing:     ranks whose process does not answer
    left:        ranks whose process answers, but is not, or no longer, a member
    operations:  operations of the other ranks, if their numbers differ
    """

    name: str
    size: int
    missing: NcclGroup = NcclGroup()
    left: NcclGroup = NcclGroup()
    operations: tuple[OperationCounts, ...] = ()

    @property
    def differs(self) -> bool:
        return bool(self.missing.size or self.left.size or self.operations)


class NcclReport(Struct, frozen=True, forbid_unknown_fields=True):
    """NCCL's report about a job: its version, "2.30.4", the number of communicators, and those whose ranks differ."""

    version: str
    communicators: int = 0
    differing: tuple[Communicator, ...] = ()
