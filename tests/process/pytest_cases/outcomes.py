"""One test for each way in which ranks may fare alike or not; in the last ones they get out of step."""

import os
import time
import warnings

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

two = pytest.mark.processes(2)


@two
def test_passes(gang):
    ranks = multihost_utils.process_allgather(jax.numpy.ones(1) * jax.process_index())
    assert ranks.sum() == 1 and jax.process_index() == gang.rank


@two
def test_one_fails(gang):
    print(f"rank {gang.rank} was here")
    assert gang.rank == 0


@two
def test_all_skip():
    pytest.skip("no GPU")


@two
@pytest.mark.skip(reason="not today")
def test_is_skipped_by_its_mark(gang):
    pass


@two
@pytest.mark.xfail(reason="known", strict=True)
def test_one_fails_as_expected(gang):
    assert gang.rank == 0


@two
@pytest.mark.xfail(reason="known", strict=True)
def test_passes_unexpectedly():
    pass


@pytest.fixture
def broken(gang):
    if gang.rank == 1:
        raise RuntimeError("setup is broken")
    yield


@two
def test_setup_fails(broken):
    pass


@pytest.fixture
def breaks_later(gang):
    yield
    if gang.rank == 1:
        raise RuntimeError("teardown is broken")


@two
def test_teardown_fails(breaks_later):
    pass


@two
def test_wants_no_such_fixture(no_such_fixture):
    pass


@two
def test_waits_for_who_fails(gang):
    if gang.rank == 1:
        raise ValueError("boo")
    gang.barrier("all here")


@two
def test_warns():
    warnings.warn("careful", stacklevel=1)


@pytest.mark.processes(2, tiemout=3)
def test_has_a_wrong_mark():
    pass


def test_has_no_mark_and_asks_for_a_gang(gang):
    pass


def test_has_no_mark():
    pass


if "JAXRUN_RANK" not in os.environ:

    @two
    def test_is_in_the_parent_only():
        pass


@pytest.mark.processes(2, hosts=3)
def test_has_more_hosts_than_processes():
    pass


@pytest.mark.processes(2, hosts=3)
def test_has_more_hosts_again():
    pass


# ---- in step or not, although every assertion passes

total = jax.jit(lambda x: x.sum())
largest = jax.jit(lambda x: x.max())


def ones():
    spread = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    return jax.make_array_from_process_local_data(spread, np.ones(1, np.float32))


def bakes_in_its_rank(gang):
    scale = float(gang.rank)
    assert jax.jit(lambda x: (x * scale).sum())(ones()) >= 0


@two
def test_stays_in_step():
    assert (total(ones()), largest(ones())) == (2, 1)


@two
def test_crosses_known_programs(gang):
    for program in (total, largest) if gang.is_main else (largest, total):
        program(ones())


@two
def test_after_programs_were_crossed():
    test_stays_in_step()


@pytest.mark.processes(2, lockstep="strict")
def test_is_refused(gang):
    bakes_in_its_rank(gang)


@pytest.mark.processes(2, lockstep="fail")
def test_is_stopped(gang):
    bakes_in_its_rank(gang)
    time.sleep(1000)


@pytest.mark.processes(2, lockstep="off")
def test_is_not_watched(gang):
    bakes_in_its_rank(gang)
