"""The identity that `jaxrun_runtime` gives a program: rank, size, host, run directory."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness_worker import environment

import jaxrun_runtime as jr
from jaxrun.errors import ProtocolError
from jaxrun.protocol.env import WorkerEnv

_ENV = WorkerEnv(
    "ab" * 16, 5, 8, 1, 2, host="h3", channel_fd=3, stacks_fd=4, flight_fd=5, init_timeout=60.0, run_dir="/runs/a b"
)


@pytest.fixture
def alone(monkeypatch):
    for name in [name for name in os.environ if name.startswith("JAXRUN_")]:
        monkeypatch.delenv(name)


def _set_env(monkeypatch, env):
    for name, value in env.to_env().items():
        monkeypatch.setenv(name, value)


def test_without_jaxrun_a_process_is_a_job_of_one(alone):
    assert (jr.rank, jr.size, jr.local_rank, jr.local_size) == (0, 1, 0, 1)
    assert (jr.host, jr.run_dir, jr.is_main) == (socket.gethostname(), None, True)


def test_under_jaxrun_the_identity_comes_from_the_environment(alone, monkeypatch):
    _set_env(monkeypatch, _ENV)
    assert (jr.rank, jr.size, jr.local_rank, jr.local_size) == (5, 8, 1, 2)
    assert (jr.host, jr.run_dir, jr.is_main) == ("h3", Path("/runs/a b"), False)


def test_rank_0_is_the_main_one_and_there_may_be_no_run_directory(alone, monkeypatch):
    _set_env(
        monkeypatch,
        WorkerEnv("ab" * 16, 0, 8, 0, 2, host="h1", channel_fd=3, stacks_fd=4, flight_fd=5, init_timeout=60.0),
    )
    assert (jr.is_main, jr.run_dir) == (True, None)


def test_incomplete_environment_variables_are_an_error_that_names_the_missing_one(alone, monkeypatch):
    monkeypatch.setenv("JAXRUN_JOB_ID", "ab" * 16)
    with pytest.raises(ProtocolError, match="JAXRUN_RANK is not set"):
        _ = jr.rank


def test_another_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'world_size'"):
        _ = jr.world_size


def test_every_name_is_listed():
    names = dir(jr)
    assert {
        "rank",
        "size",
        "local_rank",
        "local_size",
        "host",
        "run_dir",
        "is_main",
        "shard",
        "batches",
    } <= set(names)


def test_importing_it_imports_neither_jax_nor_numpy():
    code = "import jaxrun_runtime as jr, sys; print(jr.rank, {'jax', 'jaxlib', 'numpy'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert result.stdout == "0 set()\n", result.stderr


def test_the_data_helpers_are_imported_on_first_use():
    from jaxrun_runtime import data

    assert jr.shard is data.shard
    assert jr.batches is data.batches
