"""The guard: a small process that kills everything a launcher or an agent has started, if that dies by kill -9.

Workers end by themselves when their agent is gone; processes that they have started do not, nor do mpirun and srun. The
guard reads a pipe that only its owner holds: `b"."` disarms it; end-of-file means that the owner has died.

The owner's processes are found by their environment and by descent: from time to time the guard checks which
descendants the owner has.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from jaxrun.files import procfs
from jaxrun.files.shared_memory import remove_all_of_job, remove_unless_held
from jaxrun.node.agent.mpi_memory import remove_files
from jaxrun.node.agent.process_tree import TRACKER_GRACE_S, Descendants, is_tracker, kill
from jaxrun.node.channel.event_loop import LoopPart
from jaxrun.node.forkserver.client import reap
from jaxrun.protocol.names import JOB_ID, RANK

_SWEEP_TIMEOUT_S = 2.0
_SWEEP_PAUSE_S = 0.02
_ADOPTION_TIMEOUT_S = 1.0  # for the kernel to give the owner's children another parent, once its files are closed
_AGENTS_GRACE_S = 1.0  # for agents to notice that the head is gone, and to end the processes of their ranks
_TERM_GRACE_S = 1.5
_NEXT_ATTEMPT_S = 60.0  # for another agent of the job to come, and hold the snapshots on this host
_LOOK_PAUSE_S = 0.1  # between two scans of the owner's descendants
# Of one core at most, for scans of all; otherwise only children are scanned, which include orphans.
_DESCENDANTS_SHARE = 0.005
_DISARM_TIMEOUT_S = 1.0  # for a disarmed guard to end; it has nothing more to do, so one that is stopped is killed
_DISARM = b"."
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Guard:
    """The owner's handle on its guard process."""

    def __init__(
        self,
        mark: str = "",
        ranks: Sequence[int] = (),
        *,
        launch_mark: str = "",
        sigterm: bool = True,
        job_id: str = "",
        snapshots: str = "",
    ) -> None:
        """Fork the guard: to be called while the owner has one thread and has started nothing.

        `mark` is a variable, "NAME=value": processes that have it in their environment are killed, those of some
        `ranks` alone if any are given, and all that the owner has started. Without one, only the process groups of
        `add` are; and with a `launch_mark` the children of the owner that have this one, if `sigterm` after a SIGTERM,
        by which an mpirun or srun ends what it has started on other hosts, too. What the ranks of `job_id` have shared
        in memory is removed; but where the owner is an agent, and the job may go on without it, the directory
        `snapshots` only if no other agent comes to use it.
        """
        self._orders = mark, ranks, launch_mark, sigterm, job_id, snapshots
        self._added: list[bytes] = []  # lines for a guard that replaces this one
        self._start()

    def _start(self) -> None:
        watched, self._held = os.pipe()
        owner = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _IGNORED)  # until the guard ignores them
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._held)
            _watch(watched, owner, *self._orders)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(watched)
        for line in self._added:
            self._write(line)

    def add(self, group: int) -> None:
        """Kill this process group as well."""
        self._add(b"%d\n" % group)

    def add_file(self, path: str) -> None:
        """Remove this file, too, whose path has no blanks."""
        self._add(b"%s\n" % path.encode())

    def _add(self, line: bytes) -> None:
        self._added.append(line)
        self._write(line)

    def attach(self, loop: LoopPart, order: int, notify: Callable[[str], None]) -> None:
        """Watch the guard: if it ends, start another one and call `notify`."""

        def replace() -> None:
            loop.remove_reader(self._held)
            self._let_go()
            self._start()
            self.attach(loop, order, notify)
            notify("the guard, which cleans up after a kill -9 of jaxrun, has died; starting another")

        loop.add_reader(self._held, order, replace)  # a pipe without a reader is ready

    def disarm(self) -> None:
        """End the guard, without killing anything. May be called again."""
        if self._held < 0:
            return
        self._write(_DISARM)
        self._let_go()

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has been killed
            os.write(self._held, data)

    def _let_go(self) -> None:
        os.close(self._held)
        self._held = -1
        reap(self.pid, _DISARM_TIMEOUT_S)


def job_marker(job_id: str) -> str:
    return f"{JOB_ID}={job_id}"


