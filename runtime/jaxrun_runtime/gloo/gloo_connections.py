"""Opens Gloo's connections before a program needs them, however late a rank comes.

Gloo connects the processes of a group of devices at the group's first collective. A process gives up there after 30 s
if another has not come. This limit is a constant in Gloo, and JAX has no option for it. So before a program runs for
the first time, the ranks of each of its groups wait for each other without a limit, through the coordinator's key-value
table. Then an all-reduce of one number opens the connections. Without this all-reduce, the limit would include the time
that the program computes before its first collective.

Nothing is opened while the ranks join, because the groups are not known yet. Not even sync_global_devices uses the
group of all devices if a process has several.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime import jax_private
from jaxrun_runtime.gloo.program_groups import find_groups
from jaxrun_runtime.lockstep import call_hooks, program_facts

_log = logging.getLogger("jaxrun")
_KEY_PREFIX = "jaxrun/gloo"
_MAX_INTERRUPTIONS = 100


def open_before_first_use(env: WorkerEnv) -> None:
    """Open the connections of each group before the first program that needs them runs, from now on."""
    if env.size > 1 and call_hooks.can_hook_executions() and jax_private.uses_gloo():
        call_hooks.hook_executions(GlooConnections(env.rank).execute, (__file__,))


class GlooConnections:
    """Opens the connections of groups for this rank, once each. A group is the ids of its devices, in order."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._seen: WeakSet[Any] = WeakSet()
        self._locks: dict[tuple[int, ...], threading.Lock] = {}
        self._open: set[tuple[int, ...]] = set()

    def execute(self, original: Callable[..., Any], executed: Any, args: tuple[Any, ...]) -> Any:
        """Run a program that Python dispatches. Before its first run, open the connections that it needs.

        If a signal handler raises an exception meanwhile, it is raised once the program has been dispatched, as without
        jaxrun: the other ranks make this call, too.
        """
        held: BaseException | None = None
        if executed not in self._seen:
            for devices in self._new_groups(executed):
                held = self._open_group(devices) or held
            self._seen.add(executed)
        result = original(executed, *args)
        if held is not None:
            raise held
        return result

    def _new_groups(self, executed: Any) -> list[Sequence[Any]]:
        """Return the program's groups that include this rank and others and are not open, in the program's order."""
        try:
            devices = program_facts.device_assignment(executed)
            if len({device.process_index for device in devices}) < 2 or devices[0].platform != "cpu":
                return []
            texts = program_facts.hlo_texts(executed)
            groups = [
                [devices[place] for place in group] for text in texts for group in find_groups(text, len(devices))
            ]
        except Exception as error:  # the program must run all the same, with Gloo's own limit
            _log.debug("jaxrun cannot tell which of Gloo's connections %s needs", executed, exc_info=error)
            return []
        return [group for group in groups if self._needs_opening({device.process_index for device in group}, group)]

    def _needs_opening(self, ranks: set[int], group: Sequence[Any]) -> bool:
        return self._rank in ranks and len(ranks) > 1 and _ids(group) not in self._open

    def _open_group(self, devices: Sequence[Any]) -> BaseException | None:
        """Wait until all ranks of the group are here, and connect them. Raises JAX's error if that fails.

        Returns an exception that a signal handler raised meanwhile, or None.
        """
        ids = _ids(devices)
        with self._locks.setdefault(ids, threading.Lock()):
            if ids in self._open:
                return None
            connect = jax_private.compile_all_reduce(devices)
            ranks = sorted({device.process_index for device in devices})
            name = f"{_KEY_PREFIX}/{','.join(map(str, ids))}"
            held = _finish(lambda: jax_private.meet(name, self._rank, ranks))
            self._open.add(ids)
            if connect is not None:
                connect()
            return held


def _finish(step: Callable[[], None]) -> BaseException | None:
    """Run a step of JAX until it returns. Returns the exception of a signal handler that interrupted it, or None.

    Python calls a handler after the step's native code has returned. So the step is repeated, and completes the next
    time. Raises JAX's errors, and an exception that interrupts every one of many attempts.
    """
    held: BaseException | None = None
    for _ in range(_MAX_INTERRUPTIONS):
        try:
            step()
            return held
        except jax_private.runtime_error():
            raise
        except BaseException as error:
            held = error
    assert held is not None
    raise held


def _ids(devices: Sequence[Any]) -> tuple[int, ...]:
    return tuple(device.id for device in devices)
