"""Calls of a real gang that fail, exchange values, or come from several threads: the same processes run the next."""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import pytest

import jaxrun
from jaxrun.gang.call_events import Printed, RankMessage, Returned


@pytest.fixture(scope="module")
def lasting():
    with jaxrun.Gang(processes=3) as made:
        yield made


@pytest.fixture
def gang(lasting):
    """Whatever is raised, the same processes execute the next call."""
    before = lasting.run(os.getpid)
    yield lasting
    assert lasting.healthy and lasting.run(os.getpid) == before


def rank():
    import jax

    return jax.process_index()


def total(x):
    """What every rank gives, summed over all."""
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(jnp.asarray(x)).sum(0)


# ---- errors


class Own(Exception):
    """A user's own, which cannot be called with its args."""

    def __init__(self, where, reason):
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


def fail(error, *ranks):
    if not ranks or rank() in ranks:
        raise error


def fail_in_its_own_way():
    if rank() == 1:
        raise Own("here", "because")


def fail_apart():
    raise [ValueError("a"), KeyError("b"), ValueError("a")][rank()]


def test_an_error_of_one_rank_is_raised_as_itself(gang):
    with pytest.raises(Own, match="here: because") as caught:
        gang.run(fail_in_its_own_way)
    error = caught.value
    assert (error.rank, error.ranks, error.where, error.reason) == (1, (1,), "here", "because")
    assert error.host == gang.workers[1].host
    assert "test_gang_calls.py" in str(error.__cause__) and "in fail_in_its_own_way" in str(error.__cause__)
    assert "jaxrun_runtime" not in str(error.__cause__)


def test_the_same_error_of_all_is_raised_once(gang):
    with pytest.raises(ValueError, match="bad") as caught:
        gang.run(fail, ValueError("bad"))
    assert caught.value.ranks == (0, 1, 2) and "the same on ranks 0-2" in caught.value.__notes__


def test_different_errors_are_a_group(gang):
    with pytest.raises(ExceptionGroup, match="ranks 0-2 raised 2 different errors") as caught:
        gang.run(fail_apart)
    assert {(type(error), error.ranks) for error in caught.value.exceptions} == {
        (ValueError, (0, 2)),
        (KeyError, (1,)),
    }


def test_a_sys_exit_ends_neither_the_rank_nor_the_caller(gang):
    with pytest.raises(jaxrun.RemoteError, match=r"sys\.exit with status 3"):
        gang.run(sys.exit, 3)


def test_an_interrupt_of_its_own_is_a_remote_error(gang):
    with pytest.raises(jaxrun.RemoteError, match="KeyboardInterrupt"):
        gang.run(fail, KeyboardInterrupt(), 2)


def test_a_result_that_cannot_travel(gang):
    with pytest.raises(TypeError, match="cannot pickle"):
        gang.run(threading.Lock)


def test_an_argument_that_cannot_travel(gang):
    with pytest.raises(TypeError, match="cannot pickle"):
        gang.run(len, threading.Lock())


def test_an_error_after_a_collective_call_leaves_the_ranks_in_step(gang):
    def step():
        total(1)
        fail(ValueError("after"), 1)

    with pytest.raises(ValueError, match="after"):
        gang.run(step)
    assert gang.run(total, 1).main == 3


# ---- who may use it, and how


def test_calls_of_several_threads_follow_each_other(gang):
    seen = []

    def caller(number):
        for step in range(10):
            seen.append(gang.run(lambda *args: args, number, step).main == (number, step))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 40


def test_a_gang_has_one_call_at_a_time(gang):
    with gang.start_call(rank) as call:
        with pytest.raises(jaxrun.GangError, match="in a call already; end that first"):
            gang.run(rank)
        while call.receive() is not None:
            pass


def test_a_function_cannot_take_its_gang_along(gang):
    with pytest.raises(TypeError, match="a gang stays in the process"):
        gang.run(lambda: gang.run(rank))


def answer_values():
    from jaxrun_runtime.gang import calls

    call = calls.current_call()
    call.send(("ready", call.rank, call.size))
    while (value := call.receive()) is not None:
        print("asked", flush=True)
        call.send(value * 10 + call.rank)
    return "bye"


def test_both_sides_may_send_values_meanwhile(gang):
    with gang.start_call(answer_values) as call:
        assert sorted(call.receive().value for _ in range(3)) == [("ready", n, 3) for n in range(3)]
        call.send(4, ranks=[1])
        assert [call.receive(), call.receive()] == [Printed(1, "out", b"asked\n"), RankMessage(1, 41)]
        assert call.receive(timeout=0) is None and call.running == (0, 1, 2)
        call.send(None)
        ended = [call.receive() for _ in range(3)]
        assert {(event.rank, event.value()) for event in ended if isinstance(event, Returned)} == {
            (0, "bye"),
            (1, "bye"),
            (2, "bye"),
        }
        assert call.receive() is None


def test_memory_may_be_shared_with_the_ranks(gang):
    from jaxrun.protocol.payload import SharedBuffer

    block = SharedBuffer(3 * 8)
    seen = np.frombuffer(block.memory, np.int64)

    def write(theirs):
        np.frombuffer(theirs.memory, np.int64)[rank()] = rank() + 10

    gang.run(write, block)
    assert seen.tolist() == [10, 11, 12]


def test_a_call_that_is_left_early_ends_for_the_ranks(gang):
    with gang.start_call(answer_values):
        pass


def test_an_interrupt_ends_the_function_on_all_ranks(gang):
    with gang.start_call(time.sleep, 60) as call:
        call.interrupt()
        assert {call.receive().error.error for _ in range(3)} == {"KeyboardInterrupt"}
