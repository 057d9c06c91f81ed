"""The documents that commands print with --json, as classes: docs/schemas are made from them by scripts/schemas.

Each document has its "kind" and "format". A class with the annotations of its fields is all that there is to change;
some fields are values of other modules, as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field

from jaxrun.analysis.diagnosis.doing import Doing
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.analysis.verdict.verdict import VerdictContent
from jaxrun.protocol.probe_messages import HostFacts
from jaxrun.records.document_base import Document


class CleanedCopies(Document, frozen=True, kw_only=True, tag="cleaned copies"):
    """What `jaxrun clean --staged --json` prints."""

    directory: str
    copies: int
    deleted: int


class CleanedRuns(Document, frozen=True, kw_only=True, tag="cleaned"):
    """What `jaxrun clean --json` prints."""

    directory: str
    dry_run: bool
    deleted: Annotated[
        tuple[str, ...], Meta(description="run directories that are deleted, or with --dry-run would be")
    ]
    failed: Annotated[Mapping[str, str], Meta(description="run directories that could not be deleted, and why")]
    kept: Annotated[Mapping[str, str], Meta(description="run directories of jobs that run, or may")]
    bytes: int


class DebugpyAddress(Struct, frozen=True, kw_only=True):
    """Where debugpy listens."""

    host: Literal["127.0.0.1"]
    port: int


class PathMapping(Struct, frozen=True, kw_only=True):
    """A directory here, and its copy on the host."""

    localRoot: str
    remoteRoot: str


class DebugConfiguration(Struct, frozen=True, kw_only=True):
    """An entry of VS Code's launch.json."""

    name: str
    type: Literal["debugpy"]
    request: Literal["attach"]
    connect: DebugpyAddress
    justMyCode: bool
    pathMappings: Annotated[tuple[PathMapping, ...], Meta(description="only with --stage")] | UnsetType = UNSET


class DebugDocument(Document, frozen=True, kw_only=True, tag="debug"):
    """What `jaxrun debug --json` prints, in one line, once a rank of a running job can be debugged.

    The command runs on until the session ends.
    """

    run_dir: str
    rank: int
    configuration: Annotated[DebugConfiguration, Meta(description="for an editor: an entry of VS Code's launch.json")]


class DoctorFinding(Struct, frozen=True, kw_only=True):
    """One check, and what it found."""

    check: str
    level: Annotated[str, Meta(description="ok, warning or failure")]
    text: str
    advice: Annotated[str, Meta(description="what to type or to change")]


class DoctorConnection(Struct, frozen=True, kw_only=True):
    """How one host reaches another."""

    from_: str = field(name="from")
    to: str
    interface: str | None
    error: str | None


class CollectiveTiming(Struct, frozen=True):
    """One timing, as jaxrun_runtime.programs.collectives prints it."""

    collective: str
    size: int
    seconds: float
    bytes_per_s: float


class DoctorDocument(Document, frozen=True, kw_only=True, tag="doctor"):
    """What `jaxrun doctor --json` prints."""

    exit_code: int
    findings: tuple[DoctorFinding, ...]
    hosts: Annotated[Mapping[str, HostFacts], Meta(description="what there is on each host")]
    connections: tuple[DoctorConnection, ...]
    collectives: Annotated[tuple[CollectiveTiming, ...], Meta(description="how long collectives took")]


class ErrorDocument(Document, frozen=True, kw_only=True, tag="error"):
    """An error, in place of the document that was asked for."""

    error: Annotated[str, Meta(description="what was wrong, and what to do")]
    exit_code: int


class ExplainedRank(Struct, frozen=True, kw_only=True):
    """What became of a rank in an attempt."""

    rank: int
    host: str
    pid: int
    status: Annotated[
        int | None, Meta(description="the exit status, negative for a signal; null where it is not known")
    ]
    seconds: Annotated[
        Mapping[str, float],
        Meta(description="since the attempt began: spawned, imported, joined, proved, first output, ended"),
    ]


