"""Tests that break their gang. Each begins with a call of all ranks, so it must not suffer from the one before it."""

import os
import time

import jax
import pytest
from jax.experimental import multihost_utils

two = pytest.mark.processes(2)


def collective():
    assert multihost_utils.process_allgather(jax.numpy.ones(1)).sum() == 2


@two
def test_fails_before_a_collective(gang):
    collective()
    gang.barrier()
    assert gang.rank == 0
    collective()


@pytest.mark.processes(2, timeout=5)
def test_takes_too_long(gang):
    collective()
    if gang.rank == 1:
        time.sleep(1000)
    collective()


@pytest.mark.processes(2, timeout=5)
def test_waits_in_a_barrier(gang):
    gang.barrier("before")
    if gang.rank == 1:
        time.sleep(1000)
    gang.barrier("after")


@two
def test_ends_its_process(gang):
    collective()
    if gang.rank == 1:
        print("printed before the exit")
        os._exit(3)
    time.sleep(60)  # in a collective it may fail by itself, before it is stopped


@two
def test_ends_by_os_exit_with_status_0():
    os._exit(0)


@two
def test_calls_pytest_exit():
    pytest.exit("no more")


@two
def test_is_interrupted():
    raise KeyboardInterrupt


@two
def test_is_out_of_step(gang):
    collective()
    if gang.rank == 1:
        # The call is made by one rank only.
        everywhere = jax.sharding.NamedSharding(jax.make_mesh((2,), ("d",)), jax.sharding.PartitionSpec("d"))
        x = jax.make_array_from_process_local_data(everywhere, jax.numpy.ones(1))
        jax.jit(lambda x: x.sum())(x)


@two
def test_kills(gang):
    collective()
    gang.kill(1)
    time.sleep(60)


@pytest.mark.processes(2, dies=1)
def test_survives(gang, shared_tmp_path):
    collective()
    (shared_tmp_path / f"checkpoint-{gang.rank}").touch()
    gang.barrier("saved")
    gang.kill(1)
    time.sleep(60)


@pytest.mark.processes(2, dies=1)
def test_should_die():
    collective()
