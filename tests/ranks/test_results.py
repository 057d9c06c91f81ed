"""Results that are arrays sharded over several ranks: the whole array, or the rank's own shards."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrun_runtime.gang import array_pickling

pytestmark = [pytest.mark.processes(2, devices=2), pytest.mark.jax_version]
ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)


def spread(spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), spec)
    return jax.make_array_from_callback(ROWS.shape, sharding, ROWS.__getitem__)


def travelled(value: Any) -> np.ndarray:
    function, arguments = array_pickling.reduce_array(value)
    return function(*arguments)


def test_an_array_of_which_no_rank_sees_all_is_refused_with_what_to_do() -> None:
    advice = r"no rank can see all of an array of shape \(4, 2\).*addressable_shards.*process_allgather"
    with pytest.raises(ValueError, match=advice):
        array_pickling.reduce_array(spread(PartitionSpec("d")))


def test_what_the_error_advises_travels(process_index: int) -> None:
    x = spread(PartitionSpec("d"))
    mine = np.concatenate([travelled(shard.data) for shard in x.addressable_shards])
    assert mine.tolist() == ROWS[2 * process_index :][:2].tolist()
    assert multihost_utils.process_allgather(x, tiled=True).tolist() == ROWS.tolist()


def test_an_array_that_is_the_same_everywhere_travels() -> None:
    assert travelled(spread(PartitionSpec())).tolist() == ROWS.tolist()
