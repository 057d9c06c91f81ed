"""How a worker ended, as the launcher knows it: what a verdict is weighed from."""

from __future__ import annotations

from dataclasses import dataclass

from jaxrun.protocol.worker_messages import Failed, ThreadFailed


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that was done to a worker on order; `kind` as in planning/chaos.py, `by`: who has asked for it."""

    kind: str
    time: float
    by: str


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """One worker's end, or that it had none yet when the ends were collected.

    rank, host:     which worker
    time:           when the launcher learned of the first sign, words or exit; seconds since the epoch
    status:         exit status as subprocess gives it, negative for a signal; None while it lives
    words:          its last words, if it had any
    threads:        exceptions that ended threads of its program, in their order
    fatal:          what its fault handler wrote at a fatal signal
    tail:           the last lines of its stderr
    stopped:        the launcher killed it, so it is never a cause
    done:           it had finished its program with status 0 before it ended
    out_of_memory:  what the kernel says of its death, where it says that memory was short
    lost:           why its agent cannot be reached any more; nobody knows then how it ended
    dealt:          faults that were done to it on order
    """

    rank: int
    host: str
    time: float
    status: int | None
    failure: Failed | None = None
    thread_failures: tuple[ThreadFailed, ...] = ()
    crash_dump: str = ""
    stderr_tail: str = ""
    killed_by_launcher: bool = False
    finished: bool = False
    out_of_memory: str = ""
    lost_reason: str = ""
    injected_faults: tuple[InjectedFault, ...] = ()
