"""Times calls under jaxrun, in short blocks that take turns: what a cached call takes, and what a first one does.

calls.py BLOCKS SECONDS FIRST: up to BLOCKS blocks of each kind, as far as SECONDS allow, and FIRST programs that are
called for the first time. Each rank writes what it measured to BENCH_DIR/calls-RANK.json, in seconds.

Two cores that share a machine with others run at half their pace now and then, for a job or for a millisecond. So
calls that do not wait for other ranks are made in slices, each beside one of calls that no hook can touch: the
ratio of the two hardly depends on the pace.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

ENTERED = time.time()  # jax has been imported before
ARRAYS = 100
WARM_UP = 3
FEWEST_BLOCKS = 3
SLICES = 4  # of a block, where there is a pace
OURS = PartitionSpec("process")


Call = Callable[[Any], Any]


@dataclass(frozen=True)
class Kind:
    """A function that takes what it returns, so that calls can be chained; `calls` make a block.

    `pace` is a kind that waits for nobody, as this one then does, and that no hook can touch.
    """

    call: Call
    start: Any
    calls: int
    local: bool = False
    pace: Kind | None = None


def sharded(mesh: Mesh, value: float) -> jax.Array:
    """One row for each process, float32[processes, 8]; a rank may have another value than the others."""
    rows = np.full((mesh.size, 8), value, np.float32)
    return jax.make_array_from_callback(rows.shape, NamedSharding(mesh, OURS), lambda index: rows[index])


def average_in(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.shard_map(lambda x: jax.lax.pmean(x, "process"), mesh=mesh, in_specs=OURS, out_specs=OURS)


def kinds(mesh: Mesh) -> dict[str, Kind]:
    """By the names that the benchmark knows; a psum over all processes is what `pmean` makes, and a division."""
    average = average_in(mesh)

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        target = average(state[0])
        return tuple(0.5 * (one + target) for one in state)

    ones = np.ones((8, 8), np.float32)
    plain = Kind(lambda x: np.add(x, ones), ones, 500, local=True)
    local = Kind(jax.jit(lambda x: x + 1), jax.device_put(ones, jax.local_devices()[0]), 100, local=True, pace=plain)
    return {
        "local": local,
        "global": Kind(jax.jit(lambda x: x + 1), sharded(mesh, 1), 100, pace=local),
        "psum": Kind(jax.jit(average), sharded(mesh, 1), 10),
        "state": Kind(jax.jit(step), tuple(sharded(mesh, number) for number in range(ARRAYS)), 3),
    }


class Clock:
    """Times blocks that all ranks begin together; counts the cross-process calls that were made for it."""

    def __init__(self, mesh: Mesh) -> None:
        self.made = 0
        self._meet = jax.jit(average_in(mesh))
        self._tokens = [sharded(mesh, 0), sharded(mesh, 1)]

    def any_rank(self, says: bool) -> bool:
        """Whether one of the ranks says so, in which all agree; they leave this together."""
        self.made += 1
        return bool(np.asarray(self._meet(self._tokens[says]).addressable_data(0)).any())

    def block(self, kind: Kind) -> list[tuple[float, float]]:
        """Seconds for a call, and for one of the pace beside it (0 where there is none), in each slice."""
        self.any_rank(False)
        self.made += 0 if kind.local else kind.calls
        if kind.pace is None:
            return [(time_calls(kind, kind.calls), 0.0)]
        slices = []
        for _ in range(SLICES):
            pace = time_calls(kind.pace, kind.pace.calls // SLICES)
            slices.append((time_calls(kind, kind.calls // SLICES), pace))
        return slices


def time_calls(kind: Kind, calls: int) -> float:
    """Seconds for each of so many calls in a row, the last one's end included."""
    _, loop = loops.setdefault(id(kind), (kind, FunctionType(call_often.__code__.replace(), globals())))
    return loop(kind.call, kind.start, calls) / calls


def call_often(call: Call, value: Any, calls: int) -> float:
    """Seconds for so many calls in a row. Each kind has its own copy: the hooks watch the line of hooked calls."""
    began = time.perf_counter()
    for _ in range(calls):
        value = call(value)
    jax.block_until_ready(value)
    return time.perf_counter() - began


loops: dict[int, tuple[Kind, FunctionType]] = {}  # by id of their kind


def cached(clock: Clock, chosen: dict[str, Kind], blocks: int, limit: float) -> dict[str, list[tuple[float, float]]]:
    """Of each kind as many blocks, one after the other, so that a busy moment of the machine meets all of them."""
    for kind in chosen.values():
        for _ in range(WARM_UP):
            clock.block(kind)
    slices: dict[str, list[tuple[float, float]]] = {name: [] for name in chosen}
    deadline = time.perf_counter() + limit
    for number in range(blocks):
        if clock.any_rank(number >= FEWEST_BLOCKS and time.perf_counter() > deadline):
            break
        for name, kind in chosen.items():
            slices[name] += clock.block(kind)
    return slices


def first(clock: Clock, mesh: Mesh, programs: int) -> list[tuple[float, float]]:
    """Of programs with ARRAYS arguments, which differ in a constant: trace, lower, compile, run."""
    arguments = tuple(sharded(mesh, number) for number in range(ARRAYS))
    slices = []
    for constant in range(programs):
        program = jax.jit(lambda state, c=constant: tuple(one + c for one in state))
        slices += clock.block(Kind(program, arguments, 1))
    return slices


def main(argv: list[str]) -> None:
    blocks, limit, programs = int(argv[0]), float(argv[1]), int(argv[2])
    mesh = Mesh(np.array(jax.devices()), ("process",))
    clock = Clock(mesh)
    gc.disable()
    found = {"first": first(clock, mesh, programs), **cached(clock, kinds(mesh), blocks, limit)}
    content = {"entered": ENTERED, "made": clock.made, "slices": found}
    Path(os.environ["BENCH_DIR"], f"calls-{jax.process_index()}.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main(sys.argv[1:])
