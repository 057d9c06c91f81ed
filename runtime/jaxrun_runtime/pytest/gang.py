"""The fixture `gang` on a rank: who am I, where do we meet, and what shall befall us.

Ranks meet by way of the parent, which knows when one will never come, and not by JAX: no collective is disturbed.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest

import jaxrun_runtime
from jaxrun.protocol.pytest_messages import FaultRequest, Gather, Gathered, PeerLost
from jaxrun_runtime.gang_worker import ParentConnection

_OWN_DEATH_TIMEOUT_S = 60.0  # seconds that a rank waits for its own fault


class PeerLostError(RuntimeError):
    """A rank has waited for others, of which one will never come."""


class RankGang:
    """This rank, and the others of its test.

    rank, size:        of this process, and of all
    local_rank, host:  where it is
    devices:           how many it has
    is_main:           whether it is rank 0
    """

    def __init__(self, talk: ParentConnection) -> None:
        self.rank = talk.rank
        self.size = talk.size
        self.local_rank: int = jaxrun_runtime.local_rank
        self.host: str = jaxrun_runtime.host
        self.is_main = talk.rank == 0
        self._parent = talk

    def __repr__(self) -> str:
        return f"<gang: rank {self.rank} of {self.size}>"

    @property
    def devices(self) -> int:
        import jax

        return len(jax.local_devices())

    def barrier(self, name: str = "") -> None:
        """Wait until all ranks are here; `name` must be the same on all."""
        __tracebackhide__ = True
        self._gather(f"gang.barrier({name!r})" if name else "gang.barrier()", None)

    def allgather(self, value: Any) -> list[Any]:
        """What all ranks bring, by rank: anything small that can be pickled."""
        __tracebackhide__ = True
        return [pickle.loads(one) for one in self._gather("gang.allgather()", value)]

    def broadcast(self, value: Any = None, root: int = 0) -> Any:
        """What rank `root` brings, on all."""
        __tracebackhide__ = True
        if root not in range(self.size):
            raise ValueError(f"root={root!r} is none of the ranks 0 to {self.size - 1}")
        own = value if self.rank == root else None
        return pickle.loads(self._gather(f"gang.broadcast(root={root})", own, root)[0])

    def kill(self, rank: int) -> None:
        """Kill a rank with SIGKILL. All ranks may say so; it happens once. On that rank this never returns."""
        __tracebackhide__ = True
        self._request_fault("kill", rank)

    def pause(self, rank: int) -> None:
        """Stop a rank with SIGSTOP: it lives, and does nothing."""
        __tracebackhide__ = True
        self._request_fault("pause", rank)

    def cut(self, rank: int) -> None:
        """Break all network connections of a rank, as a lost network does."""
        __tracebackhide__ = True
        self._request_fault("cut", rank)

    def _gather(self, where: str, value: Any, root: int = -1) -> tuple[bytes, ...]:
        __tracebackhide__ = True
        self._parent.send(Gather(where, pickle.dumps(value), root))
        answer = self._parent.receive()
        if isinstance(answer, Gathered):
            return answer.values
        assert isinstance(answer, PeerLost)
        raise PeerLostError(f"{where}: {answer.why}")

    def _request_fault(self, kind: str, rank: int) -> None:
        __tracebackhide__ = True
        if rank not in range(self.size):
            raise ValueError(f"gang.{kind}({rank!r}): the ranks are 0 to {self.size - 1}")
        self._parent.send(FaultRequest(kind, rank))
        if kind == "kill" and rank == self.rank:
            time.sleep(_OWN_DEATH_TIMEOUT_S)
            pytest.fail(f"this rank was to be killed, and is still there after {_OWN_DEATH_TIMEOUT_S:g} s")
