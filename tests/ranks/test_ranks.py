"""What the ranks of a job see: their identity, their data, arrays, jaxrun's programs; and programs that are in step.

A word of the launcher's that the ranks disagree would fail a test: that is what the plugin does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
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
from jaxrun_runtime.programs import selfcheck


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


@pytest.mark.extended
@pytest.mark.processes(4, hosts=2)
def test_local_ranks_are_counted_on_each_host(gang: Any) -> None:
    assert (jr.host, jr.local_rank) == (gang.host, gang.local_rank)
    places = gang.allgather((jr.host, jr.local_rank, jr.local_size))
    first, second = dict.fromkeys(host for host, _, _ in places)
    assert places == [(host, local_rank, 2) for host in (first, second) for local_rank in (0, 1)]


@pytest.mark.jax_version
@on_every_layout
def test_the_devices_of_all_ranks_compute_together(gang: Any, capsys: Any, processes: int) -> None:
    selfcheck.main()
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


# ---- programs that are in step, in whatever way their ranks differ: nothing is reported, however long they run

_PROGRAM = re.compile(r"^def (\w+)\(world: World\)", re.MULTILINE)
PROGRAMS = [
    (path.stem, name)
    for path in sorted((Path(__file__).parent / "agreeing").glob("*.py"))
    for name in _PROGRAM.findall(path.read_text())
]
# By mode, numbers of steps: a few always, and in record mode many for scripts/test --all.
STEPS = {"record": (40, 400), "strict": (10,)}
DEVICES = {"record": 1, "strict": 2}  # of each rank
# Tried in record mode, with few steps: what of them is a call, JAX's versions may see in different ways.
BRIEF = ("prints", "ahead_of_time", "transformed", "static_arguments", "local_shapes", "persistent_cache", "forks")
OF_VERSIONS = (*BRIEF, "replicated_on_rank_0", "unnamed_axis")  # what JAX says of these has changed
RANKS = {"some_ranks_only": 4}  # two groups that are not all ranks; the others run over 2


def parameters() -> Iterator[Any]:
    for mode, (module, name) in product(STEPS, PROGRAMS):
        marks = [pytest.mark.processes(RANKS.get(name, 2), devices=DEVICES[mode], lockstep=mode)]
        marks += [pytest.mark.jax_version] * (name in OF_VERSIONS)
        for steps in STEPS[mode]:
            if name in BRIEF and (mode, steps) != ("record", 40):
                continue
            is_rare = steps > 40 or (mode == "strict" and name in RANKS)
            extended = [pytest.mark.extended] * is_rare
            yield pytest.param(module, name, steps, id=f"{mode}-{name}-{steps}", marks=[*marks, *extended])


@pytest.mark.extended
@pytest.mark.parametrize(("module", "name", "steps"), [*parameters()])
def test_ranks_that_are_in_step_are_not_reported(shared_tmp_path: Path, module: str, name: str, steps: int) -> None:
    from agreeing import world

    step = getattr(import_module(f"agreeing.{module}"), name)(world(shared_tmp_path, steps))
    for number in range(steps):
        step(number)
