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

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakSet

from jaxrun.protocol.env import WorkerEnv
from jaxrun.text import agree, format_ranks
from jaxrun_runtime import jax_private, linux
from jaxrun_runtime.exceptions import SpentOrderError
from jaxrun_runtime.gloo.program_groups import find_groups
from jaxrun_runtime.lockstep import call_hooks, program_facts

_log = logging.getLogger("jaxrun")
_KEY_PREFIX = "jaxrun/gloo"
_MAX_INTERRUPTIONS = 100

FileIdentity = tuple[int, int]  # device and inode


def open_before_first_use(env: WorkerEnv) -> GlooConnections | None:
    """Open the connections of each group before the first program that needs them runs, from now on.

    Returns None if this job has no such connections, or this JAX cannot open them.
    """
    if env.size == 1 or not call_hooks.can_hook_executions() or not jax_private.uses_gloo():
        return None
    connections = GlooConnections(env.rank, may_lose_ranks=env.keep_survivors)
    call_hooks.hook_executions(connections.execute, (__file__,))
    return connections


class GlooConnections:
    """Opens the connections of groups for this rank, once each. A group is the ids of its devices, in order."""

    def __init__(self, rank: int, *, may_lose_ranks: bool = False) -> None:
        """`may_lose_ranks`: this rank outlives others, which `close_groups_of` names, and some come back."""
        self._rank = rank
        self._may_lose_ranks = may_lose_ranks
        self._lost: dict[int, int] = {}  # rank → the last incarnation of it that was lost
        self._live: Mapping[int, int] = {}  # rank → its incarnation; 1 for ranks that are not in it
        self._change = threading.Condition()  # a rank is lost, or connections are open
        # Rank → incarnation, of groups that are open, or are being opened.
        self._members: dict[tuple[int, ...], dict[int, int]] = {}
        self._connections: dict[tuple[int, ...], set[FileIdentity]] = {}
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
            for devices in self._groups_to_open(executed):
                held = self._open_group(devices) or held
            self._seen.add(executed)
        result = original(executed, *args)
        if held is not None:
            raise held
        return result

    def _groups_to_open(self, executed: Any) -> list[Sequence[Any]]:
        """Return the program's groups that include this rank and others and are not open, in the program's order.

        Raises SpentOrderError if one can never be open again.
        """
        groups = self._groups_of(executed)
        for group in groups:
            self._check_order(group)
        return [group for group in groups if _ids(group) not in self._open]

    def _check_order(self, group: Sequence[Any]) -> None:
        """Raise SpentOrderError if these devices were connected in this order when one of their ranks was another.

        XLA keeps what it has made for them then, whose connections are lost.
        """
        members = self._members.get(_ids(group), {})
        spent = {rank for rank, number in members.items() if number < self._live.get(rank, 1)}
        is_back = not members and self._live.get(self._rank, 1) > 1
        if is_back and jax_private.has_met(_meeting(_ids(group)), self._rank):
            spent = {self._rank}
        if spent:
            ranks = ", ".join(str(device.process_index) for device in group)
            raise SpentOrderError(
                f"on CPU the devices of ranks {ranks} cannot exchange data in this order again, since "
                f"{format_ranks(spent)} came back: use the order of live_devices, or start all again "
                "(docs/survivors.md)"
            )

    def _groups_of(self, executed: Any) -> list[Sequence[Any]]:
        """Return the program's groups that include this rank and others, in the program's order."""
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
        ranks_of = [{device.process_index for device in group} for group in groups]
        return [group for group, ranks in zip(groups, ranks_of, strict=True) if self._rank in ranks and len(ranks) > 1]

    def _open_group(self, devices: Sequence[Any]) -> BaseException | None:
        """Wait until all ranks of the group are here, and connect them. Raises JAX's error if that fails.

        Returns an exception that a signal handler raised meanwhile, or None.
        """
        ids = _ids(devices)
        with self._locks.setdefault(ids, threading.Lock()):
            if ids in self._open:
                return None
            connect = jax_private.compile_all_reduce(devices)
            ranks = {device.process_index for device in devices}
            self._members[ids] = {rank: self._live.get(rank, 1) for rank in ranks}
            self._check(ranks)
            held = _finish(lambda: jax_private.meet(_meeting(ids), self._rank, sorted(ranks)))
            self._open.add(ids)
            if connect is not None and not self._may_lose_ranks:
                connect()
            elif connect is not None:
                before = _identities()
                self._connect_unless_lost(connect, ranks)
                self._connections[ids] = _identities() - before
            self._check(ranks)
            return held

    def _check(self, ranks: set[int]) -> None:
        """Raise JAX's error if any of these ranks is lost."""
        if gone := self._find_lost(ranks):
            raise jax_private.runtime_error()(f"{format_ranks(gone)} {agree('was', len(gone))} lost")

    def _find_lost(self, ranks: set[int]) -> set[int]:
        return {rank for rank in ranks if self._lost.get(rank, 0) >= self._live.get(rank, 1)}

    def _connect_unless_lost(self, connect: Callable[[], object], ranks: set[int]) -> None:
        """Connect these ranks. Raises JAX's error at once if one is lost, for which Gloo would wait for 30 s.

        A thread of its own connects; if it still waits then, it is left behind.
        """
        ends: list[BaseException | None] = []

        def run() -> None:
            error: BaseException | None = None
            try:
                connect()
            except BaseException as raised:
                error = raised
            with self._change:
                ends.append(error)
                self._change.notify_all()

        threading.Thread(target=run, name="jaxrun-gloo", daemon=True).start()
        with self._change:
            self._change.wait_for(lambda: ends or self._find_lost(ranks))
        if ends and ends[0] is not None:
            raise ends[0]

    def set_live(self, incarnations: Mapping[int, int]) -> None:
        """Note which process each of these ranks is from now on."""
        self._live = {**self._live, **incarnations}

    def close_groups_of(self, lost: Mapping[int, int]) -> None:
        """Close the connections of all groups that these processes, rank → incarnation, were in.

        Whatever waits there raises JAX's error.
        """
        with self._change:
            self._lost |= {rank: max(number, self._lost.get(rank, 0)) for rank, number in lost.items()}
            self._change.notify_all()
        members = [*self._members.items()]
        groups = [ids for ids, ranks in members if any(ranks[rank] <= self._lost.get(rank, 0) for rank in ranks)]
        for ids in groups:
            jax_private.give_up_meeting(_meeting(ids), self._members[ids])
        closed = set[FileIdentity]().union(*(self._connections.get(ids, ()) for ids in groups))
        for connection in linux.tcp_connections():
            with connection, contextlib.suppress(OSError):
                if linux.file_identity(connection.fileno()) in closed:
                    connection.shutdown(socket.SHUT_RDWR)


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


def _meeting(ids: Sequence[int]) -> str:
    """Return the name under which the ranks of a group wait for each other."""
    return f"{_KEY_PREFIX}/{','.join(map(str, ids))}"


def _identities() -> set[FileIdentity]:
    """Return which TCP connections this process has."""
    found = set()
    for connection in linux.tcp_connections():
        with connection:
            found.add(linux.file_identity(connection.fileno()))
    return found


def _ids(devices: Sequence[Any]) -> tuple[int, ...]:
    return tuple(device.id for device in devices)
