"""The fixture `gang` of a test on a rank, with gathers and faults, and debuggers. All of them use the parent process.

Gathers go through the parent, not through JAX: the parent knows when a rank will never come, and the ranks' collectives
are not disturbed. A debugger reads from and writes to the parent's terminal.
"""

from __future__ import annotations

import contextlib
import itertools
import pdb
import pickle
import time
from types import FrameType, TracebackType
from typing import Any

import pytest

import jaxrun_runtime
from jaxrun.protocol.debugger_messages import DebuggerClosed, DebuggerInput, DebuggerOutput, DebuggerReadRequest
from jaxrun.protocol.flight_file import GANG_ALLGATHER, GANG_BARRIER, GANG_BROADCAST
from jaxrun.protocol.pytest_messages import FaultRequest, Gather, Gathered, PeerLost
from jaxrun_runtime import debugger, joint_calls
from jaxrun_runtime.gang import calls
from jaxrun_runtime.gang.calls import CallerConnection

_OWN_DEATH_TIMEOUT_S = 60.0  # wait of a rank that has asked to be killed
_read_numbers = itertools.count(1)  # of the DebuggerReadRequests of this process


class PeerLostError(RuntimeError):
    """Raised when this rank waits for other ranks, and one of them will never come."""


class RankGang:
    """This rank, and the other ranks of its test.

    rank, size:        number of this process; number of processes
    local_rank, host:  number of this process on its host; the host's name
    devices:           number of devices of this process
    is_main:           rank == 0
    """

    def __init__(self, parent: CallerConnection) -> None:
        self.rank = parent.rank
        self.size = parent.size
        self.local_rank: int = jaxrun_runtime.local_rank
        self.host: str = jaxrun_runtime.host
        self.is_main = parent.rank == 0
        self._parent = parent

    def __repr__(self) -> str:
        return f"<gang: rank {self.rank} of {self.size}>"

    @property
    def devices(self) -> int:
        import jax

        return len(jax.local_devices())

    def barrier(self, name: str = "") -> None:
        """Wait until all ranks have called this with the same `name`."""
        __tracebackhide__ = True
        self._gather(GANG_BARRIER, f"gang.barrier({name!r})" if name else "gang.barrier()", None)

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. `value`: anything small that can be pickled."""
        __tracebackhide__ = True
        return [pickle.loads(one) for one in self._gather(GANG_ALLGATHER, "gang.allgather()", value)]

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        """Return the value of rank `root`, on all ranks."""
        __tracebackhide__ = True
        if root not in range(self.size):
            raise ValueError(f"root={root!r} is not one of the ranks 0 to {self.size - 1}")
        own = value if self.rank == root else None
        return pickle.loads(self._gather(GANG_BROADCAST, f"gang.broadcast(root={root})", own, root)[0])

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL, once even if all ranks call this. It never returns on that rank."""
        __tracebackhide__ = True
        self._request_fault("kill", rank)

    def pause(self, rank: int) -> None:
        """Stop a rank with SIGSTOP. The process stays alive, but does nothing."""
        __tracebackhide__ = True
        self._request_fault("pause", rank)

    def begin_test(self) -> None:
        """Reset the counts of joint calls: in the previous test, ranks may have made different numbers of calls."""
        joint_calls.forget(GANG_BARRIER, GANG_ALLGATHER, GANG_BROADCAST)

    def _gather(self, function: str, where: str, value: Any, root: int = -1) -> tuple[bytes, ...]:
        __tracebackhide__ = True
        with joint_calls.JointCall(function):
            self._parent.send(Gather(where, pickle.dumps(value), root))
            answer = joint_calls.wait_for_ranks(self._parent.receive)
        if isinstance(answer, Gathered):
            return answer.values
        assert isinstance(answer, PeerLost)
        raise PeerLostError(f"{where}: {answer.reason}")

    def _request_fault(self, kind: str, rank: int) -> None:
        __tracebackhide__ = True
        if rank not in range(self.size):
            raise ValueError(f"gang.{kind}({rank!r}): the ranks are 0 to {self.size - 1}")
        self._parent.send(FaultRequest(kind, rank))
        if kind == "kill" and rank == self.rank:
            time.sleep(_OWN_DEATH_TIMEOUT_S)
            pytest.fail(f"this rank asked to be killed, but still lives after {_OWN_DEATH_TIMEOUT_S:g} s")


# ---- debuggers: --pdb and breakpoint()


class RelayedPdb(pdb.Pdb):
    """A pdb that reads from and writes to the parent's terminal, and gives it up when the program continues."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._terminal = _ParentTerminal(calls.current_call())
        self._is_left = False
        super().__init__(*arguments, **{**options, **debugger.relayed(self._terminal)})

    def interaction(self, frame: FrameType | None, *more: Any) -> None:
        self._is_left = frame is None  # a post mortem ends with its one interaction
        try:
            super().interaction(frame, *more)
        except BaseException:  # of the command q, for instance, or of a signal handler
            with contextlib.suppress(calls.CallEnded):
                self._terminal.close()
            raise
        if self._is_left:
            self._terminal.close()

    def set_continue(self) -> None:
        self._is_left = True
        super().set_continue()

    def set_quit(self) -> None:
        self._is_left = True
        super().set_quit()


def post_mortem(error: BaseException) -> None:
    """Open a debugger where `error` was raised; returns when the user leaves it."""
    with contextlib.suppress(calls.CallEnded):
        debugger.inspect_error(RelayedPdb(), error, _is_pytest_frame)


def _is_pytest_frame(frames: TracebackType) -> bool:
    """Whether the frame is pytest's own. Such frames are above all frames of the user."""
    return str(frames.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in ("_pytest", "pluggy")


class _ParentTerminal:
    def __init__(self, parent: CallerConnection) -> None:
        self._parent = parent

    def write(self, text: str) -> None:
        self._parent.send(DebuggerOutput(self._parent.rank, text))

    def read_line(self) -> str:
        number = next(_read_numbers)
        self._parent.send(DebuggerReadRequest(self._parent.rank, number))
        while True:
            answer = self._parent.receive()
            if not isinstance(answer, DebuggerInput):
                return ""
            # Any other line is for an earlier request, whose wait was ended by an exception.
            if answer.number == number:
                return answer.line

    def close(self) -> None:
        self._parent.send(DebuggerClosed(self._parent.rank))
