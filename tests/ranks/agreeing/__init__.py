"""Programs whose ranks do different things and yet keep in step; `test_lockstep.py` runs them.

Each is a function of the World that returns the function that makes step 0, 1, …
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Step = Callable[[int], object]


@dataclass(frozen=True)
class World:
    """The job as one rank sees it; `directory` is one that all ranks share, `steps` how many are made."""

    rank: int
    size: int
    mesh: Mesh
    directory: Path
    steps: int

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def rows(self) -> int:
        """Of an array that is spread over all devices, one for each."""
        return int(self.mesh.size)

    @property
    def spread(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec("data"))

    @property
    def everywhere(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def ones(self, *shape: int) -> jax.Array:
        """An array of float32 whose rows are spread over the devices of all ranks."""
        return jax.make_array_from_callback(shape, self.spread, lambda index: np.ones(shape, np.float32)[index])


@jax.jit
def total(x: jax.Array) -> jax.Array:
    return x.sum()


def world(directory: Path, steps: int) -> World:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    return World(jax.process_index(), jax.process_count(), mesh, directory, steps)
