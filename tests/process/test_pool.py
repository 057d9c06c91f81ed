"""jaxrun.pool: what multiprocessing.Pool offers, for functions that use JAX and for those that do not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxrun.errors import UsageError
from jaxrun.frontends.gang.exceptions import GangError, WorkerDied
from jaxrun.frontends.map.items import NotTraceable
from jaxrun.frontends.map.pool import pool


def square(x):
    return x * x


def add(x, y):
    return x + y


# These import JAX themselves, so that the processes of the plain functions need not.


def sine(x):
    import jax.numpy as jnp

    return jnp.sin(x)


def angle(x, y):
    import jax.numpy as jnp

    return jnp.arctan2(x, y)


def branching(x):
    import jax.numpy as jnp

    return "up" if jnp.sin(x) > 0 else "down"


def square_of_jax(x):
    """Uses JAX, if not for every item."""
    if x < 0:
        import jax.numpy as jnp

        return jnp.square(x)
    return x * x


def fails_at_5(x):
    if x == 5:
        raise LookupError(x)
    return x


@pytest.fixture(scope="module")
def ours():
    with pool(2, platform="cpu") as pool_:
        yield pool_


CALLS = {
    "map": (lambda pool: pool.map(square, [10**20, -1, 7]), [10**40, 1, 49]),  # as 32 bits these would be others
    "map of strings": (lambda pool: pool.map(str.upper, ["a", "b"]), ["A", "B"]),
    "map of nothing": (lambda pool: pool.map(square, []), []),
    "map in chunks": (lambda pool: pool.map(square, range(5), 3), [0, 1, 4, 9, 16]),
    "map of tuples": (lambda pool: pool.map(len, ((1, 2), (3,))), [2, 1]),
    "starmap": (lambda pool: pool.starmap(add, [(1, 2), ("a", "b")]), [3, "ab"]),
    "imap": (lambda pool: list(pool.imap(square, iter(range(5)))), [0, 1, 4, 9, 16]),
    "imap_unordered": (lambda pool: sorted(pool.imap_unordered(square, range(5))), [0, 1, 4, 9, 16]),
    "apply": (lambda pool: pool.apply(add, (1,), {"y": 2}), 3),
    "apply_async": (lambda pool: pool.apply_async(add, (1, 2)).get(60), 3),
    "map_async": (lambda pool: pool.map_async(square, [2, 3]).get(), [4, 9]),
    "starmap_async": (lambda pool: pool.starmap_async(add, [(1, 2)]).get(), [3]),
}


@pytest.mark.parametrize(("call", "expected"), CALLS.values(), ids=CALLS)
def test_a_python_function_gives_what_multiprocessing_gives(ours, call, expected):
    assert call(ours) == expected


JAX_CALLS = {
    "map": (lambda pool: pool.map(sine, np.arange(50.0)), np.sin(np.arange(50.0))),
    "map of a list": (lambda pool: pool.map(sine, [1.0, 2.0]), np.sin([1.0, 2.0])),
    "map of a tuple": (lambda pool: pool.map(sine, (1.0, 2.0)), np.sin([1.0, 2.0])),
    "starmap": (lambda pool: pool.starmap(angle, [(1.0, 2.0), (3.0, 4.0)]), np.arctan2([1.0, 3.0], [2.0, 4.0])),
    "imap": (lambda pool: list(pool.imap(sine, iter(range(20)))), np.sin(range(20))),
    "apply": (lambda pool: pool.apply(sine, (1.0,)), np.sin(1.0)),
}


@pytest.mark.parametrize(("call", "expected"), JAX_CALLS.values(), ids=JAX_CALLS)
def test_a_function_that_uses_jax_gives_arrays(ours, call, expected):
    np.testing.assert_allclose(call(ours), expected, rtol=1e-5)


def test_the_choice_is_explained_and_what_jax_cannot_trace_runs_as_python(ours):
    ours.map(sine, [1.0, 2.0], 1)
    assert ours.explain().startswith("sine uses JAX: vmap and jit, 1 process x 2 devices (cpu), chunks of 1: 2 items")
    ours.map(square, [1, 2])
    assert ours.explain().startswith("square does not use JAX: plain Python, 2 processes x 1 device (cpu)")
    assert ours.map(branching, [1.0, -1.0]) == ["up", "down"]
    assert ours.explain().startswith("JAX cannot trace branching")
    assert "plain Python, 2 processes" in ours.explain()
    assert list(ours.imap(branching, iter([1.0, -1.0, 2.0]))) == ["up", "down", "up"]


def test_an_item_that_raises_raises_from_the_call_and_imap_goes_on_after_it(ours):
    with pytest.raises(LookupError) as caught:
        ours.map(fails_at_5, range(10))
    assert caught.value.args == (5,)
    result = ours.map_async(fails_at_5, range(10))
    result.wait(60)
    assert result.ready() and not result.successful()
    with pytest.raises(LookupError):
        result.get()
    results = ours.imap(fails_at_5, range(8), 1)
    assert [next(results) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(LookupError):
        next(results)
    assert list(results) == [6, 7]


def test_a_result_that_is_late(ours, tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    result = ours.apply_async(gate.read_text)
    with pytest.raises(multiprocessing.TimeoutError):
        result.get(0.01)
    with pytest.raises(ValueError, match="not ready"):
        result.successful()
    assert ours.apply(add, (1, 2)) == 3  # by the other process
    gate.write_text("open")
    assert result.get(60) == "open"
    assert result.successful()


def test_callbacks_get_the_result(ours):
    results, seen = [], threading.Semaphore(0)

    def record(value):
        results.append(value)
        seen.release()

    ours.apply_async(add, (1, 2), callback=record)
    assert seen.acquire(timeout=60)
    ours.map_async(fails_at_5, [5], error_callback=record)
    assert seen.acquire(timeout=60)
    assert results[0] == 3 and isinstance(results[1], LookupError)


def test_a_process_that_dies_is_reported_and_replaced(ours):
    with pytest.raises(WorkerDied):
        ours.apply(os._exit, (3,))
    assert ours.map(square, [2, 3]) == [4, 9]


def test_an_item_that_cannot_be_pickled_is_an_error_and_no_end(ours):
    with pytest.raises(TypeError, match="pickle"):
        ours.map(square, [threading.Lock()])
    with pytest.raises(TypeError, match="pickle"):
        ours.apply(threading.Lock)
    assert ours.apply(add, (1, 2)) == 3


def test_jax_may_be_insisted_on():
    with pool(1, jax=True, platform="cpu") as insisting:
        assert insisting.map(square, [2, 3]).tolist() == [4, 9]
        with pytest.raises(NotTraceable):
            insisting.map(branching, [1.0])
        with pytest.raises(NotTraceable):
            list(insisting.imap(branching, [1.0]))


def test_close_lets_what_was_given_be_done_and_takes_no_more():
    closing = pool(1, jax=False, platform="cpu")
    with pytest.raises(ValueError, match="still runs"):
        closing.join()
    results = closing.map_async(square_of_jax, range(100))
    closing.close()
    closing.join()
    assert results.get() == [x * x for x in range(100)]
    with pytest.raises(GangError, match="closed"):
        closing.map(square, [1])
    with pytest.raises(GangError, match="closed"):
        closing.apply(square, (1,))


def test_terminate_ends_what_waits_for_ever(tmp_path):
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    with pool(1, platform="cpu") as stopped:
        result = stopped.apply_async(gate.read_text)
        started = stopped.apply_async(os.getpid)
        with pytest.raises(multiprocessing.TimeoutError):
            started.get(0.01)
    with pytest.raises(GangError, match="terminated"):
        result.get(60)


NOBODY_CLOSES = """
import os, signal, sys, time
import jaxrun.frontends.map.pool as p
pool = p.pool(2, platform="cpu")
print(pool.map(abs, [-1, 2]), pool.apply_async(abs, (-3,)).get(), flush=True)
pool.apply_async(time.sleep, (1000,))
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("killed", -signal.SIGKILL)])
def test_processes_of_a_pool_that_nobody_closes_end_with_their_parent(how, status):
    command = [sys.executable, "-c", NOBODY_CLOSES, how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90)  # until all have closed its stdout
    assert (run.returncode, run.stdout) == (status, "[1, 2] 3\n"), run


@pytest.mark.parametrize("processes", [0, -1, True, "two"])
def test_an_invalid_number_of_processes_is_a_usage_error(processes):
    with pytest.raises(UsageError, match="processes of a pool"):
        pool(processes)
