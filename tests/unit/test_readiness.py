"""Descriptors are served when they are readable, in their order."""

import os

import pytest

from jaxrun.channel.event_loop import EventLoop


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
    ready = EventLoop()
    for order, (read, _) in zip((2, 0, 1), pipes, strict=True):
        ready.add_reader(read, order, lambda order=order: served.append(order))
    ready.run_once(0)
    assert served == [0, 1, 2]
    ready.close()


def test_a_forgotten_descriptor_is_not_served_and_can_be_watched_again(pipes):
    served = []
    ready = EventLoop()
    read, _ = pipes[0]
    ready.add_reader(read, 0, lambda: served.append("before"))
    ready.remove_reader(read)
    assert not ready.has_reader(read)
    ready.run_once(0)
    ready.add_reader(read, 0, lambda: served.append("again"))
    assert ready.has_reader(read)
    ready.run_once(None)
    assert served == ["again"]
    ready.close()


def test_forgetting_what_is_not_there_is_nothing(pipes):
    ready = EventLoop()
    read, _ = pipes[0]
    ready.remove_reader(read)
    ready.remove_reader(-1)  # what a closed socket calls its descriptor
    other = os.dup(read)
    ready.add_reader(other, 0, lambda: None)
    os.close(other)
    ready.remove_reader(other)
    ready.run_once(0)
    ready.close()


def test_one_that_serves_may_forget_another(pipes):
    ready = EventLoop()
    served = []
    (first, _), (second, _), _ = pipes
    ready.add_reader(first, 0, lambda: ready.remove_reader(second))
    ready.add_reader(second, 1, lambda: served.append(second))
    ready.run_once(0)  # it was ready when the wait ended
    ready.run_once(0)
    assert served == [second]
    ready.close()