class ExplainedAttempt(Struct, frozen=True, kw_only=True):
    """One attempt of the job."""

    attempt: int
    start: Annotated[float, Meta(description="seconds since the epoch")]
    end: Annotated[float, Meta(description="seconds since the epoch")]
    hosts: Annotated[int, Meta(description="how many; 0 where that is not known")]
    headline: Annotated[str, Meta(description="how it ended, where another attempt followed")]
    straggler: Annotated[Straggler | None, Meta(description="the rank or host that held the others up")]
    ranks: tuple[ExplainedRank, ...]


class GoodputPeriod(Struct, frozen=True, kw_only=True):
    """A period of an attempt."""

    start: Annotated[float, Meta(description="seconds since the epoch")]
    end: Annotated[float, Meta(description="seconds since the epoch")]
    parts: Annotated[Mapping[str, float], Meta(description="the seconds of each part of docs/goodput.md")]


class ExplainedGoodput(Struct, frozen=True, kw_only=True):
    """What the time of the job was worth, over all its attempts."""

    share: Annotated[float, Meta(description="of the time, in which the program's steps went on")]
    seconds: float
    parts: Annotated[
        Mapping[str, float], Meta(description="the seconds of each part of docs/goodput.md; they sum up to `seconds`")
    ]
    steps: Annotated[int, Meta(description="that counted, as far as known")]
    repeated_steps: Annotated[int, Meta(description="that an attempt made again; 0 where that is not known")]
    late_rank: Annotated[int | None, Meta(description="the rank for which others waited most")]
    periods: tuple[GoodputPeriod, ...]


class Explanation(Document, frozen=True, kw_only=True, tag="explanation"):
    """What `jaxrun explain --json` prints: how a job went."""

    run_dir: str
    job_id: str
    tag: str
    program: tuple[str, ...]
    verdict: Annotated[
        VerdictContent | None, Meta(description="verdict.json; null where the job runs, or its launcher was killed")
    ]
    attempts: tuple[ExplainedAttempt, ...]
    goodput: Annotated[ExplainedGoodput | None, Meta(description="null where no steps were seen")]
    damaged_lines: Annotated[int, Meta(description="lines of the event log that could not be read")]


class ListedJob(Struct, frozen=True, kw_only=True):
    """A job that has left a run directory."""

    number: Annotated[int | None, Meta(description="as commands take it; null where the file system has no links")]
    run_dir: str
    started: Annotated[float, Meta(description="seconds since the epoch")]
    seconds: Annotated[float | None, Meta(description="how long it took, or has taken so far")]
    processes: int
    program: tuple[str, ...]
    tag: str
    host: Annotated[str, Meta(description="where its launcher runs, or ran")]
    running: Annotated[bool | None, Meta(description="null where only that host knows")]
    state: Annotated[str, Meta(description="how it went, in a few words")]
    outcome: str | None
    exit_code: int | None
    headline: Annotated[str | None, Meta(description="how it went, in one sentence")]
    goodput: Annotated[
        float | None, Meta(description="the share of the time in which steps went on; null for a short job")
    ]


class JobsDocument(Document, frozen=True, kw_only=True, tag="jobs"):
    """What `jaxrun list --json` prints: the jobs below a directory, the newest last."""

    directory: str
    jobs: tuple[ListedJob, ...]


class StackFrameContent(Struct, frozen=True, kw_only=True):
    """A frame of Python."""

    file: str
    line: int
    function: str


class HandledErrorContent(Struct, frozen=True, kw_only=True):
    """An exception that a thread handles, or that a background save has left."""

    thread: Annotated[str, Meta(description="empty for the main thread")]
    error: str
    message: str
    place: str


