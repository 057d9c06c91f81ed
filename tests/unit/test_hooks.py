"""Errors that end a thread, and hooks of the program that print errors."""

import sys
import threading
import traceback

import pytest

from jaxrun.protocol.worker_messages import ThreadFailed
from jaxrun_runtime import failure_report
from jaxrun_runtime.agent_channel import AgentDisconnected

pytestmark = pytest.mark.jax_version


class _Channel:
    def __init__(self, error=None):
        self.sent = []
        self.error = error

    def send(self, message):
        if self.error:
            raise self.error
        self.sent.append(message)


@pytest.fixture
def hook(monkeypatch):
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    return printed


def _run_thread(target, name):
    thread = threading.Thread(target=target, name=name)
    thread.start()
    thread.join()


def test_a_failing_thread_is_reported_and_still_printed(hook):
    channel = _Channel()
    failure_report.report_thread_failures(channel, 2)
    _run_thread(lambda: 1 / 0, "loader\udcff")
    (words,) = channel.sent
    assert isinstance(words, ThreadFailed)
    assert (words.rank, words.thread, words.error) == (2, "loader\\udcff", "ZeroDivisionError")
    assert words.traceback.endswith("ZeroDivisionError: division by zero\n")
    assert [args.exc_type for args in hook] == [ZeroDivisionError]


def test_a_thread_that_exits_is_not_reported(hook):
    channel = _Channel()
    failure_report.report_thread_failures(channel, 2)
    _run_thread(lambda: sys.exit(3), "quitter")
    assert channel.sent == []


def test_a_thread_is_printed_also_when_it_cannot_be_reported(hook):
    failure_report.report_thread_failures(_Channel(AgentDisconnected()), 2)
    _run_thread(lambda: 1 / 0, "\udcff")
    assert [args.exc_type for args in hook] == [ZeroDivisionError]


def test_the_programs_own_hook_prints_and_is_given_the_error(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *args: seen.append(args))
    error = ValueError("no")
    with pytest.raises(ValueError):
        exec(compile("raise error", "train.py", "exec"), {"error": error})
    error.__traceback__ = error.__traceback__.tb_next
    failure_report.print_error(error)
    ((kind, value, frames),) = seen
    assert (kind, value) == (ValueError, error)
    assert traceback.extract_tb(frames)[0].filename == "train.py"


def test_a_hook_that_fails_hides_neither_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda *args: 1 / 0)
    failure_report.print_error(ValueError("no"))
    text = capsys.readouterr().err
    assert text.index("Error in sys.excepthook:") < text.index("ZeroDivisionError")
    assert text.index("Original exception was:") < text.index("ValueError: no")
