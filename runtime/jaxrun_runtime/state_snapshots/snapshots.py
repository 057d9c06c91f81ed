"""snapshot and restore: keep the program's state in the memory of its hosts, two snapshots at a time.

    take          all ranks                                       in the background
    ─────────     ──────────────────────────────────────────     ──────────────────────────────────
    1 check       arguments, equal leaves, room: one answer
    2 make room   remove old files of the slot; wait for all      (only if the layout is new)
    3 write       each rank its regions, without headers
    4 complete                                                    headers, and copies to other hosts
    5 agree                                                       all are whole: keep this slot now

A slot of a host holds one snapshot and nothing else, over all attempts. The kept slot has the snapshot that `restore`
would return now with its last `like`: the latest whole one that fits. The next snapshot goes into the other slot. So
there is a snapshot to restore after a kill at any moment.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.flight_file import RESTORE, RESTORE_STATE, SAVE, SNAPSHOT
from jaxrun.protocol.message_tags import digest
from jaxrun.protocol.names import JOB_ID
from jaxrun.protocol.rank_or_child import is_child
from jaxrun.text import format_bytes, format_ranks
from jaxrun_runtime import checkpoints, joint_calls, this_rank
from jaxrun_runtime.exceptions import SnapshotError
from jaxrun_runtime.state_snapshots import checks, leaves, placement, structure, survey
from jaxrun_runtime.state_snapshots.checks import Check, CheckResult
from jaxrun_runtime.state_snapshots.host_memory import file_name, read_region
from jaxrun_runtime.state_snapshots.leaves import StateLeaves
from jaxrun_runtime.state_snapshots.placement import DESCRIPTION, SLOTS, Bounds, KeptRegion, Region, StateSnapshot
from jaxrun_runtime.state_snapshots.ranks import OtherRanks
from jaxrun_runtime.state_snapshots.structure import Description, LeafFacts
from jaxrun_runtime.state_snapshots.survey import Listing, Survey


class RestoredState(NamedTuple):
    """The result of `restore`: the state after `step`."""

    step: int
    state: Any


def snapshot(step: int, state: Any) -> None:
    """Keep `state` in the memory of the job's hosts, for `restore` in the next attempt.

    Call it on all ranks after the same step. It returns once the state is copied; then the program may donate the
    state. Copies to other hosts are made in the background; the next call waits for them, and so does the end of the
    program, unless it fails. When they are complete, the step counts as saved. Two snapshots are kept. They outlive
    ranks, agents, and any hosts that are not neighbours in the job's list of hosts. They are deleted when the job ends.
    Without jaxrun, and in a child of a rank, it does nothing.

    `state` is a pytree of jax.Arrays, typed keys, numpy arrays and Python numbers, such as a TrainState of flax. An
    array over all ranks may have any sharding. All other values must be equal on all ranks. Threads of a rank take
    turns; their calls must come in the same order on all ranks.

    Raises on all ranks: SnapshotError (a TypeError and a ValueError) that names every leaf that cannot be kept or is
    not equal; MemoryError if a host has too little memory (snapshots take at most twice the state); RuntimeError if a
    rank could not write the previous snapshot.
    """
    if JOB_ID in os.environ and not is_child(os.environ):
        with _one_at_a_time, joint_calls.JointCall(SNAPSHOT), joint_calls.state_stage(SAVE, "by snapshot"):
            _keeper().take(step, state)
    elif wrong := [*checks.step_number(step)[1], *leaves.examine(state, has_values=True).wrong]:
        raise SnapshotError(structure.join_lines(checks.SNAPSHOT_START, wrong))


def restore(like: Any) -> RestoredState | None:
    """Return the latest snapshot that is whole over all hosts and fits `like`, with its `step` and `state`, or None.

    Call it on all ranks; all get the same step. `like` is a state for `snapshot`, which may have jax.ShapeDtypeStructs
    instead of arrays. A snapshot fits if its leaves have the same names, shapes and types. Each leaf comes back as it
    was: numpy arrays, numbers, keys, weak types. A numpy array of float64 also fits a jax.Array of float32, which JAX
    would make of it; it comes back as float32. Arrays get the shardings of `like`, which may differ from the
    snapshot's, with other devices or ranks. If `like` has no sharding for a leaf, each rank gets the whole array.

    If there are snapshots, but none is whole and fits, a line says why. Raises on all ranks: SnapshotError if a leaf of
    `like` cannot be in a snapshot, or `like` differs between ranks; RuntimeError if a rank cannot read its part.
    """
    if JOB_ID in os.environ and not is_child(os.environ):
        with _one_at_a_time, joint_calls.JointCall(RESTORE), joint_calls.state_stage(RESTORE_STATE, "by restore"):
            return _keeper().restore(like)
    if wrong := leaves.examine(like, has_values=False).wrong:
        raise SnapshotError(structure.join_lines(checks.RESTORE_START, wrong))
    return None


_made: SnapshotKeeper | None = None
_one_at_a_time = threading.Lock()  # threads of a rank take turns: a call exchanges several messages with other ranks


def _keeper() -> SnapshotKeeper:
    global _made
    if _made is None:
        _made = SnapshotKeeper(this_rank.read(os.environ))
    return _made


class StateLayout(Struct, frozen=True, dict=True):  # for the cached property
    """Which rank keeps which regions, for states with the same leaves and shardings.

    made_for:  the leaves and shardings
    shares:    the regions, with the ranks that keep them
    by_host:   number of bytes that a snapshot takes on each host
    """

    made_for: Any
    shares: Sequence[KeptRegion]
    by_host: Mapping[str, int]

    @functools.cached_property
    def digest(self) -> str:
        return digest(json.dumps(self.shares).encode()).hex()[:16]

    def names(self, slot: int, hosts: Sequence[str], host: str) -> set[str]:
        """Return the names of the files of `host` in the slot."""
        return {
            file_name(slot, kept.region)
            for kept in self.shares
            if any(hosts[rank] == host for rank in (*kept.keepers, *kept.copies))
        }


class SnapshotKeeper:
    """One rank's side of the snapshots of an attempt. All ranks must make and use it at the same time."""

    def __init__(self, env: WorkerEnv) -> None:
        """Raises RuntimeError, on all ranks, if one of them cannot keep snapshots."""
        self._env = env
        self._ranks = OtherRanks(env)
        self._memory = self._ranks.memory
        self._is_surveyed = False
        self._kept: StateSnapshot | None = None  # its slot is not written to
        self._kept_fits = False  # whether it fits the last `like`
        self._wanted: Sequence[LeafFacts] | None = None
        self._fitting: dict[str, bool] = {}  # by the digest of a structure
        self._number = -1  # of the last snapshot
        self._layouts: dict[int, StateLayout] = {}  # by slot: the layout of its files; equal on all ranks
        self._background: threading.Thread | None = None
        self._completed_by = 0  # the number of the call of `snapshot` that started the background thread
        self._failure = ""
        self._told_bytes = 0

    # ---- taking

    def take(self, step: int, state: Any) -> None:
        self._wait()
        if not self._is_surveyed:
            self._keep(next(iter(self._survey(None).wholes()), None), fits=False)
        known, wrong = checks.step_number(step)
        taken = leaves.examine(state, has_values=True)
        number = placement.next_number(self._number, self._kept)
        layout = self._lay_out(taken) if not taken.wrong else None
        self._check(Check(known, [*wrong, *taken.wrong]), taken, number % SLOTS, layout)
        assert known is not None and layout is not None
        snapshot = StateSnapshot(self._env.attempt, number, known, structure.structure_digest(taken.facts))
        self._make_room(snapshot.slot, layout)
        self._number = number
        share, failure, fits = *self._write(snapshot, taken, layout), self._fits(snapshot, taken)
        # No daemon: a program that ends well has its last snapshot completed, because its threads are waited for.
        self._background = threading.Thread(
            target=lambda: self._complete(snapshot, share, failure, fits), name="jaxrun-snapshot", daemon=False
        )
        self._completed_by = joint_calls.calls_made(SNAPSHOT)
        self._background.start()

    def _fits(self, snapshot: StateSnapshot, taken: StateLeaves) -> bool:
        """Whether the snapshot fits the last `like`."""
        if self._wanted is not None and snapshot.structure not in self._fitting:
            self._fitting[snapshot.structure] = not structure.list_differences(taken.facts, self._wanted)
        return self._fitting.get(snapshot.structure, False)

    def _lay_out(self, taken: StateLeaves) -> StateLayout:
        """Return the layout for this state: the layout of an equal state, or a new one."""
        size, hosts = self._env.size, self._ranks.hosts
        of_all = (leaf.sharding if leaves.is_of_all(leaf, size) else None for _, leaf in taken.leaves)
        made_for = [*zip(taken.facts, of_all, strict=True)]
        for layout in self._layouts.values():
            if layout.made_for == made_for:
                return layout
        description = KeptRegion(Region(DESCRIPTION, ()), len(self._describe(taken)), _first_ranks(hosts), [])
        shares = [description, *placement.share_out(leaves.regions(taken, size), hosts)]
        return StateLayout(made_for, shares, placement.memory_by_host(shares, hosts))

    def _describe(self, taken: StateLeaves) -> bytes:
        return Description(taken.facts, leaves.numbers(taken), [*dict.fromkeys(self._ranks.hosts)]).to_bytes()

    def _check(self, check: Check, taken: StateLeaves, slot: int, layout: StateLayout | None) -> None:
        """Check with all ranks that the snapshot can be taken. Raises the same error on all ranks if it cannot."""
        own: Mapping[str, str | int] = {}
        if layout is not None:
            own = leaves.own_values(taken, self._env.size)
            facts, values = structure.structure_digest(taken.facts), digest(json.dumps([*own.items()]).encode())
            is_new = self._layouts.get(slot) is not layout
            room = self._memory.room() if is_new and self._env.local_rank == 0 else None
            check = check._replace(layout=facts + layout.digest, values=values.hex()[:16], room=room)
        by_host = layout.by_host if layout is not None else {}

        def answer(told: Sequence[Any]) -> CheckResult:
            return checks.answer([Check.from_json(one) for one in told], slot, by_host, self._ranks.hosts)

        kind, text = self._ranks.agree(check, answer)
        if kind == checks.NO_MEMORY:
            raise MemoryError(text)
        if kind == checks.COMPARE_LAYOUTS:
            described = {facts.name: f"{facts}{_place_of(leaf, self._env.size)}" for facts, leaf in taken.leaves}
            lines = structure.compare_facts(self._ranks.exchange(described))
            text = structure.join_lines(checks.SNAPSHOT_START, lines or ["its shardings differ among the ranks"])
        if kind == checks.COMPARE_VALUES:
            lines = structure.compare_values(self._ranks.exchange(own))
            text = structure.join_lines(checks.SNAPSHOT_START, lines)
        if kind != checks.GO_ON:
            raise SnapshotError(text)

    def _make_room(self, slot: int, layout: StateLayout) -> None:
        """Remove old files of the slot, before any rank writes. Raises RuntimeError on all ranks if one fails."""
        if self._layouts.get(slot) is layout:
            return
        failure = ""
        if self._env.local_rank == 0:
            try:
                self._memory.empty_slot(slot, layout.names(slot, self._ranks.hosts, self._env.host))
            except OSError as error:
                failure = str(error)
        if failure := self._ranks.merge_failures(failure):
            raise RuntimeError(f"an older snapshot cannot be removed: {failure}")
        self._layouts[slot] = layout
        most = SLOTS * max(layout.by_host.values())
        if most > self._told_bytes and self._env.rank == 0:
            print(
                f"jaxrun: snapshots take up to {format_bytes(most)} of memory on each host", file=sys.stderr, flush=True
            )
        self._told_bytes = max(most, self._told_bytes)

    def _write(self, snapshot: StateSnapshot, taken: StateLeaves, layout: StateLayout) -> tuple[list[KeptRegion], str]:
        """Write the regions that this rank keeps. Returns them, and the error as text."""
        share = [kept for kept in layout.shares if self._env.rank in kept.keepers]
        values = leaves.values(taken, self._env.size)
        if share and share[0].region.leaf == DESCRIPTION:
            values[share[0].region] = np.frombuffer(self._describe(taken), np.uint8)
            share[0] = share[0]._replace(nbytes=values[share[0].region].nbytes)
        for kept in share:
            leaves.copy_to_host(values[kept.region])
        try:
            for kept in share:
                self._memory.begin(snapshot, kept, leaves.to_bytes(values[kept.region]))
        except OSError as error:
            return share, str(error)
        return share, ""

    def _complete(self, snapshot: StateSnapshot, share: Sequence[KeptRegion], failure: str, fits: bool) -> None:
        """Complete the snapshot's files on this host, copy them to others, and wait until all ranks have done so."""
        try:
            if not failure:
                for kept in share:
                    copies = [self._ranks.memory_of(rank).write for rank in kept.copies]
                    self._memory.complete(snapshot, kept, copies)
        except Exception as error:
            failure = str(error) or type(error).__name__
        try:
            failure = self._ranks.merge_failures(failure)
            if not failure:
                if fits or not self._kept_fits:
                    self._keep(snapshot, fits)
                if self._env.rank == 0:
                    checkpoints.saved(snapshot.step)
        except Exception as error:
            failure = str(error)
        self._failure = f"the snapshot of step {snapshot.step} is not whole: {failure}" if failure else ""

    def _wait(self) -> None:
        """Wait until the previous snapshot is complete. Raises RuntimeError if that failed, once."""
        if self._background is not None:
            joint_calls.JointCall(SNAPSHOT).wait(self._completed_by, self._background.join)
            self._background = None
        if failure := self._failure:
            self._failure = ""
            raise RuntimeError(failure)

    # ---- restoring

    def restore(self, like: Any) -> RestoredState | None:
        self._wait()
        wanted = leaves.examine(like, has_values=False)
        found = self._survey(wanted)
        chosen = found.choose(wanted.facts)
        self._wanted, self._fitting = wanted.facts, {}
        self._keep(chosen or next(iter(found.wholes()), None), fits=chosen is not None)
        if chosen is None:
            text = found.explain_none(wanted.facts)
            if text and self._env.rank == 0:
                print(f"jaxrun: {text}", file=sys.stderr, flush=True)
            return None
        return RestoredState(chosen.step, wanted.treedef.unflatten(self._load_all(found, chosen, wanted)))

    def _keep(self, snapshot: StateSnapshot | None, fits: bool) -> None:
        """Keep this snapshot: the next ones are written to the other slot."""
        self._is_surveyed, self._kept, self._kept_fits = True, snapshot, fits

    def _survey(self, like: StateLeaves | None) -> Survey:
        """Find out with all ranks which snapshots exist. Raises SnapshotError on all ranks if `like` is wrong."""
        env, hosts, names = self._env, self._ranks.hosts, self._memory.names()
        whole = (self._memory.find_whole(name) for name in names[env.local_rank :: env.local_size])
        listing = Listing([file for file in whole if file is not None], survey.slots_of(names))
        described = {facts.name: str(facts) for facts in like.facts} if like is not None else {}
        told = self._ranks.exchange([listing, like.wrong if like is not None else (), described])
        lists, wrongs, likes = zip(*told, strict=True)
        wrong = structure.merge_lines(wrongs) or structure.compare_facts(likes)
        if wrong:
            raise SnapshotError(structure.join_lines(checks.RESTORE_START, wrong))
        listings = [Listing.from_json(*one) for one in lists]
        descriptions = self._read_descriptions(survey.description_owners(listings))
        return Survey(listings, hosts, survey.gather(listings, hosts, env.host), descriptions)

    def _read_descriptions(self, owners: Mapping[StateSnapshot, int]) -> Mapping[StateSnapshot, Description]:
        texts = []
        for snapshot in (one for one, rank in owners.items() if rank == self._env.rank):
            with contextlib.suppress(OSError):  # the description then counts as lost
                texts.append([snapshot, self._memory.read_whole(snapshot, Region(DESCRIPTION, ())).decode()])
        every = self._ranks.agree(texts, lambda by_rank: [one for texts in by_rank for one in texts])
        return {StateSnapshot(*snapshot): Description.from_text(text) for snapshot, text in every}

    def _load_all(self, found: Survey, chosen: StateSnapshot, wanted: StateLeaves) -> list[Any]:
        """Return the leaves. Raises RuntimeError on all ranks if one cannot read its part."""
        described, made, failure = found.descriptions[chosen], [], ""
        try:
            for number, (facts, (_, like)) in enumerate(zip(described.leaves, wanted.leaves, strict=True)):
                if not leaves.is_in_a_file(facts):
                    made.append(structure.parse_number(facts.kind, described.numbers[number]))
                    continue
                load = functools.partial(self._load, chosen, found.places[chosen], number, facts)
                made.append(leaves.make_leaf(facts, like, load))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        if failure := self._ranks.merge_failures(failure):
            raise RuntimeError(f"the snapshot of step {chosen.step} cannot be restored: {failure}")
        pairs = zip(described.leaves, wanted.leaves, made, strict=True)
        return [leaves.make_weak(facts, like, value) for facts, (_, like), value in pairs]

    def _load(
        self, snapshot: StateSnapshot, places: placement.Places, number: int, facts: LeafFacts, bounds: Bounds
    ) -> NDArray[Any]:
        """Return a region of an array, made from one or several kept regions."""
        dtype, item_shape = leaves.item_type(facts)
        made = np.empty([*_lengths(bounds), *item_shape], dtype)
        for there, rank in (placement.cover(places, number, bounds) or {}).items():
            nbytes = placement.volume(there) * leaves.item_bytes(facts)
            data = read_region(self._ranks.memory_of(rank).read, snapshot, Region(number, there), nbytes)
            kept = np.frombuffer(data, dtype).reshape([*_lengths(there), *item_shape])
            common = placement.overlap(there, bounds)
            assert common is not None
            made[_slices(common, bounds)] = kept[_slices(common, there)]
        return made


def _first_ranks(hosts: Sequence[str]) -> list[int]:
    """Return the first rank on each host."""
    return [hosts.index(host) for host in dict.fromkeys(hosts)]


def _place_of(leaf: Any, size: int) -> str:
    """Return a text that says which ranks hold the leaf."""
    if not leaves.is_of_all(leaf, size):
        return " of its own"
    return f" over {format_ranks({device.process_index for device in leaf.sharding.device_set})}"


def _lengths(bounds: Bounds) -> list[int]:
    return [stop - start for start, stop in bounds]


def _slices(part: Bounds, whole: Bounds) -> tuple[slice, ...]:
    return tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(part, whole, strict=True))
