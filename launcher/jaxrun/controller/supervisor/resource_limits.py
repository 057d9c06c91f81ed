"""The limits of this machine that a job would exceed: told before anything is made, where they cannot be raised."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

from jaxrun.errors import UsageError
from jaxrun.spec.job.plan import Plan

_FILES_PER_WORKER = 12  # two pipes, a channel, stacks and two logs, and twice the first while it is being started
_FILES_PER_RUNNING_WORKER = 7  # what must be there at least
_FILES_PER_AGENT = 3  # a connection, and two logs where its host cannot write them
_FILES_OF_LAUNCHER = 64
_THREADS_PER_WORKER = 4  # at least: the main thread, and those of gRPC and XLA
_SYSTEM_LIMITS = ("/proc/sys/kernel/pid_max", "/proc/sys/kernel/threads-max")


def check_limits(plan: Plan) -> None:
    """Let this process open as many files as the job needs. Raises UsageError where a limit forbids the job."""
    count = len(plan.workers)
    if plan.launch_command is not None:
        _raise_open_file_limit(f"{count} agents take", count * _FILES_PER_AGENT, count * _FILES_PER_AGENT)
        return
    _check_threads(count)
    _raise_open_file_limit(f"-n {count} takes", count * _FILES_PER_WORKER, count * _FILES_PER_RUNNING_WORKER)


def _check_threads(count: int) -> None:
    needed = count * _THREADS_PER_WORKER
    with contextlib.suppress(OSError, ValueError):
        allowed = min(int(Path(name).read_text()) for name in _SYSTEM_LIMITS)
        if needed > allowed:
            raise UsageError(
                f"-n {count} takes {needed} threads at least, but this machine runs no more than {allowed}; "
                "-n is the number of processes: start fewer"
            )


def _raise_open_file_limit(what: str, wanted: int, needed: int) -> None:
    """Raise the soft limit to that for `wanted` files, as far as the hard one allows, which must allow for `needed`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _FILES_OF_LAUNCHER + wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{what} {needed} open files at least, but only {hard} are allowed here; start fewer, or raise the limit: "
            "ulimit -Hn, or /etc/security/limits.conf"
        )
    most = _FILES_OF_LAUNCHER + wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
