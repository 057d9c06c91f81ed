"""Ways in which the ranks of one program diverge, each a short function of the World; `diverge.py` runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@dataclass(frozen=True)
class World:
    """The job as one rank sees it. The last rank is the odd one, that does what the others don't."""

    rank: int
    size: int
    mesh: Mesh  # of the first device of every rank
    devices: np.ndarray  # a row for each rank

    @property
    def odd(self) -> bool:
        return self.rank == self.size - 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def ones(self, *shape: int, dtype: object = np.float32, mesh: Mesh | None = None) -> jax.Array:
        """An array whose rows are spread over `mesh`, without one over all ranks."""
        sharding = NamedSharding(mesh or self.mesh, PartitionSpec("data"))
        return jax.make_array_from_callback(shape, sharding, lambda index: np.ones(shape, dtype)[index])


Kind = Callable[[World], None]
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Kind:
    """Enter this function among the KINDS, as "shape-explicit" if it is called shape_explicit."""
    KINDS[function.__name__.replace("_", "-")] = function
    return function


def world() -> World:
    ranks = jax.process_count()
    devices = np.array(jax.devices()).reshape(ranks, -1)
    return World(jax.process_index(), ranks, Mesh(devices[:, 0], ("data",)), devices)
