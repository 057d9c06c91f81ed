"""gang.map and jaxrun.pool with real processes: on devices of one process, of several, and as plain Python."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrun
from jaxrun.errors import UsageError
from jaxrun.frontends.gang import call
from jaxrun.frontends.gang.gang_errors import GangError
from jaxrun.protocol.map_messages import NotTraceable


class Point(NamedTuple):
    x: object
    y: object


KINDS = {"1 x 2": (1, 2), "2 x 1": (2, 1)}


@pytest.fixture(scope="module")
def gangs(patient_gangs):
    """gangs(kind) → a gang that is kept for the module."""
    made = {}

    def find(kind):
        if kind not in made:
            made[kind] = jaxrun.Gang(*KINDS[kind], platform="cpu")
        return made[kind]

    yield find
    for gang in made.values():
        gang.close()


@pytest.fixture(params=KINDS)
def gang(gangs, request):
    return gangs(request.param)


@pytest.fixture
def two(gangs):
    """A gang of two ranks."""
    return gangs("2 x 1")


def polynomial(x):
    return {"value": 3 * x + 1, "point": Point(-x, jnp.stack([x, 2 * x]))}


@pytest.mark.extended
@pytest.mark.parametrize("count", [0, 7, 700_001], ids=["no item", "few", "several parts"])
@pytest.mark.parametrize("chunk", [None, 300])
def test_results_are_those_of_each_item_in_order(gang, count, chunk):
    xs = np.arange(count, dtype=np.float64)
    result = gang.map(polynomial, np.stack([xs, -xs], axis=1), chunk=chunk)
    np.testing.assert_array_equal(result["value"], np.stack([3 * xs + 1, 1 - 3 * xs], axis=1))
    np.testing.assert_array_equal(result["point"].x, np.stack([-xs, xs], axis=1))
    assert result["point"].y.shape == (count, 2, 2)
    assert isinstance(result["point"], Point)
    assert result["value"].dtype == np.float32


def branches(x):
    return "positive" if x > 0 else "not"


def test_jax_false_calls_a_python_function_for_each_item(gang):
    assert gang.map(branches, [1, -1, 2], jax=False) == ["positive", "not", "positive"]
    assert gang.map(lambda x, base: int(str(x), base), range(8), static={"base": 8}, jax=False) == list(range(8))
    assert gang.map(str, range(1000), chunk=7, jax=False) == [str(number) for number in range(1000)]
    assert gang.map(str, [], jax=False) == []


def test_python_items_are_spread_over_the_ranks(two, tmp_path):
    def wait_for_the_other(number):
        (tmp_path / str(number)).touch()
        while not (tmp_path / str(1 - number)).exists():
            time.sleep(0.001)
        return os.getpid()

    pids = two.map(wait_for_the_other, range(2), jax=False)
    assert sorted(pids) == sorted(worker.pid for worker in two.workers)


def fails_from_17(x):
    if x >= 17:
        raise LookupError(f"item of ill omen: {x}")
    return x


def test_a_python_item_that_raises_is_named_alone_with_its_traceback(two):
    with pytest.raises(LookupError, match="ill omen") as caught:
        two.map(fails_from_17, range(100), jax=False)
    (note,) = caught.value.__notes__
    assert caught.value.args == (f"item of ill omen: {note.removeprefix('raised for item ')}",)
    assert caught.value.rank in (0, 1)
    assert "in fails_from_17" in str(caught.value.__cause__)
    assert two.healthy


class InterruptedOutput(io.StringIO):
    """Stands for a Ctrl-C that comes with the first output of a rank."""

    def write(self, text):
        if not self.getvalue():
            super().write(text)
            raise KeyboardInterrupt
        return super().write(text)


@pytest.mark.parametrize("jax", [True, False])
def test_an_interrupt_ends_a_map_and_leaves_the_gang_usable(two, jax, monkeypatch):
    def wait(x):
        print("waits")
        while True:
            time.sleep(0.001)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sys, "stdout", InterruptedOutput())
        patch.setattr(call, "INTERRUPT_TIMEOUT_S", 60.0)  # on a busy machine a first trace may take more than a second
        two.map(wait, np.arange(10.0), jax=jax)
    assert two.healthy
    assert two.map(lambda x: x + 1, [1, 2]).tolist() == [2, 3]


def test_lists_are_taken_and_arguments_that_do_not_fit_are_refused(two):
    assert two.map(lambda x: x + 1, range(3)).tolist() == [1, 2, 3]
    assert two.map(lambda pair: pair[0] + pair[1], [(1, 2), (3, 4)]).tolist() == [3, 7]
    assert two.map(lambda x: x, []) == []
    with pytest.raises(OverflowError, match="jax_enable_x64"):
        two.map(lambda x: x, [1, 2**40])
    with pytest.raises(UsageError, match="chunk"):
        two.map(polynomial, [1], chunk=0)
    with pytest.raises(UsageError, match="in_axes"):
        two.map(polynomial, np.ones(3), in_axes=(0, 0))
    with pytest.raises(UsageError, match="jax=False"):
        two.map(polynomial, {"a": [1]}, jax=False)
    with pytest.raises(TypeError, match="pickle") as caught:
        two.map(str, [1, threading.Lock()], chunk=2, jax=False)
    assert caught.value.__notes__[-1] == "an item of 0 to 1 cannot be sent"  # from Python 3.14 on, pickle adds its own
    with pytest.raises(TypeError, match="pickle"):
        two.map(lambda x: threading.Lock(), [1], jax=False)
    assert two.healthy


def test_a_rank_that_dies_is_named_and_the_next_map_works(two):
    with pytest.raises(jaxrun.WorkerDied) as caught:
        two.map(lambda x: os.kill(os.getpid(), signal.SIGKILL) if x == 3 else x, range(100), jax=False)
    assert caught.value.signal == signal.SIGKILL
    assert two.map(lambda x: x + 1, [1, 2]).tolist() == [2, 3]


# ---- pools


def test_a_pool_maps_on_all_devices_of_one_process(patient_gangs):
    with jaxrun.pool(2, platform="cpu") as pool:
        np.testing.assert_allclose(pool.map(jnp.sin, np.arange(50.0)), np.sin(np.arange(50.0)), rtol=1e-5)
        assert pool.map(lambda x: 2 * x, (1, 2), 1).tolist() == [2, 4]
        assert pool.starmap(lambda x, y: x - y, [(1, 2), (5, 3)]).tolist() == [-1, 2]
        with pytest.raises(NotTraceable, match="jax=False"):
            pool.map(branches, [1.0])
        with pytest.raises(NotTraceable, match="jax=False"):
            pool.map(str.upper, ["a"])


def test_with_jax_false_a_pool_maps_as_multiprocessing_does_and_is_closed_like_its(patient_gangs):
    pool = jaxrun.pool(2, jax=False)
    assert pool.map(lambda x: x * x, [10**20, -1, 7]) == [10**40, 1, 49]  # as 32 bits these would be others
    assert pool.map(len, ((1, 2), (3,))) == [2, 1]
    assert pool.starmap(lambda x, y: x + y, [(1, 2), ("a", "b")]) == [3, "ab"]
    with pytest.raises(ValueError, match="still runs"):
        pool.join()
    pool.close()
    with pytest.raises(GangError, match="closed"):
        pool.map(abs, [1])
    pool.join()


NOBODY_CLOSES = """
import os, signal, sys
import jaxrun
pool = jaxrun.pool(2, jax=False)
print(pool.map(abs, [-1, 2]), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.extended
@pytest.mark.parametrize(("how", "status"), [("ends", 0), ("killed", -signal.SIGKILL)])
def test_processes_of_a_pool_that_nobody_closes_end_with_their_parent(how, status):
    command = [sys.executable, "-c", NOBODY_CLOSES, how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=90)  # until all have closed its stdout
    assert (run.returncode, run.stdout) == (status, "[1, 2]\n"), run
