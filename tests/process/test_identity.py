"""Who a worker is: the identity that `jaxrun_runtime` gives a program, and the hello that it sends before it joins."""

import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jaxlib
import numpy
import pytest
from harness_worker import environment
from msgspec.structs import replace

import jaxrun_runtime as jr
from jaxrun.errors import ProtocolError
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.worker_messages import Hello
from jaxrun_runtime import data, join

_ENV = WorkerEnv(
    "ab" * 16, 5, 8, 1, 2, host="h3", channel_fd=3, stacks_fd=4, flight_fd=5, init_timeout=60.0, run_dir="/runs/a b"
)
_VARIABLES = [name for name in os.environ if name.startswith("JAXRUN_")]


@pytest.mark.parametrize(
    ("environ", "numbers", "others"),
    [
        ({}, (0, 1, 0, 1), (socket.gethostname(), None, True)),
        (_ENV.to_env(), (5, 8, 1, 2), ("h3", Path("/runs/a b"), False)),
        (replace(_ENV, rank=0, run_dir="").to_env(), (0, 8, 1, 2), ("h3", None, True)),
    ],
    ids=["without jaxrun", "rank 5", "rank 0 without a run directory"],
)
def test_the_identity_comes_from_the_environment(monkeypatch, environ, numbers, others):
    for name in _VARIABLES:
        monkeypatch.delenv(name)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert (jr.rank, jr.size, jr.local_rank, jr.local_size) == numbers
    assert (jr.host, jr.run_dir, jr.is_main) == others


def test_incomplete_environment_variables_are_an_error_that_names_the_missing_one(monkeypatch):
    for name in _VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAXRUN_JOB_ID", "ab" * 16)
    with pytest.raises(ProtocolError, match="JAXRUN_RANK is not set"):
        _ = jr.rank


def test_its_names_are_listed_and_another_one_is_an_attribute_error():
    names = {"rank", "size", "local_rank", "local_size", "host", "run_dir", "is_main", "shard", "batches"}
    assert names <= set(dir(jr))
    assert (jr.shard, jr.batches) == (data.shard, data.batches)
    with pytest.raises(AttributeError, match="has no attribute 'world_size'"):
        _ = jr.world_size


def test_importing_it_imports_neither_jax_nor_numpy():
    code = "import jaxrun_runtime as jr, sys; print(jr.rank, {'jax', 'jaxlib', 'numpy'} & set(sys.modules))"
    env = {name: value for name, value in environment().items() if not name.startswith("JAXRUN_")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert result.stdout == "0 set()\n", result.stderr


# ---- the hello


@pytest.mark.jax_version
def test_the_hello_of_a_worker_holds_its_identity_and_what_must_be_uniform(start, script):
    path = script("")
    harness = start([path], 2, env={"XLA_FLAGS": "", "NCCL_DEBUG": "INFO", "HOME": "/"})
    first, second = (worker.received(Hello)[0] for worker in harness.run())
    assert [(h.rank, h.host, h.pid) for h in (first, second)] == [(n, "here", harness.workers[n].pid) for n in (0, 1)]
    assert first.versions == {
        "python": sys.version.split()[0],
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "numpy": numpy.__version__,
    }
    assert first.started_at <= first.time
    assert first.program_hash == hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert first.environment["NCCL_DEBUG"] == "INFO" and "HOME" not in first.environment
    assert (first.versions, first.program_hash, first.environment) == (
        second.versions,
        second.program_hash,
        second.environment,
    )


def test_variables_that_differ_by_design_are_left_out():
    environ = {
        "JAX_PROCESS_ID": "1",
        "JAX_COORDINATOR_ADDRESS": "h:1",
        "JAX_LOCAL_DEVICE_IDS": "0",
        "NCCL_HOSTID": "h",
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "PYTHONHASHSEED": "0",
        "PATH": "/bin",
        "MY_JAX_PLATFORMS": "cpu",
    }
    assert join.relevant_variables(environ) == {
        name: environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED")
    }


@pytest.fixture
def sources(tmp_path, monkeypatch):
    texts = {"a.py": "1", "p/__init__.py": "2", "p/__main__.py": "3", "p/m.py": "4", "n/m.py": "5"}
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["a.py", "x"], "1"),
        (["-m", "a"], "1"),
        (["-m", "p"], "3"),
        (["-m", "p.m", "x"], "4"),
        (["-m", "n.m"], "5"),
        (["p"], None),
        (["-m", "n"], None),
        (["-m", "p.nothing"], None),
        (["-m", "nothing"], None),
        (["-m", "sys"], None),
        (["nowhere.py"], None),
    ],
    ids=str,
)
def test_the_programs_source_is_found_without_importing_it(sources, argv, text):
    before = set(sys.modules)
    expected = hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""
    assert join.hash_program(argv) == expected
    assert {"p", "n", "p.m", "a"}.isdisjoint(set(sys.modules) - before)


def test_an_unreadable_program_has_no_fingerprint(tmp_path):
    path = tmp_path / "circle.py"  # a link that root cannot read either
    path.symlink_to(path)
    assert join.hash_program([str(path)]) == ""
