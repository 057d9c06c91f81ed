"""gang.map and gang.imap on real gangs: on devices of one process, of several, and without shared memory."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import jaxrun
from jaxrun.errors import UsageError
from jaxrun.frontends.map.gang_map import imap, map
from jaxrun.frontends.map.items import NotTraceable
from jaxrun.frontends.map.stats import last_stats


class Point(NamedTuple):
    x: object
    y: object


class RemoteGang(jaxrun.Gang):
    """A gang whose chunks travel within messages, as between hosts."""

    shares_memory = False


KINDS = {
    "1 x 2": (jaxrun.Gang, {"processes": 1, "devices": 2}),
    "2 x 1": (jaxrun.Gang, {"processes": 2, "devices": 1}),
    "2 hosts": (RemoteGang, {"processes": 2, "devices": 1, "hosts": 2}),
}


@pytest.fixture(scope="module")
def gangs(patient_gangs):
    """gangs(kind) → a gang that is kept for the module."""
    made = {}

    def find(kind):
        if kind not in made:
            cls, shape = KINDS[kind]
            made[kind] = cls(**shape, platform="cpu")
        return made[kind]

    yield find
    for gang in made.values():
        gang.close()


@pytest.fixture(params=KINDS)
def gang(gangs, request):
    return gangs(request.param)


@pytest.fixture
def one(gangs):
    return gangs("2 x 1")


def polynomial(x):
    return {"value": 3 * x + 1, "point": Point(-x, jnp.stack([x, 2 * x]))}


@pytest.mark.parametrize("count", [0, 7, 70_001])
@pytest.mark.parametrize("chunk", ["auto", 300])
def test_results_are_those_of_each_item_in_order(gang, count, chunk):
    xs = np.arange(count, dtype=np.float32)
    result = map(gang, polynomial, xs, chunk=chunk)
    np.testing.assert_array_equal(result["value"], 3 * xs + 1)
    np.testing.assert_array_equal(result["point"].x, -xs)
    np.testing.assert_array_equal(result["point"].y, np.stack([xs, 2 * xs], axis=1))
    assert isinstance(result["point"], Point)
    assert result["value"].dtype == np.float32


def test_axes_static_arguments_and_what_is_not_mapped(gang):
    def f(item, *, power, name):
        assert name == "n"
        return (item["w"] @ item["x"]) ** power

    xs = np.arange(21.0).reshape(3, 7)
    result = map(
        gang, f, {"w": np.ones((2, 3)), "x": xs}, in_axes={"w": None, "x": 1}, static={"power": 2, "name": "n"}
    )
    np.testing.assert_allclose(result, np.stack([xs.sum(0) ** 2] * 2, axis=1))


def test_imap_streams_in_order_and_stops_when_it_is_left(gang):
    taken = []

    def endless():
        for number in itertools.count():
            taken.append(number)
            yield number

    squares = imap(gang, lambda x: x * x, endless(), chunk=10)
    assert [int(square) for square in itertools.islice(squares, 95)] == [number * number for number in range(95)]
    squares.close()
    assert len(taken) < 500
    assert gang.healthy
    assert len(gang.run(os.getpid)) == gang.processes


def branches(x):
    return "positive" if x > 0 else "not"


def test_a_function_that_cannot_be_traced_is_refused_with_its_line_and_the_way_out(one):
    with pytest.raises(NotTraceable) as caught:
        map(one, branches, np.arange(3))
    text = str(caught.value)
    assert "cannot trace branches" in text
    assert f"{__file__}:" in text and 'return "positive" if x > 0' in text
    assert "jax=False" in text
    assert one.healthy


def test_jax_false_calls_a_python_function_for_each_item(gang):
    assert map(gang, branches, [1, -1, 2], jax=False) == ["positive", "not", "positive"]
    assert list(imap(gang, branches, iter([1, -1]), jax=False)) == ["positive", "not"]
    assert map(gang, lambda x, base: int(str(x), base), range(8), static={"base": 8}, jax=False) == list(range(8))
    assert "plain Python" in str(last_stats(gang))


def test_python_items_are_spread_over_the_ranks(one, tmp_path):
    def wait_for_the_other(number):
        (tmp_path / str(number)).touch()
        while not (tmp_path / str(1 - number)).exists():
            time.sleep(0.001)
        return os.getpid()

    pids = map(one, wait_for_the_other, range(2), jax=False)
    assert sorted(pids) == sorted(worker.pid for worker in one.workers)


def fails_at_17(x):
    if x == 17:
        raise LookupError("item of ill omen")
    return x


def test_a_python_item_that_raises_is_named(one):
    with pytest.raises(LookupError, match="ill omen") as caught:
        map(one, fails_at_17, range(100), jax=False)
    assert caught.value.__notes__ == ["raised for item 17"]
    assert caught.value.rank in (0, 1)
    results = imap(one, fails_at_17, range(100), jax=False)
    assert list(itertools.islice(results, 17)) == list(range(17))
    with pytest.raises(LookupError):
        next(results)
    assert one.healthy


def test_an_error_while_tracing_is_the_functions_own(one):
    with pytest.raises(ZeroDivisionError) as caught:
        map(one, lambda x: x * (1 / 0), np.arange(3.0))
    assert caught.value.ranks == tuple(range(one.processes))
    assert one.healthy


@pytest.mark.parametrize("jax", [True, False])
def test_an_interrupt_ends_a_map_and_leaves_the_gang_usable(one, jax):
    def items():
        for number in itertools.count():
            if number == 100:
                raise KeyboardInterrupt
            yield number

    with pytest.raises(KeyboardInterrupt):
        list(imap(one, lambda x: x + 1, items(), chunk=5, jax=jax))
    assert one.healthy
    assert map(one, lambda x: x + 1, [1, 2]).tolist() == [2, 3]


def test_lists_are_taken_and_arguments_that_do_not_fit_are_refused(one):
    assert map(one, lambda x: x + 1, [1, 2, 3]).tolist() == [2, 3, 4]
    assert map(one, lambda pair: pair[0] + pair[1], [(1, 2), (3, 4)]).tolist() == [3, 7]
    assert map(one, lambda x: x, []) == []
    with pytest.raises(OverflowError, match="jax_enable_x64"):
        map(one, lambda x: x, [1, 2**40])
    with pytest.raises(UsageError, match="chunk"):
        map(one, polynomial, [1], chunk=0)
    with pytest.raises(UsageError, match="in_axes"):
        map(one, polynomial, np.ones(3), in_axes=(0, 0))
    with pytest.raises(UsageError, match="jax=False"):
        map(one, polynomial, {"a": [1]}, jax=False)
    assert one.healthy


def test_the_chosen_distribution_is_in_the_statistics(one):
    map(one, lambda x: x, np.arange(100.0), chunk=30)
    stats = last_stats(one)
    assert (stats.processes, stats.devices, stats.chunk_size, stats.items) == (2, 1, 30, 100)
    assert "2 processes x 1 device (cpu), chunks of 30: 100 items" in str(stats)


def test_imap_takes_trees_and_an_end_that_is_uneven(one):
    items = ({"a": number, "b": np.full(2, number)} for number in range(25))
    results = list(imap(one, lambda item: (item["a"], item["b"].sum()), items, chunk=4))
    assert [(int(a), int(b)) for a, b in results] == [(number, 2 * number) for number in range(25)]
    assert list(imap(one, lambda x: x, iter([]))) == []
    assert list(imap(one, lambda x: None, iter(range(3)))) == [None] * 3
    with pytest.raises(TypeError, match="the first is"):
        list(imap(one, lambda x: x, iter([1, 2.5]), chunk=1))
    assert one.healthy


def test_a_rank_that_dies_is_named_and_the_next_map_works(one):
    with pytest.raises(jaxrun.WorkerDied) as caught:
        map(one, lambda x: os.kill(os.getpid(), signal.SIGKILL) if x == 3 else x, range(100), jax=False)
    assert caught.value.signal == signal.SIGKILL
    assert map(one, lambda x: x + 1, [1, 2]).tolist() == [2, 3]
