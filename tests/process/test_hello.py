"""The hello of a worker, which it sends before it may join."""

import hashlib
import sys

import jax
import jaxlib
import numpy
import pytest

from jaxrun.protocol.worker_messages import Hello
from jaxrun_runtime import hello

pytestmark = pytest.mark.jax_version


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
    assert hello.relevant_variables(environ) == {
        name: environ[name] for name in ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES", "PYTHONHASHSEED")
    }


@pytest.fixture
def sources(tmp_path, monkeypatch):
    for name, text in {
        "a.py": "1",
        "p/__init__.py": "2",
        "p/__main__.py": "3",
        "p/m.py": "4",
        "n/m.py": "5",
    }.items():
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
    assert hello.hash_program(argv) == expected
    assert {"p", "n", "p.m", "a"}.isdisjoint(set(sys.modules) - before)


def test_an_unreadable_program_has_no_fingerprint(tmp_path):
    path = tmp_path / "circle.py"  # a link that root cannot read either
    path.symlink_to(path)
    assert hello.hash_program([str(path)]) == ""
