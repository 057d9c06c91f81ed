"""Descriptors are served when they are readable, in their order."""

import os

import pytest

from jaxrun.agent.readiness import Readiness


@pytest.fixture
def pipes():
    """Three readable pipes, as (reading, writing) ends."""
    made = [os.pipe() for _ in range(3)]
    for _, write in made:
        os.write(write, b"x")
    yield made
    for end in {end for pipe in made for end in pipe}:
        os.close(end)


def test_what_is_ready_is_served_in_order(pipes):
    served = []
    ready = Readiness()
    for order, (read, _) in zip((2, 0, 1), pipes, strict=True):
        ready.watch(read, order, lambda order=order: served.append(order))
    ready.serve(0)
    assert served == [0, 1, 2]
    ready.close()


def test_a_forgotten_descriptor_is_not_served_and_can_be_watched_again(pipes):
    served = []
    ready = Readiness()
    read, _ = pipes[0]
    ready.watch(read, 0, lambda: served.append("before"))
    ready.forget(read)
    assert not ready.watches(read)
    ready.serve(0)
    ready.watch(read, 0, lambda: served.append("again"))
    assert ready.watches(read)
    ready.serve(None)
    assert served == ["again"]
    ready.close()


def test_forgetting_what_is_not_there_is_nothing(pipes):
    ready = Readiness()
    read, _ = pipes[0]
    ready.forget(read)
    ready.forget(-1)  # what a closed socket calls its descriptor
    other = os.dup(read)
    ready.watch(other, 0, lambda: None)
    os.close(other)
    ready.forget(other)
    ready.serve(0)
    ready.close()


def test_one_that_serves_may_forget_another(pipes):
    ready = Readiness()
    served = []
    (first, _), (second, _), _ = pipes
    ready.watch(first, 0, lambda: ready.forget(second))
    ready.watch(second, 1, lambda: served.append(second))
    ready.serve(0)  # it was ready when the wait ended
    ready.serve(0)
    assert served == [second]
    ready.close()
