"""The ranks call the same functions, in another order or another number of times.

The line of the call in question has a comment with the kind's name, or two have: those of "the others" and of the rank
that differs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from diverging.world import World, kind


@jax.jit
def step(x: jax.Array) -> jax.Array:
    return x.sum()


@jax.jit
def evaluate(x: jax.Array) -> jax.Array:
    return (x * x).sum()


@dataclass(frozen=True)
class Name:
    """Its place in a set depends on the rank, as a string's does where PYTHONHASHSEED is not the same."""

    letter: str
    place: int

    def __hash__(self) -> int:
        return self.place


def _names(letters: str, *, turned: bool) -> set[Name]:
    return {Name(letter, 7 - place if turned else place) for place, letter in enumerate(letters)}


def _functions() -> dict[str, Callable[[jax.Array], jax.Array]]:
    def alpha(x: jax.Array) -> jax.Array:
        return x.sum()

    def beta(x: jax.Array) -> jax.Array:
        return (x + 1).sum()

    def gamma(x: jax.Array) -> jax.Array:
        return (x * 2).sum()

    return {"alpha": jax.jit(alpha), "beta": jax.jit(beta), "gamma": jax.jit(gamma)}


@kind
def set_order(world: World) -> None:
    """The sums of three layers of one shape, in the order of a set."""
    layers = dict(zip("abc", _functions().values(), strict=True))
    x = world.ones(world.size, 8)
    for name in _names("abc", turned=world.odd):
        float(layers[name.letter](x))  # set-order


@kind
def set_order_shapes(world: World) -> None:
    """One function over layers of several shapes, in the order of a set."""
    layers = {"a": world.ones(world.size, 2), "b": world.ones(world.size, 4), "c": world.ones(world.size, 8)}
    for name in _names("abc", turned=world.odd):
        float(step(layers[name.letter]))  # set-order-shapes


@kind
def dict_order(world: World) -> None:
    """A dictionary that one rank has filled in another order."""
    functions = _functions()
    if world.odd:
        functions = dict(reversed(functions.items()))
    x = world.ones(world.size, 8)
    for function in functions.values():
        float(function(x))  # dict-order


@kind
def branch(world: World) -> None:
    """Which of two known functions comes next depends on a value of the rank's own; both have run before."""
    x = world.ones(world.size, 8)
    for number in range(20):
        long = number % 2 == 0 if not (world.odd and number == 12) else False
        float((step if long else evaluate)(x))  # branch


@kind
def branch_late(world: World) -> None:
    """The same after a thousand calls, and a few hundred more follow."""
    x = world.ones(world.size, 8)
    for number in range(1200):
        long = number % 2 == 0 if not (world.odd and number == 1000) else False
        float((step if long else evaluate)(x))  # branch-late


@kind
def rank_0_only(world: World) -> None:
    """`if rank == 0: print(x.mean())`: its sum meets the others' next step."""
    x = world.ones(world.size, 8)
    for number in range(6):
        float(step(x))  # rank-0-only: the others
        if world.first and number == 2:
            print("mean", x.mean(), flush=True)  # rank-0-only


@kind
def rank_0_only_end(world: World) -> None:
    """The same as a last word, when the others have ended."""
    x = world.ones(world.size, 8)
    for _ in range(3):
        float(step(x))
    if world.first:
        print("mean", x.mean(), flush=True)  # rank-0-only-end


@kind
def early_stop(world: World) -> None:
    """One rank finds that its own loss is small enough, and leaves the loop for the evaluation."""
    x = world.ones(world.size, 8)
    for number in range(6):
        own_loss = 0.01 if world.odd and number == 3 else 1.0
        if own_loss < 0.1:
            break
        float(step(x))  # early-stop: the others
    float(evaluate(x))  # early-stop


@kind
def last_batch_phase(world: World) -> None:
    """One rank has a batch less; its evaluation meets the others' last step."""
    x = world.ones(world.size, 8)
    for _ in range(3 if world.odd else 4):
        float(step(x))  # last-batch-phase: the others
    float(evaluate(x))  # last-batch-phase


