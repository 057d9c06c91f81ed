"""The identity that a program gets is the one that JAX and its gang have."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import jaxrun_runtime as jr


@pytest.mark.jax_version
@pytest.mark.processes([1, 3])
def test_rank_and_size_are_those_of_jax(gang: Any, process_index: int, process_count: int) -> None:
    assert jr.rank == gang.rank == process_index == jax.process_index()
    assert jr.size == gang.size == process_count == jax.process_count()
    assert gang.allgather((jr.rank, jr.is_main)) == [(rank, rank == 0) for rank in range(jr.size)]
    assert len(jax.local_devices()) == gang.devices


@pytest.mark.processes(3)
def test_the_run_directory_is_that_of_the_job(gang: Any) -> None:
    assert jr.run_dir is not None and (jr.run_dir / "job.json").is_file()
    assert len(set(gang.allgather(jr.run_dir))) == 1


@pytest.mark.processes(4, hosts=2)
def test_local_ranks_are_counted_on_each_host(gang: Any) -> None:
    assert (jr.host, jr.local_rank) == (gang.host, gang.local_rank)
    places = gang.allgather((jr.host, jr.local_rank, jr.local_size))
    first, second = dict.fromkeys(host for host, _, _ in places)
    assert places == [(host, local_rank, 2) for host in (first, second) for local_rank in (0, 1)]
