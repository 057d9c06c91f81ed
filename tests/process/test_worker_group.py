"""The workers of a host while they are started: forked, or in interpreters of their own if none can be forked."""

from __future__ import annotations

import errno
import itertools
import os
import sys

import pytest

from jaxrun.node.agent import spawn
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.node.agent.worker_group import WorkerGroup
from jaxrun.protocol.agent_messages import StartFailed, WorkerSpawned
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import WorkerForked

ENDED = "the process that imports jax for all workers has ended"


class AnsweringServer:
    """Stands in for a fork server, and answers as it is told."""

    closed = has_gone = False

    def __init__(self) -> None:
        self.answers: list[WorkerForked | None] = []

    def send(self, message: bytes, descriptors: list[int]) -> None:
        pass

    def begin_attempt(self, workers: int) -> None:
        pass

    def receive(self) -> list[WorkerForked | None]:
        answers, self.answers = self.answers, []
        return answers

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def server() -> AnsweringServer:
    return AnsweringServer()


@pytest.fixture
def group(server, tmp_path):
    workers = tuple(WorkerEnv("ab" * 16, rank, 3, rank, 3, "h1", rank_token="cd" * 16) for rank in range(3))
    setup = WorkerSetup((sys.executable, "-c", "pass"), dict(os.environ), workers, tmp_path)
    group = WorkerGroup(setup, server, keep_server=True)
    assert group.start() == []
    yield group
    for process in group:
        process.pipes.close()


def answer(group, server, *answers):
    server.answers += answers
    return group.receive_forked()


def start_fresh(group):
    """Start those that wait, and wait until they have ended; returns their ranks."""
    return end_all(group.start_fresh())


def end_all(events):
    """Wait until all these workers have ended; returns their ranks."""
    assert all(isinstance(event, WorkerSpawned) for event in events), events
    assert all(os.waitpid(event.pid, 0)[1] == 0 for event in events)
    return [event.rank for event in events]


def test_if_none_can_be_forked_all_start_in_interpreters_of_their_own(group, server):
    assert answer(group, server, None) == [] and group.declined == ENDED
    assert start_fresh(group) == [0, 1, 2]


def test_if_some_were_forked_and_others_cannot_be_nothing_is_mixed(group, server):
    events = answer(group, server, WorkerForked(0, 1001), None)
    assert events == [WorkerSpawned(0, 1001), StartFailed(ENDED, rank=1), StartFailed(ENDED, rank=2)]
    assert not group.declined


def test_a_worker_that_cannot_be_forked_again_starts_in_an_interpreter_of_its_own(group, server):
    assert len(answer(group, server, *(WorkerForked(rank, 1000 + rank) for rank in range(3)))) == 3
    group[1].status = -9
    assert group.start_again(1) == [] and group.waiting == (1,)
    assert answer(group, server, None) == [] and group.declined == ENDED
    assert start_fresh(group) == [1] and [group[rank].pid for rank in (0, 2)] == [1000, 1002]


def refuse_first(monkeypatch, function):
    """Let the first call of this function of the module `spawn` fail."""
    original, calls = getattr(spawn, function), itertools.count()

    def refuse(*arguments):
        if next(calls):
            return original(*arguments)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(spawn, function, refuse)


def test_a_worker_whose_pipes_cannot_be_opened_again_is_none_of_the_group(group, server, monkeypatch):
    answer(group, server, *(WorkerForked(rank, 1000 + rank) for rank in range(3)))
    group[1].status = -9
    refuse_first(monkeypatch, "fork_request")
    assert group.start_again(1) == [StartFailed(f"Too many open files ({sys.executable})", rank=1)]
    assert list(group.ranks) == [0, 2] and group.waiting == ()


def test_if_one_cannot_be_started_again_the_others_are_nor_is_one_that_was_given_up(group, server, monkeypatch):
    answer(group, server, *(WorkerForked(rank, 1000 + rank) for rank in range(3)))
    for rank in range(3):
        group[rank].status = -9
    refuse_first(monkeypatch, "fork_request")
    assert [event.rank for event in group.start_again(0)] == [0], "it is given up"
    assert group.start_again(1) == group.start_again(2) == [] and group.waiting == (1, 2)
    assert answer(group, server, None) == [] and group.declined == ENDED
    refuse_first(monkeypatch, "spawn")
    failed, *started = group.start_fresh()
    assert failed == StartFailed(f"Too many open files ({sys.executable})", rank=1)
    assert end_all(started) == [2] and list(group.ranks) == [2]


def test_at_the_first_start_none_is_started_after_one_that_cannot_be(group, server, monkeypatch):
    answer(group, server, None)
    refuse_first(monkeypatch, "spawn")
    assert [type(event) for event in group.start_fresh()] == [StartFailed] and not group.ranks


def test_a_worker_for_which_there_is_no_process_is_named(group, server):
    answer(group, server, *(WorkerForked(rank, 1000 + rank) for rank in range(3)))
    group[2].status = -9
    server.has_gone = True
    object.__setattr__(group.setup, "argv", ("/no/such/python",))
    (failed,) = group.start_again(2)
    assert failed == StartFailed("No such file or directory (/no/such/python)", rank=2)
    assert list(group.ranks) == [0, 1]
