"""Communication with the other ranks of an attempt: exchanges, agreements, and access to the memory of their hosts.

Ranks exchange small values through the key-value table of JAX's coordinator, and bytes through their own connections
(peers.py). All ranks make the same calls in the same order.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import zlib
from base64 import b85decode, b85encode
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.names import COORDINATOR_ADDRESS
from jaxrun_runtime import jax_private, join, joint_calls
from jaxrun_runtime.state_snapshots import structure
from jaxrun_runtime.state_snapshots.host_memory import HostMemory
from jaxrun_runtime.state_snapshots.peers import PeerMemory, RankServer

_IN_THE_WAY = (errno.EPERM, errno.ELOOP, errno.ENOTDIR)  # another user has put something there, or it is a link
_rounds = itertools.count()  # numbers the exchanges, because each name in the table can be used once


class OtherRanks:
    """All ranks of the attempt, for one of them.

    memory:  the snapshots' files on this rank's host
    hosts:   host names, by rank
    """

    memory: HostMemory

    def __init__(self, env: WorkerEnv) -> None:
        """Raises RuntimeError, on all ranks, if one of them cannot keep snapshots, or this JAX lacks the table.

        Also with --keep-survivors, where some may die.
        """
        if env.keep_survivors:
            raise RuntimeError("snapshots need all ranks; with --keep-survivors those that live have the state")
        self._env = env
        self._peers: dict[int, PeerMemory] = {}
        address, wrong = "", []
        try:
            self.memory = HostMemory(env.job_id, env.host)
            ip = join.local_address_towards(os.environ[COORDINATOR_ADDRESS])
            self._server = RankServer(self.memory, env.rank_token, ip)
            address = self._server.address
        except OSError as error:
            wrong = [_describe(error, env.host)]
        told = self.exchange([env.host, address, wrong])
        self.hosts, self._addresses, wrongs = (list(column) for column in zip(*told, strict=True))
        if lines := dict.fromkeys(line for wrong in wrongs for line in wrong):
            raise RuntimeError(structure.join_lines("snapshots cannot be kept", lines))

    def exchange(self, value: Any) -> list[Any]:
        """Exchange a JSON value with all ranks; returns their values by rank. Raises RuntimeError if JAX cannot."""
        texts = [_encode(value)]
        if self._env.size > 1:
            with _round(self._env.rank) as name:
                texts = joint_calls.wait_for_ranks(jax_private.exchange, name, self._env.rank, self._env.size, texts[0])
        return [_decode(text) for text in texts]

    def agree(self, value: Any, decide: Callable[[Sequence[Any]], Any]) -> Any:
        """Let rank 0 decide on the JSON values of all ranks; returns its decision. Takes two messages per rank.

        decide:  called on rank 0 with the values by rank

        Raises RuntimeError if this JAX cannot do that, or if `decide` raises.
        """

        def decide_on_texts(texts: Sequence[str]) -> str:
            try:
                return _encode([decide([_decode(text) for text in texts]), ""])
            except Exception as error:  # the others must not wait forever
                return _encode([None, f"rank 0 cannot decide: {type(error).__name__}: {error}"])

        if self._env.size == 1:
            text = decide_on_texts([_encode(value)])
        else:
            with _round(self._env.rank) as name:
                text = joint_calls.wait_for_ranks(
                    jax_private.agree, name, self._env.rank, self._env.size, _encode(value), decide_on_texts
                )
        decided, error = _decode(text)
        if error:
            raise RuntimeError(error)
        return decided

    def merge_failures(self, failure: str) -> str:
        """Return what failed on which ranks, as text; empty if nothing failed on any rank."""
        text: str = self.agree(failure, self._merge)
        if text:
            self._peers.clear()  # one of the connections may be lost
        return text

    def _merge(self, failures: Sequence[str]) -> str:
        failed = [f"rank {rank} ({self.hosts[rank]}): {failure}" for rank, failure in enumerate(failures) if failure]
        return "; ".join(failed)

    def memory_of(self, rank: int) -> HostMemory | PeerMemory:
        """Return the snapshots' files on the host of this rank."""
        if self.hosts[rank] == self._env.host:
            return self.memory
        if rank not in self._peers:
            self._peers[rank] = PeerMemory(rank, self._addresses[rank], self._env.rank_token, self._env.rank)
        return self._peers[rank]


def _describe(error: OSError, host: str) -> str:
    if not error.filename:
        return f"on {host}: {error}"
    advice = "; have it removed" if error.errno in _IN_THE_WAY else ""
    return f"{error.filename} on {host}: {error.strerror}{advice}"


@contextlib.contextmanager
def _round(rank: int) -> Iterator[str]:
    """Yield the name of the next exchange in the table. After it, deletes the entries of the exchange before it."""
    number = next(_rounds)
    yield f"jaxrun/snapshots/{number}"
    if number and rank == 0:
        jax_private.forget(f"jaxrun/snapshots/{number - 1}")


def _encode(value: Any) -> str:
    return b85encode(zlib.compress(json.dumps(value).encode())).decode()


def _decode(text: str) -> Any:
    return json.loads(zlib.decompress(b85decode(text)))
