"""What the ranks of a job see: their identity, their rows of the data, arrays over several ranks, jaxrun's programs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxrun_runtime as jr
from jaxrun_runtime import batches, shard
from jaxrun_runtime.gang import calls


def layout(ranks: int, *marks: pytest.MarkDecorator) -> Any:
    """Four devices."""
    here = pytest.mark.processes(ranks, devices=4 // ranks)
    return pytest.param(ranks, id=f"{ranks}x{4 // ranks}", marks=[here, *marks])


on_every_layout = pytest.mark.parametrize("processes", [layout(1), layout(2), layout(4, pytest.mark.extended)])
two_ranks = pytest.mark.processes(2, devices=2)


# ---- identity


@pytest.mark.jax_version
@on_every_layout
def test_rank_and_size_are_those_of_jax(gang: Any, process_index: int, process_count: int, processes: int) -> None:
    assert jr.rank == gang.rank == process_index == jax.process_index()
    assert jr.size == gang.size == process_count == jax.process_count() == processes
    assert gang.allgather((jr.rank, jr.is_main)) == [(rank, rank == 0) for rank in range(jr.size)]
    assert len(jax.local_devices()) == gang.devices


@two_ranks
def test_the_run_directory_is_that_of_the_job(gang: Any) -> None:
    assert jr.run_dir is not None and (jr.run_dir / "job.json").is_file()
    assert len(set(gang.allgather(jr.run_dir))) == 1


@pytest.mark.extended
@pytest.mark.processes(4, hosts=2)
def test_local_ranks_are_counted_on_each_host(gang: Any) -> None:
    assert (jr.host, jr.local_rank) == (gang.host, gang.local_rank)
    places = gang.allgather((jr.host, jr.local_rank, jr.local_size))
    first, second = dict.fromkeys(host for host, _, _ in places)
    assert places == [(host, local_rank, 2) for host in (first, second) for local_rank in (0, 1)]


@pytest.mark.jax_version
@on_every_layout
@pytest.mark.parametrize("program", ["selfcheck", "parallel_eval"])
def test_a_program_of_jaxruns_proves_itself(gang: Any, capsys: Any, program: str, processes: int) -> None:
    import_module(f"jaxrun_runtime.programs.{program}").main()
    printed = capsys.readouterr().out
    assert printed.endswith(f"4 device(s) in {processes} process(es)\n") if gang.is_main else printed == ""


# ---- data: JAX joins the rows of the ranks; who has which is tested in tests/unit/test_data.py

sizes = pytest.mark.parametrize(("n_rows", "batch_size"), [(41, 8), (41, 64), (3, 1)])
DATA = np.arange(82, dtype=np.float32).reshape(41, 2)


def joined(local: np.ndarray) -> jax.Array:
    """The global array of which each rank brings its rows."""
    rows = NamedSharding(Mesh(np.array(jax.devices()), ("rows",)), PartitionSpec("rows"))
    return jax.make_array_from_process_local_data(rows, local)


@jax.jit
def masked_sum(rows: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask[:, None], rows, 0).sum(axis=0)


@pytest.mark.jax_version
@two_ranks
@sizes
def test_a_sum_over_all_batches_is_that_of_one_process(n_rows: int, batch_size: int) -> None:
    steps = batches(n_rows, batch_size, multiple=jax.local_device_count())
    sums = [np.asarray(masked_sum(joined(DATA[rows]), joined(mask))) for rows, mask in steps]
    assert np.sum(sums, axis=0).tolist() == DATA[:n_rows].sum(axis=0).tolist()


@pytest.mark.jax_version
@on_every_layout
def test_shards_joined_in_rank_order_are_the_data(processes: int) -> None:
    (rows, numbers), mask = shard((DATA, np.arange(41)), multiple=jax.local_device_count())
    everything = multihost_utils.process_allgather((rows, numbers, mask), tiled=True)
    all_rows, all_numbers, all_masks = (np.asarray(part) for part in everything)
    assert all_rows[all_masks].tolist() == DATA.tolist()
    assert all_numbers[all_masks].tolist() == list(range(41))


# ---- results that are arrays: the whole array, or the rank's own shards

ROWS = np.arange(8, dtype=np.float32).reshape(4, 2)


def spread(spec: PartitionSpec) -> jax.Array:
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), spec)
    return jax.make_array_from_callback(ROWS.shape, sharding, ROWS.__getitem__)


def travelled(value: Any) -> np.ndarray:
    function, arguments = calls.reduce_array(value)
    return function(*arguments)


@pytest.mark.jax_version
@two_ranks
def test_an_array_of_which_no_rank_sees_all_is_refused_with_what_to_do() -> None:
    advice = r"no rank can see all of an array of shape \(4, 2\).*addressable_shards.*process_allgather"
    with pytest.raises(ValueError, match=advice):
        calls.reduce_array(spread(PartitionSpec("d")))


@pytest.mark.jax_version
@two_ranks
def test_its_shards_and_what_is_the_same_everywhere_travel(process_index: int) -> None:
    x = spread(PartitionSpec("d"))
    mine = np.concatenate([travelled(shard.data) for shard in x.addressable_shards])
    assert mine.tolist() == ROWS[2 * process_index :][:2].tolist()
    assert multihost_utils.process_allgather(x, tiled=True).tolist() == ROWS.tolist()
    assert travelled(spread(PartitionSpec())).tolist() == ROWS.tolist()
