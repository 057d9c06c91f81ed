"""Checkpoints that orbax saves in the background, as they are reported, and their errors."""

import logging
import threading
from queue import Queue

import pytest
from fakes import fake_module

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.error_chain import BackgroundSave
from jaxrun_runtime import background_saves, checkpoints


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


def _run_in_thread(file, name, step):
    """Log an exception that has passed a function of `file`, in a thread of this name."""
    names = {}
    exec(compile("def fail():\n    raise OSError(28, 'No space left on device')\n", file, "exec"), names)

    def save():
        try:
            names["fail"]()
        except OSError:
            logging.getLogger("absl").error("failed", exc_info=True)

    if step is not None:
        background_saves.note_save(step)
    thread = threading.Thread(target=save, name=name)
    thread.start()
    thread.join()


def test_an_error_that_orbax_keeps_is_reported_when_it_is_logged(monkeypatch):
    sent = []

    class Channel:
        def send(self, message):
            sent.append(message)

    monkeypatch.setattr(background_saves, "_last_step", None)
    before = logging.getLogRecordFactory()
    try:
        background_saves.report_failures(WorkerEnv("ab" * 16, 3, 4, 0, 1, "h1"), Channel())
        orbax = "/v/lib/python3.13/site-packages/orbax/checkpoint/_src/a.py"
        _run_in_thread(orbax, "async_save", None)
        _run_in_thread(orbax, "save_finalize", 7)
        _run_in_thread(orbax, "jaxrun-checkpoint", None)  # it waits for the same save
        _run_in_thread("/job/train.py", "Loader", None)
        logging.getLogger("absl").error("no exception")
    finally:
        logging.setLogRecordFactory(before)
    assert [(one.rank, one.thread, one.error, one.save) for one in sent] == [
        (3, "async_save", "OSError", BackgroundSave(None)),
        (3, "save_finalize", "OSError", BackgroundSave(7)),
    ]
    assert sent[0].chain[0].message == "[Errno 28] No space left on device"