class RankStacks(Struct, frozen=True, kw_only=True):
    """Where a rank is."""

    rank: int
    host: str
    finished: Annotated[bool, Meta(description="whether its program has ended")]
    activity: Annotated[
        str | None,
        Meta(description="what it does: call, barrier, joint_call, compiling, sleep, …; null where it did not answer"),
    ]
    waits_for: Annotated[tuple[int, ...], Meta(description="the ranks that have not come to its call")]
    kernel_wait: str
    frames: Annotated[tuple[StackFrameContent, ...], Meta(description="of the main thread, the innermost first")]
    handles: Annotated[
        tuple[HandledErrorContent, ...],
        Meta(description="the exceptions that its threads handle, or that a background save has left"),
    ]
    native: Annotated[str | None, Meta(description="with --native: the stack with C frames")]


class StacksDocument(Document, frozen=True, kw_only=True, tag="stacks"):
    """What `jaxrun stacks --json` prints: where all ranks of a running job are."""

    run_dir: str
    time: Annotated[float, Meta(description="seconds since the epoch")]
    ranks: tuple[RankStacks, ...]
    text: Annotated[str, Meta(description="what `jaxrun stacks` shows")]


class StoppedDocument(Document, frozen=True, kw_only=True, tag="stopped"):
    """What `jaxrun stop --json` prints: how the job ended."""

    run_dir: str
    outcome: Annotated[str | None, Meta(description="as in verdict.json; null if jaxrun itself was killed")]
    exit_code: Annotated[int | None, Meta(description="the job's, not this command's")]
    headline: Annotated[str | None, Meta(description="what happened, in one sentence")]


class TopRank(Struct, frozen=True, kw_only=True):
    """A row of the screen."""

    rank: int
    host: str
    state: str
    since_s: float | None
    standing_out: Literal["like others", "slow", "late", "stopped", "failed"]
    number: Annotated[int | None, Meta(description="of its last cross-process call")]
    behind: Annotated[int, Meta(description="calls behind the furthest rank")]
    late_s: float | None
    cpu_percent: Annotated[float | None, Meta(description="of one core")]
    memory_bytes: int | None
    gpu_percent: float | None
    gpu_bytes: int | None
    doing: Annotated[Doing, Meta(description="the kind of state")]
    waits_for: Annotated[
        tuple[int, ...], Meta(description="the ranks for which it waits, the lowest 16 if there are more")
    ]


class TopHost(Struct, frozen=True, kw_only=True):
    """The memory of a host."""

    host: str
    used_bytes: int
    limit_bytes: int


class ToldProgress(Struct, frozen=True, kw_only=True):
    """How far the program says that it has come: jaxrun_runtime.step and progress."""

    step: int
    total: Annotated[int | None, Meta(description="null where the program has not told it")]
    steps_per_second: float | None
    seconds_left: float | None


class TopDocument(Document, frozen=True, kw_only=True, tag="top"):
    """What `jaxrun top --json` prints: how far each rank of a running job is, and what it uses.

    With --follow, one such line each second.
    """

    run_dir: str
    phase: Annotated[str, Meta(description="starting, running or ending")]
    attempt: int
    seconds: Annotated[float | None, Meta(description="since the job began")]
    calls_per_second: float | None
    calls_per_step: Annotated[int, Meta(description="0 where that is not known")]
    calls: Annotated[float | None, Meta(description="made so far by the median rank; null where that is not known")]
    idle_s: Annotated[
        float | None, Meta(description="seconds since any rank has come to a call; null before the first")
    ]
    note: str
    progress: Annotated[ToldProgress | None, Meta(description="null where the program tells no steps")]
    ranks: tuple[TopRank, ...]
    hosts: Annotated[
        tuple[TopHost, ...], Meta(description="the memory of each host, or of its ranks' cgroup if that is fuller")
    ]


class VersionDocument(Document, frozen=True, kw_only=True, tag="version"):
    """What `jaxrun --version --json` prints."""

    jaxrun: str
    python: str
