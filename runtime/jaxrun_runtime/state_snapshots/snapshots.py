"""snapshot and restore: the state of the program in the memory of its hosts, two snapshots at a time.

All ranks take a snapshot at the same step. What they say to each other about it goes by the key-value table of JAX's
coordinator, the bytes by connections of their own (peers.py). The older of two snapshots is given up only once the
later one is whole on all hosts.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import threading
import zlib
from base64 import b85decode, b85encode
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import RESTORE, SNAPSHOT
from jaxrun.protocol.names import COORDINATOR_ADDRESS, JOB_ID
from jaxrun.text import format_bytes
from jaxrun_runtime import checkpoints, jax_private, join, joint_calls
from jaxrun_runtime.state_snapshots import arrays, placement
from jaxrun_runtime.state_snapshots.host_memory import SLOTS, HostMemory, read_region
from jaxrun_runtime.state_snapshots.peers import PeerMemory, RankServer
from jaxrun_runtime.state_snapshots.placement import Bounds, KeptRegion, Places, Region, StateSnapshot


class RestoredState(NamedTuple):
    """What `restore` found: the state as it was after `step`."""

    step: int
    state: Any


def snapshot(step: int, state: Any) -> None:
    """Keep `state`, a pytree of jax.Arrays, in the memory of the job's hosts, for `restore` in the next attempt.

    Call it on all ranks after the same step. It returns once the state is copied; then the program may donate it. The
    rest, a copy of each part to another host included, is done in the background, and the next call waits for it.
    Once all of it is done, the step counts as saved. Two snapshots are kept. They outlive ranks, agents and any hosts
    that are not neighbours in the job's list of hosts, and go with the job. Without jaxrun it does nothing.

    Raises MemoryError if a host has less than they take (at most twice the state), TypeError for a leaf that is not a
    jax.Array of all ranks.
    """
    number = operator.index(step)
    if JOB_ID in os.environ:
        with joint_calls.JointCall(SNAPSHOT):
            _keeper().take(number, state)


def restore(like: Any) -> RestoredState | None:
    """The latest snapshot that is whole over all hosts, with the shardings of `like`; None if none is.

    Call it on all ranks; all get the same step. `like` is a pytree of jax.Arrays, or of jax.ShapeDtypeStructs with
    shardings; other shardings, devices or ranks than those of the snapshot are fine. Raises ValueError if the snapshot
    is of another structure.
    """
    if JOB_ID not in os.environ:
        return None
    with joint_calls.JointCall(RESTORE):
        return _keeper().restore(like)


_made: SnapshotKeeper | None = None


def _keeper() -> SnapshotKeeper:
    global _made
    if _made is None:
        _made = SnapshotKeeper(WorkerEnv.from_env(os.environ))
    return _made


class SnapshotKeeper:
    """One rank's side of the snapshots of one attempt. Made, and used, by all ranks at the same time."""

    def __init__(self, env: WorkerEnv) -> None:
        """Raises OSError, or RuntimeError if this JAX lacks the table."""
        self._env = env
        self._exchanges = self._taken = 0
        self._is_restored = False
        self._background: threading.Thread | None = None
        self._completed_by = 0  # the number of the call of `snapshot` that has started it
        self._failure: BaseException | None = None
        self._laid_out_for: Any = None
        self._share: Sequence[KeptRegion] = ()
        self._peers: dict[int, PeerMemory] = {}
        self._memory = HostMemory(env.job_id, env.host)
        ip = join.local_address_towards(os.environ[COORDINATOR_ADDRESS])
        self._server = RankServer(self._memory, env.rank_token, ip)
        places = self._exchange([env.host, self._server.address])
        self._hosts, self._addresses = ([place[n] for place in places] for n in (0, 1))

    # ---- taking

    def take(self, step: int, state: Any) -> None:
        self._wait()
        leaves, _, structure = arrays.flatten(state, self._env.size)
        self._lay_out(leaves)
        if self._taken == (1 if self._is_restored else 0) and self._env.local_rank == 0:
            self._memory.remove_before(self._env.attempt)
        snapshot = StateSnapshot(self._env.attempt, self._taken, step, structure)
        data = {
            (number, arrays.bounds_of(shard.index, leaf)): shard.data
            for number, leaf in enumerate(leaves)
            for shard in leaf.addressable_shards
        }
        mine = [(kept, data[kept.region.leaf, kept.region.bounds]) for kept in self._share]
        for _, array in mine:
            array.copy_to_host_async()
        for kept, array in mine:
            self._memory.begin(snapshot, kept, arrays.to_bytes(array))
        self._taken += 1
        self._background = threading.Thread(
            target=lambda: self._complete(snapshot), name="jaxrun-snapshot", daemon=True
        )
        self._completed_by = joint_calls.calls_made(SNAPSHOT)
        self._background.start()

    def _lay_out(self, leaves: list[Any]) -> None:
        """Decide what this rank keeps; at first, whether each host has the memory. Raises MemoryError."""
        described = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves]
        if described == self._laid_out_for:
            return
        shares = placement.share_out(arrays.regions(leaves), self._hosts)
        by_host = placement.memory_by_host(shares, self._hosts)
        needed, there = SLOTS * by_host[self._env.host], self._memory.available_bytes()
        if needed > there:
            raise MemoryError(
                f"snapshots of this state take {format_bytes(needed)} of memory on {self._env.host}, in /dev/shm, but "
                f"{format_bytes(max(0, there))} are free there; use more hosts, or checkpoints on disk instead"
            )
        if self._env.rank == 0:
            most = format_bytes(SLOTS * max(by_host.values()))
            print(f"jaxrun: snapshots take up to {most} of memory on each host", file=sys.stderr, flush=True)
        self._share = [kept for kept in shares if self._env.rank in kept.keepers]
        self._laid_out_for = described

    def _complete(self, snapshot: StateSnapshot) -> None:
        """Make the snapshot whole on this host and on the next one, and wait until all ranks have."""
        try:
            for kept in self._share:
                self._memory.complete(snapshot, kept, [self._memory_of(rank).write for rank in kept.copies])
            if self._env.size > 1:
                jax_private.wait_at_barrier(f"jaxrun/snapshots/{snapshot.number}")
            if self._env.rank == 0:
                checkpoints.saved(snapshot.step)
        except BaseException as error:
            self._failure = error

    def _wait(self) -> None:
        """Wait until the snapshot before is whole. Raises what has kept it from being so."""
        if self._background is not None:
            joint_calls.JointCall(SNAPSHOT).wait(self._completed_by, self._background.join)
        if self._failure is not None:
            raise RuntimeError(f"the snapshot before this one is not whole: {self._failure}") from None

    # ---- restoring

    def restore(self, like: Any) -> RestoredState | None:
        self._wait()
        self._is_restored = True
        env, (leaves, treedef, structure) = self._env, arrays.flatten(like, self._env.size)
        found = [self._memory.find_whole(name) for name in self._memory.names()[env.local_rank :: env.local_size]]
        listed = [
            (rank, StateSnapshot(*snapshot), Region(leaf, tuple((start, stop) for start, stop in bounds)))
            for rank, files in enumerate(self._exchange([one for one in found if one is not None]))
            for snapshot, (leaf, bounds) in files
        ]
        snapshots = placement.gather(listed, self._hosts, env.host)
        if any(snapshot.structure != structure for snapshot in snapshots):
            raise ValueError("the snapshots in memory are of a state with other leaves, shapes or types than `like`")
        wholes = [arrays.whole_of(leaf) for leaf in leaves]
        chosen = max((one for one, places in snapshots.items() if placement.is_whole(places, wholes)), default=None)
        if env.local_rank == 0:
            self._memory.remove_before(env.attempt, but=chosen)
        if chosen is None:
            if snapshots and env.rank == 0:
                lost = f"hosts that kept parts of step {max(snapshots).step} are lost"
                text = f"no snapshot in memory is whole, as {lost}; go on from the checkpoint on disk"
                print(f"jaxrun: {text}", file=sys.stderr, flush=True)
            return None
        places = snapshots[chosen]
        made = [
            arrays.make_array(leaf, lambda bounds, n=n, leaf=leaf: self._load(chosen, places, n, leaf, bounds))  # type: ignore[misc]
            for n, leaf in enumerate(leaves)
        ]
        return RestoredState(chosen.step, treedef.unflatten(made))

    def _load(self, snapshot: StateSnapshot, places: Places, number: int, leaf: Any, bounds: Bounds) -> NDArray[Any]:
        """A region of an array, from one kept region, or made of several."""
        made = np.empty([stop - start for start, stop in bounds], np.dtype(leaf.dtype))
        for there, rank in (placement.cover(places, number, bounds) or {}).items():
            nbytes = placement.volume(there) * made.itemsize
            data = read_region(self._memory_of(rank).read, snapshot, Region(number, there), nbytes)
            kept = np.frombuffer(data, made.dtype).reshape([stop - start for start, stop in there])
            common = placement.overlap(there, bounds)
            assert common is not None
            made[_slices(common, bounds)] = kept[_slices(common, there)]
        return made

    # ---- the other ranks

    def _memory_of(self, rank: int) -> HostMemory | PeerMemory:
        """That of the host of this rank."""
        if self._hosts[rank] == self._env.host:
            return self._memory
        if rank not in self._peers:
            self._peers[rank] = PeerMemory(rank, self._addresses[rank], self._env.rank_token, self._env.rank)
        return self._peers[rank]

    def _exchange(self, value: Any) -> list[Any]:
        """What each rank gives, by rank; JSON. Raises RuntimeError if this JAX cannot do that."""
        self._exchanges += 1
        text = b85encode(zlib.compress(json.dumps(value).encode())).decode()
        texts = [text]
        if self._env.size > 1:
            table = f"jaxrun/snapshots/{self._exchanges}"
            texts = joint_calls.wait_for_ranks(jax_private.exchange, table, self._env.rank, self._env.size, text)
        return [json.loads(zlib.decompress(b85decode(one))) for one in texts]


def _slices(part: Bounds, whole: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, whole, strict=True))
