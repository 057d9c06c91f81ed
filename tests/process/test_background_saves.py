"""Checkpoints that orbax saves in the background, as they are reported."""

import threading
from queue import Queue

import pytest
from fakes import fake_module

from jaxrun_runtime import checkpoints


class SlowManager:
    """Saves in the background: a wait of another thread ends when the test lets it, or with an error."""

    def __init__(self):
        self.error = None
        self.waiting = Queue()

    def save(self, step):
        return True

    def wait_until_finished(self):
        if threading.current_thread() is not threading.main_thread():
            end = threading.Event()
            self.waiting.put((threading.current_thread(), end))
            end.wait()
        if self.error:
            raise self.error


def let_end(wait):
    thread, end = wait
    end.set()
    thread.join()


@pytest.fixture
def manager(monkeypatch):
    """A SlowManager; `saved` are the steps that are reported of it."""

    class Watched(SlowManager):
        def __init__(self):
            super().__init__()
            self.saved = []

    checkpoints._watch_orbax(fake_module("orbax.checkpoint", CheckpointManager=Watched))
    made = Watched()
    monkeypatch.setattr(checkpoints, "_report", made.saved.append)
    return made


def test_a_save_is_not_reported_by_the_end_of_a_wait_for_the_one_before(manager):
    manager.save(1)
    first = manager.waiting.get()
    manager.wait_until_finished()
    assert manager.saved == [1]
    manager.save(2)
    second = manager.waiting.get()
    let_end(first)
    assert manager.saved == [1]
    let_end(second)
    assert manager.saved == [1, 2]


def test_a_save_that_has_failed_is_not_reported_even_where_the_program_goes_on(manager):
    manager.save(1)
    manager.error = OSError("disk full")
    with pytest.raises(OSError, match="disk full"):
        manager.wait_until_finished()
    manager.error = None
    manager.wait_until_finished()  # orbax raises an error once
    let_end(manager.waiting.get())
    assert manager.saved == []
