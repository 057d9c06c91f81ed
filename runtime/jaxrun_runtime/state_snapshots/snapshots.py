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
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jaxrun.protocol.codec import from_content, to_content
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.names import COORDINATOR_ADDRESS, JOB_ID
from jaxrun.text import format_bytes
from jaxrun_runtime import checkpoints, jax_private, join
from jaxrun_runtime.state_snapshots import arrays, layout
from jaxrun_runtime.state_snapshots.host_memory import OWN, Draft, HostMemory, checksums, chunks
from jaxrun_runtime.state_snapshots.layout import Bounds, Manifest, Pieces, RankShare, SnapshotFile
from jaxrun_runtime.state_snapshots.peers import PeerConnection, RankServer, connect_to_rank

_SNAPSHOTS_AT_A_TIME = 2


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

    Raises MemoryError if a host has less than they take (at most twice the state), TypeError for another leaf.
    """
    number = operator.index(step)
    if JOB_ID in os.environ:
        _keeper().take(number, state)


def restore(like: Any) -> RestoredState | None:
    """The latest snapshot that is whole over all hosts, with the shardings of `like`; None if none is.

    Call it on all ranks; all get the same step. `like` is a pytree of jax.Arrays, or of jax.ShapeDtypeStructs with
    shardings; other shardings, devices or ranks than those of the snapshot are fine. Raises ValueError if the snapshot
    is of another structure.
    """
    return _keeper().restore(like) if JOB_ID in os.environ else None


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
        self._failure: BaseException | None = None
        self._laid_out_for: Any = None
        self._share = RankShare((), 0, 0)
        self._peers: dict[int, PeerConnection] = {}
        self._memory = HostMemory(env.job_id, env.host, env.attempt)
        ip = join.local_address_towards(os.environ[COORDINATOR_ADDRESS])
        self._server = RankServer(self._memory, env.rank_token, ip)
        places = self._exchange([env.host, self._server.address])
        self._hosts, self._addresses = ([place[n] for place in places] for n in (0, 1))
        self._keeper_of_copy = layout.keeper_of_copy(env.rank, self._hosts)

    # ---- taking

    def take(self, step: int, state: Any) -> None:
        self._wait()
        leaves, _, structure = arrays.flatten(state)
        self._lay_out(leaves)
        if self._taken == (1 if self._is_restored else 0) and self._env.local_rank == 0:
            self._memory.remove(earlier=True)
        draft = self._memory.begin(self._env.rank, OWN, self._share.nbytes)
        data = {number: arrays.local_data(leaves[number]) for number in {piece.leaf for piece in self._share.pieces}}
        for piece in self._share.pieces:
            data[piece.leaf][piece.bounds].copy_to_host_async()
        for piece in self._share.pieces:
            draft.write(arrays.to_bytes(data[piece.leaf].pop(piece.bounds)), piece.offset)
        self._taken += 1
        self._background = threading.Thread(
            target=self._complete, args=(draft, step, structure), name="jaxrun-snapshot", daemon=True
        )
        self._background.start()

    def _lay_out(self, leaves: list[Any]) -> None:
        """Decide what this rank keeps; at first, whether each host has the memory. Raises MemoryError."""
        described = [(leaf.shape, leaf.dtype, leaf.sharding) for leaf in leaves]
        if described == self._laid_out_for:
            return
        shares = layout.share_out(arrays.regions(leaves, self._env.rank, self._env.size), self._hosts)
        by_host = layout.memory_by_host(shares, self._hosts)
        needed, there = _SNAPSHOTS_AT_A_TIME * by_host[self._env.host], self._memory.available_bytes()
        if needed > there:
            raise MemoryError(
                f"snapshots of this state take {format_bytes(needed)} of memory on {self._env.host}, in /dev/shm, but "
                f"{format_bytes(max(0, there))} are free there; use more hosts, or checkpoints on disk instead"
            )
        if self._env.rank == 0:
            most = format_bytes(_SNAPSHOTS_AT_A_TIME * max(by_host.values()))
            print(f"jaxrun: snapshots take up to {most} of memory on each host", file=sys.stderr, flush=True)
        self._share, self._laid_out_for = shares[self._env.rank], described

    def _complete(self, draft: Draft, step: int, structure: str) -> None:
        """Make the snapshot whole on this host and on the next one, and wait until all ranks have."""
        try:
            share, parts = self._share, chunks(self._share.sole_bytes, self._share.nbytes)
            sums = checksums(draft.fd, parts)
            manifest = Manifest(self._env.attempt, step, structure, share.nbytes, share.pieces, sums)
            name = self._memory.commit(draft, manifest)
            if self._keeper_of_copy is not None and share.sole_bytes:
                self._send_copy(self._peer(self._keeper_of_copy), name, manifest.of_copy(share.sole_bytes))
            if self._env.size > 1:
                jax_private.wait_at_barrier(f"jaxrun/snapshots/{self._taken}")
            if self._env.rank == 0:
                checkpoints.saved(step)
        except BaseException as error:
            self._failure = error

    def _send_copy(self, peer: PeerConnection, name: str, manifest: Manifest) -> None:
        peer.send({"keep": manifest.nbytes})
        for offset, nbytes, checksum in manifest.checksums:
            peer.send({"at": offset}, self._memory.read(name, offset, nbytes), checksum)
        peer.send({"manifest": manifest})
        peer.receive()

    def _wait(self) -> None:
        """Wait until the snapshot before is whole. Raises what has kept it from being so."""
        if self._background is not None:
            self._background.join()
        failure = self._failure or self._server.failure
        if failure is not None:
            raise RuntimeError(f"the snapshot before this one is not whole: {failure}") from None

    # ---- restoring

    def restore(self, like: Any) -> RestoredState | None:
        self._wait()
        self._is_restored = True
        env, (leaves, treedef, structure) = self._env, arrays.flatten(like)
        verified = {name: self._memory.verify(name) for name in self._memory.names()[env.local_rank :: env.local_size]}
        listed = self._exchange([[name, manifest] for name, manifest in verified.items() if manifest is not None])
        files = [
            SnapshotFile(host, name, from_content(Manifest, content))
            for host, found in zip(self._hosts, listed, strict=True)
            for name, content in found
        ]
        snapshots = {key: layout.gather(group, env.host) for key, group in layout.by_snapshot(files)}
        if any(file.manifest.structure != structure for file in files):
            raise ValueError("the snapshots in memory are of a state with other leaves, shapes or types than `like`")
        whole = [key for key, pieces in snapshots.items() if self._has_all(pieces, leaves)]
        agreed = set.intersection(*({(attempt, step) for attempt, step in one} for one in self._exchange(whole)))
        chosen = max(agreed, default=None)
        if env.local_rank == 0:
            self._memory.remove(keep=chosen)
        if chosen is None:
            if files and env.rank == 0:
                lost = f"no snapshot in memory is whole, as hosts that kept parts of step {max(snapshots)[1]} are lost"
                print(f"jaxrun: {lost}; go on from the checkpoint on disk", file=sys.stderr, flush=True)
            return None
        pieces = snapshots[chosen]
        made = [
            arrays.make_array(leaf, lambda bounds, n=n, leaf=leaf: self._load(pieces, n, leaf, bounds))  # type: ignore[misc]
            for n, leaf in enumerate(leaves)
        ]
        return RestoredState(chosen[1], treedef.unflatten(made))

    def _has_all(self, pieces: Pieces, leaves: list[Any]) -> bool:
        """Whether all is there that this rank needs."""
        return all(
            layout.cover(pieces, number, arrays.owner_of(leaf, self._env.rank, self._env.size), bounds) is not None
            for number, leaf in enumerate(leaves)
            for bounds in arrays.local_bounds(leaf)
        )

    def _load(self, pieces: Pieces, number: int, leaf: Any, bounds: Bounds) -> NDArray[Any]:
        """A region of an array, from one piece, or made of several."""
        found = layout.cover(pieces, number, arrays.owner_of(leaf, self._env.rank, self._env.size), bounds)
        assert found is not None
        made = np.empty([stop - start for start, stop in bounds], np.dtype(leaf.dtype))
        for placed in found:
            piece, common = placed.piece, layout.overlap(placed.piece.bounds, bounds)
            assert common is not None
            data = arrays.from_bytes(self._read(placed.file, piece.offset, piece.nbytes), leaf, piece.bounds)
            made[_slices(common, bounds)] = data[_slices(common, piece.bounds)]
        return made

    def _read(self, file: SnapshotFile, offset: int, nbytes: int) -> bytes | bytearray:
        """Read from this host, or from one of the ranks of another one."""
        if file.host == self._env.host:
            return self._memory.read(file.name, offset, nbytes)
        there = [rank for rank, host in enumerate(self._hosts) if host == file.host]
        peer, data = self._peer(there[self._env.rank % len(there)]), bytearray()
        for at, part in chunks(nbytes):
            peer.send({"read": file.name, "offset": offset + at, "nbytes": part})
            data += peer.receive()[1]
        return data

    # ---- the other ranks

    def _peer(self, rank: int) -> PeerConnection:
        if rank not in self._peers:
            address, token = self._addresses[rank], self._env.rank_token
            self._peers[rank] = connect_to_rank(rank, address, token, self._env.rank)
        return self._peers[rank]

    def _exchange(self, value: Any) -> list[Any]:
        """What each rank gives, by rank; JSON. Raises RuntimeError if this JAX cannot do that."""
        self._exchanges += 1
        text = b85encode(zlib.compress(json.dumps(value, default=to_content).encode())).decode()
        texts = [text]
        if self._env.size > 1:
            texts = jax_private.exchange(f"jaxrun/snapshots/{self._exchanges}", self._env.rank, self._env.size, text)
        return [json.loads(zlib.decompress(b85decode(one))) for one in texts]


def _slices(part: Bounds, whole: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, whole, strict=True))
