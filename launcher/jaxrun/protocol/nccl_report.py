"""What NCCL's own service (RAS) says about the communicators of a job: which ranks of one differ, or are missing."""

from __future__ import annotations

from dataclasses import dataclass

MAX_NAMED_RANKS = 16  # of one group: a report of thousands of ranks stays a short message


@dataclass(frozen=True, slots=True)
class NcclRank:
    """One rank of a communicator, as NCCL knows it.

    number:  its number in the communicator
    node:    the IP address of its host; empty where it is not known
    pid:     the number by which its process knows itself; 0 where it is not known
    rank:    the job's rank that this process is; -1 until it has been found
    """

    number: int
    node: str = ""
    pid: int = 0
    rank: int = -1


@dataclass(frozen=True, slots=True)
class NcclGroup:
    """Ranks of a communicator that are alike: how many, and which ones, unless these are too many to name."""

    size: int = 0
    named: tuple[NcclRank, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchCount:
    """The ranks of a communicator that have launched `count` operations of one kind."""

    count: int
    ranks: NcclGroup


@dataclass(frozen=True, slots=True)
class OperationCounts:
    """A kind of operation of which the ranks of a communicator have launched different numbers, the highest first.

    operation:  "AllReduce"; empty where NCCL counts all kinds together (2.24 and 2.25)
    """

    operation: str
    counts: tuple[LaunchCount, ...]


@dataclass(frozen=True, slots=True)
class Communicator:
    """A communicator whose ranks differ.

    name:        NCCL's hash of it, "fa93daea854b060b", which is in its own log as well
    size:        its ranks; 0 where that is not known
    missing:     those whose process does not answer
    left:        those whose process answers, but is not (or no more) a member
    operations:  what the others have launched, as far as they differ
    """

    name: str
    size: int
    missing: NcclGroup = NcclGroup()
    left: NcclGroup = NcclGroup()
    operations: tuple[OperationCounts, ...] = ()

    @property
    def differs(self) -> bool:
        return bool(self.missing.size or self.left.size or self.operations)


@dataclass(frozen=True, slots=True)
class NcclReport:
    """What NCCL says of a job: its version, "2.30.4", the number of communicators, and those whose ranks differ."""

    version: str
    communicators: int = 0
    differing: tuple[Communicator, ...] = ()
