"""Gang: a warm job whose ranks can be called again and again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from jaxrun import RUNTIME
from jaxrun.errors import UsageError
from jaxrun.frontends.gang.call import GangCall, Results, pack_call
from jaxrun.frontends.gang.display import make_display
from jaxrun.frontends.gang.exceptions import GangError
from jaxrun.frontends.gang.instance import GangWorker
from jaxrun.frontends.gang.lifecycle import GangLifecycle
from jaxrun.frontends.gang.map import map_items
from jaxrun.frontends.gang.spec import GangSpec, split_options
from jaxrun.protocol.flight_file import LOCKSTEP_RECORD
from jaxrun.protocol.payload import FunctionReference
from jaxrun.spec.job.fault_spec import FAULT_KINDS

if TYPE_CHECKING:
    from jaxrun.analysis.diagnosis.snapshot import Snapshot


class Gang:
    """A warm job of `processes` ranks with `devices` devices each; started at once, closed by `close` or a `with`.

    hosts:     simulated hosts of this machine, or with backend="mpirun" or "slurm" real ones
    backend:   what starts the ranks, as `jaxrun --backend`
    platform:  of the devices: "auto", "cpu", "cuda", "rocm" or "tpu"
    env:       variables for all ranks
    lockstep:  "off", "record" or "strict"
    run_dir:   where logs, events and the verdict go; a second start gets run_dir-2; None for none that are kept
    options:   more of jaxrun's command line: "--partition debug", or its words one by one

    Raises UsageError for what cannot be, GangStartError with the launcher's own words where it did not start. Threads
    may use it: calls follow each other.
    """

    def __init__(
        self,
        processes: int | None = None,
        devices: int | None = None,
        *,
        hosts: int | None = None,
        backend: str = "local",
        platform: str = "auto",
        env: Mapping[str, str] | None = None,
        lockstep: str = LOCKSTEP_RECORD,
        run_dir: str | os.PathLike[str] | None = None,
        options: str | Sequence[str] = (),
    ) -> None:
        spec = GangSpec(
            processes=processes,
            devices=devices,
            hosts=hosts,
            backend=backend,
            platform=platform,
            lockstep=lockstep,
            env=dict(env or {}),
            options=split_options(options),
        )
        self._start(spec, run_dir)

    @classmethod
    def from_spec(cls, spec: GangSpec, run_dir: str | os.PathLike[str] | None = None) -> Self:
        gang = cls.__new__(cls)
        gang._start(spec, run_dir)
        return gang

    def _start(self, spec: GangSpec, run_dir: str | os.PathLike[str] | None) -> None:
        self._display = make_display()
        self._in_call = False
        self._call_number = 0
        self._lifecycle = GangLifecycle(spec, run_dir)

    # ---- calls

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None, **kwargs: Any) -> Results:
        """Call `fn(*args, **kwargs)` on every rank; what each returned, JAX's arrays as numpy's.

        Raises what the ranks raise: itself, with `.rank`, `.host` and the remote traceback; a group where they raise
        different errors. WorkerDied if a rank's process ends. CallTimeout after `timeout` seconds, with where
        each rank was. KeyboardInterrupt at a Ctrl-C: the ranks are interrupted, a second one stops the gang.
        """
        __tracebackhide__ = True
        with self.start_call(fn, *args, **kwargs) as call:
            return call.results(timeout)

    def start_call(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> GangCall:
        """Start `fn(*args, **kwargs)` on every rank, to exchange values with it; for use in a `with`."""
        self._lifecycle.lock.acquire()
        try:
            if self._in_call:
                raise GangError("this gang is in a call already; end that first")
            instance = self._lifecycle.usable_instance()
            self._call_number += 1
            task = pack_call(instance, self._call_number, fn, args, kwargs)
            call = GangCall(instance, self._call_number, task, self._display, self._end_call)
            self._in_call = True
            return call
        except BaseException:
            self._lifecycle.lock.release()
            raise

    def _end_call(self) -> None:
        self._in_call = False
        self._lifecycle.lock.release()

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
        """`f` of each item of `xs`, over all devices of all ranks; results in order.

        xs:       an array, or arrays in dicts and tuples, mapped along `in_axes`; or a list of items
        chunk:    items that a device, or with jax=False a rank, takes at once; by default by the memory that they take
        in_axes:  as in jax.vmap, for xs: an axis, None for what all items share, or a dict or tuple of such
        static:   keyword arguments of `f`, the same for all items; JAX sees them as constants
        jax:      False runs `f` as plain Python, one item at a time on each rank, and returns a list

        The function is vmapped and compiled; what it returns for n items has n rows, as numpy arrays in the containers
        that it returns. As in JAX, numbers are 32 bits wide unless jax_enable_x64 is set. Raises NotTraceable, a
        TypeError, where JAX cannot compile it, and what `f` raises; WorkerDied if a rank dies.
        """
        return map_items(self, f, xs, chunk=chunk, in_axes=in_axes, static=static, jax=jax)

    def __getitem__(self, name: str) -> Results:
        """What a variable of a notebook's %%gang cells is on each rank."""
        return self.run(FunctionReference(f"{RUNTIME}.gang.notebook_cells", "get_variable"), name)

    def __setitem__(self, name: str, value: Any) -> None:
        """Give all ranks a variable of this value, for a notebook's %%gang cells."""
        self.run(FunctionReference(f"{RUNTIME}.gang.notebook_cells", "set_variable"), name, value)

    __iter__ = None  # or __getitem__ would make a sequence of it

    # ---- the job

    @property
    def spec(self) -> GangSpec:
        return self._lifecycle.spec

    @property
    def workers(self) -> tuple[GangWorker, ...]:
        return self._lifecycle.instance.workers

    @property
    def processes(self) -> int:
        return len(self.workers)

    @property
    def devices(self) -> int:
        """Devices of each rank."""
        return self.workers[0].devices

    @property
    def run_dir(self) -> Path:
        """Where the current start leaves its files."""
        return self._lifecycle.instance.launcher.run_dir

    @property
    def healthy(self) -> bool:
        """Whether the next call finds the same ranks."""
        return self._lifecycle.healthy

    @property
    def broken(self) -> str:
        """Why the ranks cannot be used any more, so that the next call starts the gang anew; empty if they can."""
        return self._lifecycle.broken

    def mark_broken(self, reason: str) -> None:
        """Have the next call start the gang anew."""
        self._lifecycle.mark_broken(reason)

    def ensure_usable(self) -> None:
        """Start the gang anew where the next call would, and say why."""
        self._lifecycle.usable_instance()

    def restart(self) -> None:
        """Start the gang anew: fresh processes that know nothing of earlier calls."""
        self._lifecycle.restart()

    def stop(self) -> None:
        """Stop the job at once, as it is; the next call starts another."""
        self._lifecycle.stop()

    def close(self) -> None:
        """Let the ranks end, and stop what does not. May be called again."""
        self._lifecycle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self._lifecycle}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a gang stays in the process that has started it; a function that it runs cannot refer to it")

    # ---- stacks, interrupts and faults

    def stacks(self, *, full: bool = False) -> str:
        """Where all ranks are now, in groups; with `full`, all frames of each."""
        try:
            return self._lifecycle.instance.stacks(full=full)
        except GangError as error:
            return f"where they are cannot be told: {error}"

    def snapshot(self) -> Snapshot:
        """The same as a value. Raises JaxrunError where the ranks cannot be asked."""
        return self._lifecycle.instance.snapshot()

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in what the ranks run."""
        self._lifecycle.instance.interrupt()

    def fault(self, kind: str, rank: int) -> None:
        """Have this done to a rank: "kill" it (SIGKILL), or "pause" it (SIGSTOP)."""
        if kind not in FAULT_KINDS:
            raise UsageError(f"a fault is one of {', '.join(FAULT_KINDS)}, not {kind!r}")
        if rank not in range(self.processes):
            raise UsageError(f"the ranks of this gang are 0 to {self.processes - 1}, so {rank!r} is none")
        self._lifecycle.instance.launcher.send_command(fault=kind, ranks=[rank])

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL, as the kernel does when memory is short."""
        self.fault("kill", rank)

    def pause(self, rank: int) -> None:
        """Stop a rank with SIGSTOP: once this returns it does nothing, though it lives.

        Raises GangError if that takes longer than some seconds.
        """
        self.fault("pause", rank)
        self._lifecycle.instance.wait_until_paused(rank)
