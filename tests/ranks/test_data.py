"""The data slicer over real ranks: they make equal numbers of steps without communication, and JAX joins their rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrun_runtime import batches, shard

pytestmark = pytest.mark.processes([1, 2, 4], devices=2)
sizes = pytest.mark.parametrize(("n_rows", "batch_size"), [(41, 8), (41, 64), (3, 1)])
DATA = np.arange(82, dtype=np.float32).reshape(41, 2)


def joined(local: np.ndarray) -> jax.Array:
    """The global array of which each rank brings its rows."""
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
    return jax.make_array_from_process_local_data(rows, local)


@jax.jit
def masked_sum(rows: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask[:, None], rows, 0).sum(axis=0)


@pytest.mark.parametrize("seed", [None, 7])
@sizes
def test_every_row_is_seen_once_in_steps_of_the_same_shapes(
    gang: Any, n_rows: int, batch_size: int, seed: int | None
) -> None:
    mine = list(batches(n_rows, batch_size, multiple=jax.local_device_count(), seed=seed))
    shapes = gang.allgather([(rows.shape, mask.shape) for rows, mask in mine])
    assert shapes == [shapes[0]] * gang.size
    seen = gang.allgather([int(row) for rows, mask in mine for row in rows[mask]])
    assert sorted(row for rows in seen for row in rows) == list(range(n_rows))


@pytest.mark.jax_version
@sizes
def test_a_sum_over_all_batches_is_that_of_one_process(n_rows: int, batch_size: int) -> None:
    steps = batches(n_rows, batch_size, multiple=jax.local_device_count())
    sums = [np.asarray(masked_sum(joined(DATA[rows]), joined(mask))) for rows, mask in steps]
    assert np.sum(sums, axis=0).tolist() == DATA[:n_rows].sum(axis=0).tolist()


@pytest.mark.jax_version
def test_shards_joined_in_rank_order_are_the_data() -> None:
    (rows, numbers), mask = shard((DATA, np.arange(41)), multiple=jax.local_device_count())
    everything = multihost_utils.process_allgather((rows, numbers, mask), tiled=True)
    all_rows, all_numbers, all_masks = (np.asarray(part) for part in everything)
    assert all_rows[all_masks].tolist() == DATA.tolist()
    assert all_numbers[all_masks].tolist() == list(range(41))
