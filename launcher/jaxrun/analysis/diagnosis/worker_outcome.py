"""How one worker ended: the value from which root cause and verdict are derived."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from jaxrun.protocol.worker_messages import Failed, ThreadFailed
from jaxrun.spec.job.fault_spec import KILL, PAUSE
from jaxrun.text import format_signal

# What a fault of each kind does to a rank, after "is", "was" or "could not be".
FAULT_PARTICIPLES = {
    KILL: f"killed by {format_signal(signal.SIGKILL)}",
    PAUSE: f"stopped by {format_signal(signal.SIGSTOP)}",
}


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that was injected into a worker.

    kind:          one of FAULT_KINDS (job/fault_spec.py)
    requested_by:  "--chaos" or "its gang"
    """

    kind: str
    time: float
    requested_by: str

    def __str__(self) -> str:
        """`killed by SIGKILL (9), as --chaos asked`."""
        return f"{FAULT_PARTICIPLES[self.kind]}, as {self.requested_by} asked"


@dataclass(frozen=True, slots=True)
class WorkerOutcome:
    """How a worker ended, as far as that was known when the outcomes were collected.

    time:                when the launcher first saw that the worker ends; seconds since the epoch
    status:              exit status as `subprocess` gives it, negative for a signal; None while the worker lives
    failure:             the exception or status that the worker itself reported
    thread_failures:     exceptions that ended threads of its program, in their order
    crash_dump:          what Python's fault handler wrote at a fatal signal
    stderr_tail:         the last lines of its stderr
    killed_by_launcher:  never a root cause
    finished:            its program had ended with status 0 before the worker did
    out_of_memory:       what the kernel log says of its death, where memory was short
    lost_reason:         why its agent cannot be reached any more; how the worker ended is then unknown
    injected_faults:     faults that --chaos or the gang injected into it
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

    @property
    def deadly_fault(self) -> InjectedFault | None:
        """The injected kill that the worker died of."""
        if self.status != -signal.SIGKILL or self.killed_by_launcher:
            return None
        return next((fault for fault in self.injected_faults if fault.kind == KILL), None)

    @property
    def disruptive_fault(self) -> InjectedFault | None:
        """The injected pause, which leaves the worker alive but may break connections."""
        return next((fault for fault in self.injected_faults if fault.kind == PAUSE), None)
