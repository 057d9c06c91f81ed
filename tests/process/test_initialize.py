"""A program that calls jax.distributed.initialize by itself finds the work done."""

import pytest

pytestmark = pytest.mark.jax_version

_INITIALIZE = {
    "bare": "jax.distributed.initialize()",
    "right": "jax.distributed.initialize('h:1', jr.size, jr.rank)",
    "by-name": "jax.distributed.initialize(process_id=jr.rank, num_processes=jr.size)",
    "from-import": "from jax.distributed import initialize; initialize(local_device_ids=[0])",
    "private": "from jax._src.distributed import initialize; initialize()",
    "wrong-size": "jax.distributed.initialize(num_processes=99)",
    "wrong-both": "jax.distributed.initialize('h:1', 99, 98)",
    "unknown": "jax.distributed.initialize(no_such_argument=1)",
    "debug": "import logging; logging.basicConfig(level='DEBUG'); jax.distributed.initialize()",
    "ask": "print(jax.distributed.is_initialized()); jax.distributed.initialize()",
}


@pytest.fixture(scope="module")
def initialized(run_cases):
    head = "import jax, jaxrun_runtime as jr\n"
    tail = "\nprint(jax.process_index() == jr.rank, jax.process_count())"
    return run_cases({name: head + call + tail for name, call in _INITIALIZE.items()})


@pytest.mark.parametrize("name", ["bare", "right", "by-name", "from-import", "private"])
def test_a_program_that_joins_by_itself_finds_the_work_done(initialized, name):
    worker = initialized[name]
    assert (worker.status, worker.out, worker.err) == (0, f"True {len(_INITIALIZE) + 1}\n", "")


def test_jax_says_that_it_is_initialized(initialized):
    assert initialized["ask"].out.startswith("True\n")


@pytest.mark.parametrize(
    ("name", "asked"), [("wrong-size", "num_processes=99"), ("wrong-both", "num_processes=99, process_id=98")]
)
def test_a_contradicting_program_gets_a_one_line_error(initialized, name, asked):
    worker = initialized[name]
    assert worker.status == 0
    assert worker.out == f"True {len(_INITIALIZE) + 1}\n"
    (line,) = worker.err.splitlines()
    assert f"initialize({asked})" in line


def test_an_argument_that_jax_does_not_know_is_the_error_that_it_always_is(initialized):
    failure = initialized["unknown"].failure()
    assert failure.error == "TypeError"
    assert "no_such_argument" in failure.message


def test_debug_logging_reports_that_jaxrun_has_joined(initialized):
    assert "DEBUG:jaxrun:jax.distributed.initialize: jaxrun has joined" in initialized["debug"].err
