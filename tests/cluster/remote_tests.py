"""Tests that test_gangs_on_hosts.py runs with pytest on several hosts."""

import os

import jax
import pytest
from jax.experimental import multihost_utils

two = pytest.mark.processes(2)


def collective():
    assert multihost_utils.process_allgather(jax.numpy.ones(1)).sum() == jax.process_count()


@two
def test_hosts_differ(gang):
    collective()
    assert gang.allgather(gang.host) == ["h1", "h2"]


@two
def test_fails(gang):
    assert gang.rank == 0
    collective()


@two
def test_dies(gang):
    if gang.rank == 1:
        print("printed before the exit")
        os._exit(3)
    collective()


def test_has_no_mark():
    assert "JAXRUN_RANK" not in os.environ


@two
def test_shares_files(gang, shared_tmp_path, tmp_path):
    (shared_tmp_path / str(gang.rank)).touch()
    gang.barrier()
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["0", "1"]
    assert len(set(gang.allgather(str(tmp_path)))) == 2


@pytest.mark.processes(2, hosts=2)
def test_hosts_are_counted(gang):
    assert len(set(gang.allgather(gang.host))) == 2


def test_gangs(gangs):
    assert {worker.host for worker in gangs(processes=2).workers} == {"h1", "h2"}