def find_marked(mark: str, *any_of: str) -> Iterable[int]:
    """Return the processes of this user that were started with this variable and one of the others."""
    wanted, others = mark.encode(), {other.encode() for other in any_of}
    for pid in procfs.process_ids():
        variables = set(procfs.read_of(pid, "environ").split(b"\0"))
        if wanted in variables and (not others or others & variables):
            yield pid


def _watch(
    pipe: int, owner: int, mark: str, ranks: Sequence[int], launch_mark: str, sigterm: bool, job_id: str, snapshots: str
) -> NoReturn:
    try:
        os.setsid()  # a terminal's Ctrl-C should reach only the owner
        signal.set_wakeup_fd(-1)  # a replacement guard would inherit its parent's wakeup fd
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        # Otherwise, readers of the owner's output would wait until the guard closes its copy of the pipe.
        os.dup2(pipe, 0)
        os.closerange(1, 4096)
        descent = Descendants(owner, but=os.getpid()) if mark else None
        received = b""
        while data := _read(descent):
            received += data
            if data.endswith(_DISARM):
                os._exit(0)
        if descent is not None:
            descent.freeze(lambda: _find(mark, ranks))
        words = received.decode().split()
        groups = {int(word) for word in words if word.isdigit()}
        if launch_mark:
            groups |= _orphans_beside(owner, launch_mark)
            # If srun ended first, Slurm would kill the agents, and their guards, before they have done so.
            _wait_for_end(groups, _AGENTS_GRACE_S)
            for group in groups if sigterm else ():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(group, signal.SIGTERM)
            if sigterm:
                _wait_for_end(groups, _TERM_GRACE_S)
        _sweep(groups, lambda: descent.living() | _find(mark, ranks) if descent is not None else set())
        remove_files(word for word in words if word.startswith("/"))
        if job_id:
            remove_all_of_job(job_id, snapshots=not snapshots)
        _remove_socket((mark or launch_mark).partition("=")[2])
        if snapshots:
            remove_unless_held(snapshots, _NEXT_ATTEMPT_S)
    finally:
        os._exit(0)


def _remove_socket(job_id: str) -> None:
    """Remove the job's socket if its launcher is gone; if the owner was an agent, the launcher may be alive."""
    from jaxrun.records.rundir import job_sockets  # not needed by a disarmed guard

    job_sockets.remove_abandoned(job_id, os.environ)


def _read(descent: Descendants | None) -> bytes:
    """Read what the owner writes, and keep `descent` up to date meanwhile."""
    due = 0.0
    while descent is not None and not select.select([0], [], [], _LOOK_PAUSE_S)[0]:
        if time.monotonic() < due:
            descent.add_children()
            continue
        began = time.thread_time()
        descent.update()
        due = time.monotonic() + (time.thread_time() - began) / _DESCENDANTS_SHARE
    return os.read(0, 4096)


def _find(mark: str, ranks: Sequence[int]) -> set[int]:
    """Return the processes with the mark; if any ranks are given, only theirs."""
    return {*find_marked(mark, *(f"{RANK}={rank}" for rank in ranks))} - {os.getpid()}


def _orphans_beside(owner: int, mark: str) -> set[int]:
    """The children that the dead owner has left, as this process, and that have the mark.

    One may have been started a moment before `add`: until it executes its program it holds the pipe, so it does by now.
    """
    until = time.monotonic() + _ADOPTION_TIMEOUT_S
    while os.getppid() == owner and time.monotonic() < until:
        time.sleep(_SWEEP_PAUSE_S)
    return procfs.children(os.getppid()) & set(find_marked(mark))


def _wait_for_end(groups: set[int], seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and any(map(procfs.group_members, groups)):
        time.sleep(_SWEEP_PAUSE_S)


def _sweep(groups: set[int], find: Callable[[], set[int]]) -> None:
    """Kill until nothing is left: new processes may appear meanwhile, and resource trackers may end by themselves."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < _SWEEP_TIMEOUT_S:
        found = find().union(*map(procfs.group_members, groups))
        if not found:
            return
        kept = set(filter(is_tracker, found)) if waited < TRACKER_GRACE_S else set()
        for pid in found - kept:
            kill(pid)
        time.sleep(_SWEEP_PAUSE_S)