@kind
def count_late(world: World) -> None:
    """One rank makes a step less, after a thousand in step."""
    x = world.ones(world.size, 8)
    for _ in range(1000 if world.odd else 1001):
        float(step(x))  # count-late: the others
    float(evaluate(x))  # count-late


@kind
def caught(world: World) -> None:
    """One rank catches an error of its own and skips the step; nothing but the count differs."""
    x = world.ones(world.size, 8)
    for number in range(6):
        try:
            if world.odd and number == 3:
                raise ValueError("a bad record")
            float(step(x))  # caught: the others
        except ValueError as error:
            print("skipped:", error, flush=True)
    print("finished", flush=True)


@kind
def caught_phase(world: World) -> None:
    """The same before another phase."""
    x = world.ones(world.size, 8)
    for number in range(6):
        try:
            if world.odd and number == 3:
                raise ValueError("a bad record")
            float(step(x))  # caught-phase: the others
        except ValueError as error:
            print("skipped:", error, flush=True)
    float(evaluate(x))  # caught-phase


@kind
def after_printing(world: World) -> None:
    """What rank 0 computes alone of a replicated value is no call; what differs after that is found."""
    x = world.ones(world.size, 8)
    for _ in range(3):
        loss = step(x)
        if world.first:
            print("loss", jnp.log(loss), flush=True)
    float((evaluate if world.odd else step)(x))  # after-printing


@kind
def swallowed(world: World) -> None:
    """The program catches whatever a step may raise, and so an error that tells of this very divergence."""
    x = world.ones(world.size, 8)
    for number in range(5):
        try:
            float((evaluate if world.odd and number == 3 else step)(x))  # swallowed
        except Exception as error:
            print("skipped:", type(error).__name__, flush=True)


@kind
def threads(world: World) -> None:
    """Two threads make one call each; who comes first is not the same on all ranks."""
    x = world.ones(world.size, 8)

    def logs() -> None:
        float(evaluate(x))  # threads

    def trains() -> None:
        float(step(x))  # threads: the others

    for function in (logs, trains) if world.odd else (trains, logs):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(function).result()


@kind
def meshes_in_turn(world: World) -> None:
    """A ring of pairs: each rank waits for its right neighbour first, and so all do for ever."""
    pairs = []
    for left in (world.rank, (world.rank - 1) % world.size):
        ends = sorted((left, (left + 1) % world.size))
        pairs.append(Mesh(world.mesh.devices[ends], ("data",)))
    for pair in pairs:
        float(step(world.ones(2, 8, mesh=pair)))  # meshes-in-turn


@kind
def halves_in_turn(world: World) -> None:
    """Two meshes, each with one device of every rank, that one rank takes in another order."""
    devices = world.mesh.devices.reshape(world.size, 2)
    halves = [Mesh(devices[:, half], ("data",)) for half in range(2)]
    for half in reversed(halves) if world.odd else halves:
        float(step(world.ones(world.size, 8, mesh=half)))  # halves-in-turn


@kind
def barrier_one_rank(world: World) -> None:
    """Rank 0 stands in a barrier that the others never reach."""
    x = world.ones(world.size, 8)
    for _ in range(3):
        float(step(x))
    if world.first:
        multihost_utils.sync_global_devices("saved")  # barrier-one-rank
    for _ in range(3):
        float(evaluate(x))  # barrier-one-rank: the others


@kind
def barrier_names(world: World) -> None:
    """JAX itself sees that the barriers are not the same one."""
    multihost_utils.sync_global_devices("loaded" if world.odd else "saved")  # barrier-names


@kind
def gather_shapes(world: World) -> None:
    """One rank has more values to gather than the others."""
    values = np.ones(3 if world.odd else 2, np.float32)
    for _ in range(5):
        multihost_utils.process_allgather(values)  # gather-shapes
