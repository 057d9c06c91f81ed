"""Gang: a warm job whose ranks can be called again and again."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from jaxrun.errors import UsageError
from jaxrun.frontends.gang.call import GangCall, Results, check_timeout
from jaxrun.frontends.gang.call_events import Display, TerminalDisplay
from jaxrun.frontends.gang.gang_errors import GangError
from jaxrun.frontends.gang.gang_job import GangJob, GangWorker
from jaxrun.frontends.gang.keywords import names_keywords
from jaxrun.frontends.gang.map_call import map_items
from jaxrun.frontends.gang.rank_connections import remove_directories, sigint_deferred
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.node.forkserver.launcher_pool import begin_process_end, close_all
from jaxrun.protocol.flight_file import LOCKSTEP_RECORD
from jaxrun.protocol.job_messages import FaultOrder
from jaxrun.protocol.names import RUNTIME
from jaxrun.protocol.payload import FunctionReference
from jaxrun.spec.backends import LOCAL
from jaxrun.spec.job.fault_spec import FAULT_KINDS
from jaxrun.spec.job.option_checks import PRELOAD_AUTO

if TYPE_CHECKING:
    from jaxrun.analysis.diagnosis.job_stacks import JobStacks


_YIELD_S = 0.02  # for another thread to get the lock
# Names that are sought in a Gang, and what to use instead.
_INSTEAD = {
    "snapshot": "for the stacks of a gang's ranks, gang.rank_stacks(), or gang.stacks() as text; to keep a program's "
    "state, jaxrun_runtime.snapshot in the function that the gang runs"
}


class Gang:
    """A job that keeps running and calls your functions on all of its ranks. Close it with `close` or a `with`.

    processes: how many ranks; None: as many as jaxrun starts without -n
    devices:   GPUs of each rank, or simulated devices on CPU; None: one
    hosts:     how many simulated hosts on this machine, or real hosts with another backend than "local"
    backend:   what starts the ranks, as --backend: "local", "mpirun", "ssh", "slurm", "pbs", "sge"; if options name
               hosts (-H h1,h2), "local" is mpirun, or without an mpirun ssh
    platform:  of the devices: "auto", "cpu", "cuda", "rocm" or "tpu"
    env:       variables to set in all ranks
    lockstep:  "off", "record", "fail" or "strict"
    run_dir:   where logs, events and the verdict go; a second start uses run_dir-2; None: they are deleted at the end
    options:   more options of jaxrun's command line: "--partition debug", or a list of words
    preload:   modules to import once, before the ranks are forked: a list of names; "auto": what the main file imports
               first, of packages for which that is safe; "none"

    The ranks start at once. Raises UsageError for arguments that are wrong, and GangStartError, with the launcher's
    output, if the gang does not start. Several threads may use a gang; it runs their calls one after the other.

    >>> with jaxrun.Gang(processes=2) as gang:
    ...     gang.run(lambda x: x + 1, 1)
    (2, 2)
    """

    @names_keywords
    def __init__(
        self,
        processes: int | None = None,
        devices: int | None = None,
        *,
        hosts: int | None = None,
        backend: str = LOCAL,
        platform: str = "auto",
        env: Mapping[str, str] | None = None,
        lockstep: str = LOCKSTEP_RECORD,
        run_dir: str | os.PathLike[str] | None = None,
        options: str | Sequence[str] = (),
        preload: str | Sequence[str] = PRELOAD_AUTO,
    ) -> None:
        self.spec = GangSpec(processes, devices, hosts, backend, platform, env, lockstep, run_dir, options, preload)
        self._display = _make_display()
        self._lock = threading.RLock()  # held by the thread that uses the ranks
        self._yields = threading.Condition(self._lock)
        self._open_call: GangCall | None = None
        self._call_number = 0
        self._starts = 0
        self._closed = False
        self._owner = os.getpid()
        self._job = self._start_job()
        _all.add(self)

    # ---- calls

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Results:
        """Call `fn(*args, **kwargs)` on every rank; returns the results by rank, with JAX arrays as NumPy arrays.

        An error of a rank is raised here with its own type, with `.rank`, `.host` and the remote traceback; different
        errors are raised as a group. Raises WorkerDied if a rank's process ends, and after `timeout` seconds
        CallTimeout, which says where each rank was. Ctrl-C interrupts the ranks and raises KeyboardInterrupt; a second
        Ctrl-C stops the gang.
        """
        __tracebackhide__ = True
        check_timeout(timeout)
        with self._locked(), self.start_call(fn, *args, **kwargs) as call:
            return call.results(timeout)

    def start_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> GangCall:
        """Start `fn(*args, **kwargs)` on every rank, and exchange values with it while it runs.

        Use the call in a `with`, or wait for its `results()`. If you do neither, the gang's next call first waits for
        the end of this one, shows what the ranks print, and prints an error as a warning.
        """
        with self._locked():
            self._finish_open_call()
            job = self._usable_job()
            self._call_number += 1
            task = job.pack_call(self._call_number, fn, args, kwargs)
            name = getattr(fn, "__name__", type(fn).__name__)
            call = None
            try:
                with sigint_deferred():  # until the gang knows about a call that the ranks have received
                    call = self._open_call = GangCall(
                        job, self._call_number, task, self._display, self._end_call, name=name, lock=self._lock
                    )
            except KeyboardInterrupt as error:
                if call is not None:
                    call.end(error)
                raise
            return call

    def _end_call(self) -> None:
        self._open_call = None

    def _finish_open_call(self) -> None:
        """Wait for the end of an earlier call. Raises GangError if this thread itself uses it."""
        while (call := self._open_call) is not None:
            if call.in_use:
                raise GangError("this gang runs another call; wait until it ends, or make another gang")
            if call.is_wanted:
                self._yields.wait(_YIELD_S)
            else:
                call.finish()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock. Raises GangError in a fork, in which another thread may hold it forever."""
        self._check_owner()
        with self._lock:
            yield

    def map(
        self,
        f: Callable[..., Any],
        xs: Any,
        *,
        chunk: int | None = None,
        in_axes: Any = 0,
        static: Mapping[str, Any] | None = None,
        jax: bool = True,
    ) -> Any:
        """Apply `f` to each item of `xs`, on all devices of all ranks; returns the results in order.

        xs:       an array, or arrays in dicts and tuples, mapped along `in_axes`; or a list of items
        chunk:    how many items a device (with jax=False, a rank) takes at once; by default as many as fit in memory
        in_axes:  as in jax.vmap: an axis, None for what all items share, or a dict or tuple of these
        static:   keyword arguments of `f`, the same for all items; JAX sees them as constants
        jax:      False calls `f` as plain Python, one item at a time on each rank, and returns a list

        `f` is vmapped and compiled. For n items you get NumPy arrays with n rows, in the containers that `f` returns.
        As in JAX, numbers are 32 bits wide unless jax_enable_x64 is set. Raises what `f` raises; NotTraceable, a
        TypeError, if JAX cannot compile it; WorkerDied if a rank dies.
        """
        return map_items(self, f, xs, chunk=chunk, in_axes=in_axes, static=static, jax=jax)

    def __getitem__(self, name: str) -> Results:
        """The value on each rank of a variable of a notebook's %%gang cells."""
        return self.run(FunctionReference(f"{RUNTIME}.gang.notebook_cells", "get_variable"), name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable of a notebook's %%gang cells on all ranks."""
        self.run(FunctionReference(f"{RUNTIME}.gang.notebook_cells", "set_variable"), name, value)

    __iter__ = None  # with __getitem__ alone, Python would treat a gang as a sequence

    # ---- the job

    @property
    def workers(self) -> tuple[GangWorker, ...]:
        """The ranks: host, process id, devices and platform of each."""
        return self._running_job.workers

    @property
    def processes(self) -> int:
        return len(self.workers)

    @property
    def devices(self) -> int:
        """How many devices each rank has."""
        return self.workers[0].devices

    @property
    def run_dir(self) -> Path:
        """The run directory of the job that runs now."""
        return self._running_job.launcher.run_dir

    @property
    def healthy(self) -> bool:
        """Whether the next call runs on the same processes."""
        return self._job.usable

    @property
    def closed(self) -> bool:
        """Whether the gang was closed, and cannot be used any more."""
        return self._closed

    def restart(self) -> None:
        """Start the gang again, with new processes that know nothing about earlier calls."""
        with self._locked():
            self._check_open()
            self.stop()
            self._open_call = None
            self._job = self._start_job()

    def stop(self) -> None:
        """Kill the job's processes at once. The next call starts the gang again."""
        self._check_owner()
        self._job.stop()

    def close(self) -> None:
        """Wait for a running call to end, let the ranks end, and kill those that do not.

        You may call it more than once.
        """
        if self._owner != os.getpid():  # a fork of the process that started the gang
            self._closed = True
            return
        with self._lock:
            self._closed = True
            try:
                if self._open_call is not None and not self._open_call.in_use:
                    self._finish_open_call()
                if self.healthy:
                    self._job.shut_down()
            finally:
                self.stop()

    def _close_at_exit(self) -> None:
        """Close the gang, but do not wait for another thread, whose call may never end."""
        if self._owner != os.getpid():
            return
        if not self._lock.acquire(blocking=False):
            self.stop()
            return
        try:
            self.close()
        finally:
            self._lock.release()

    def _start_job(self) -> GangJob:
        self._starts += 1
        run_dir = None if self.spec.run_dir is None else Path(self.spec.run_dir)
        if run_dir is not None and self._starts > 1:
            run_dir = run_dir.with_name(f"{run_dir.name}-{self._starts}")
        return GangJob(self.spec, run_dir)

    @property
    def _running_job(self) -> GangJob:
        """Return the running job. Raises GangError if there is none."""
        if self._job.stopped:
            end = "closed; make another" if self._closed else "stopped; its next call starts it again"
            raise GangError(f"this {self.spec} is {end}")
        return self._job

    def _usable_job(self) -> GangJob:
        """Return the running job, restarted if it is broken or stopped. Raises GangError if the gang is closed."""
        self._check_open()
        if not self._job.stopped:
            self._job.check_connections()
        if self._job.broken:
            text = f"jaxrun: {self.spec}: started again; its ranks' state is lost: {self._job.broken}"
            print(text, file=sys.stderr)
        if not self.healthy:
            self.restart()
        return self._running_job

    def _check_open(self) -> None:
        if self._closed:
            raise GangError(f"this {self.spec} is closed; make another")
        self._check_owner()

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise GangError(
                f"this {self.spec} belongs to process {self._owner}, but this process is a fork of it; make another"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is not None and self._owner == os.getpid():
            with self._lock:
                if self._open_call is not None and not self._open_call.in_use:
                    self._open_call.end(error)
        self.close()

    def __del__(self) -> None:
        try:
            if "_job" in self.__dict__ and self._owner == os.getpid():
                self.stop()
        except Exception:  # the interpreter may be shutting down, and the modules used here with it
            pass

    def __str__(self) -> str:
        """Write `4 processes x 2 devices (cpu) on this machine`."""
        if self._job.stopped:
            return f"{self.spec}: {'closed' if self._closed else 'starts again at its next use'}"
        return f"{self._job}{'' if self.healthy else ', broken'}"

    def __repr__(self) -> str:
        return f"<{self}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a gang cannot be sent to its own ranks; the function that you run must not refer to it")

    # ---- stacks, interrupts and faults

    def stacks(self, *, full: bool = False) -> str:
        """A text that says where all ranks are now, in groups; with `full`, all frames of each."""
        return self._job.stacks(full=full)

    def rank_stacks(self) -> JobStacks:
        """Return the same as a value. Raises JaxrunError if the ranks cannot be asked."""
        return self._job.rank_stacks()

    if not TYPE_CHECKING:  # else every name would be an attribute

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                _INSTEAD.get(name, f"{type(self).__name__!r} object has no attribute {name!r}"), name=name, obj=self
            )

    def fault(self, kind: str, rank: int) -> None:
        """Inject a fault into a rank: "kill" it (SIGKILL) or "pause" it (SIGSTOP)."""
        if kind not in FAULT_KINDS:
            raise UsageError(f"a fault is one of {', '.join(FAULT_KINDS)}, not {kind!r}")
        if rank not in range(self.processes):
            raise UsageError(f"the ranks of this gang are 0 to {self.processes - 1}, so there is no rank {rank!r}")
        self._running_job.launcher.job.send(FaultOrder(kind, (rank,)))

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL, as the kernel does when memory runs out."""
        self.fault("kill", rank)

    def pause(self, rank: int) -> None:
        """Stop a rank with SIGSTOP. When this returns, the rank has stopped, but its process still exists.

        Raises GangError if the rank does not stop within a few seconds.
        """
        self.fault("pause", rank)
        self._running_job.wait_until_paused(rank)


# ---- for notebooks and pytest


def mark_broken(gang: Gang, reason: str) -> None:
    """Make the gang's next call restart it, for this reason."""
    gang._job.mark_broken(reason)


def is_ready(gang: Gang) -> bool:
    """Whether a call would start at once, on the ranks that run now."""
    if gang._owner != os.getpid() or not gang._lock.acquire(blocking=False):
        return False
    try:
        if gang._open_call is None and not gang.closed and not gang._job.stopped:
            gang._job.check_connections()
            return gang.healthy
        return False
    finally:
        gang._lock.release()


def ensure_usable(gang: Gang) -> None:
    """Restart the gang now if its next call would, and print why."""
    with gang._locked():
        gang._finish_open_call()
        gang._usable_job()


_all: weakref.WeakSet[Gang] = weakref.WeakSet()


def _close_all() -> None:
    """At the end of this process, end all gangs: at once if another thread is using or starting one."""
    begin_process_end()
    for gang in tuple(_all):
        gang._close_at_exit()
    close_all()  # also ends jobs that are being started
    remove_directories()


atexit.register(_close_all)


def _make_display() -> Display:
    """Return the notebook's display if this process is a notebook's kernel, else the terminal's."""
    if "IPython" in sys.modules:
        from jaxrun.frontends.gang.notebook_display import find_display

        return find_display() or TerminalDisplay()
    return TerminalDisplay()
