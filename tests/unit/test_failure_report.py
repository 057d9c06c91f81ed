"""The failure report of a worker: the user's frames, and text that can be sent and shown; errors of threads, hooks."""

import runpy
import signal
import sys
import threading
import traceback

import pytest

from jaxrun.protocol.codec import encode
from jaxrun.protocol.payload import pickle_exception
from jaxrun.protocol.worker_messages import ThreadFailed, WorkerMessageDecoder
from jaxrun_runtime import checkpoints, failure_report, import_watch, run_program
from jaxrun_runtime.agent_channel import AgentDisconnected

pytestmark = pytest.mark.jax_version

_OURS = run_program.__file__
_LIBRARY = "/somewhere/site-packages/library.py"


def _raised(*files, error=None):
    """An error that came up through functions of these files, the first being the outermost."""
    error = error or ValueError("no")

    def raise_():
        raise error

    step = raise_
    for number, file in enumerate(reversed(files)):
        names = {"step": step}
        exec(compile(f"def function_{number}():\n    step()\n", file, "exec"), names)
        step = names[f"function_{number}"]
    try:
        step()
    except BaseException as caught:
        caught.__traceback__ = caught.__traceback__.tb_next  # this function's own
        return caught
    raise AssertionError(files)


def _files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


@pytest.mark.parametrize("module", [checkpoints, import_watch])
def test_the_frames_of_a_function_that_jaxrun_has_wrapped_are_cut_but_not_those_in_which_the_error_is(module):
    wrapper = module.__file__
    error = _raised("train.py", wrapper, wrapper, _LIBRARY, wrapper)
    failure_report.trim_traceback(error)
    assert _files(error) == ["train.py", _LIBRARY, __file__]
    innermost = _raised("train.py", wrapper, wrapper)
    innermost.__traceback__.tb_next.tb_next.tb_next = None
    failure_report.trim_traceback(innermost)
    assert _files(innermost) == ["train.py", wrapper, wrapper]


OURS_ABOVE = {
    "the program's": [_OURS],
    "runpy, frozen": [_OURS, "<frozen runpy>", "<frozen runpy>"],
    "runpy": [_OURS, runpy.__file__],
    "importlib": [_OURS, "<frozen importlib._bootstrap>", "<frozen importlib._bootstrap_external>"],
}


@pytest.mark.parametrize("above", OURS_ABOVE.values(), ids=OURS_ABOVE)
def test_the_frames_above_the_program_are_cut(above):
    error = _raised(*above, "train.py", _LIBRARY)
    text = failure_report.format_traceback(error)
    assert _files(error)[:2] == ["train.py", _LIBRARY]
    assert text.startswith('Traceback (most recent call last):\n  File "train.py"')
    assert text.endswith("ValueError: no\n")


@pytest.mark.parametrize(
    "kept",
    [
        ["train.py", _OURS],
        ["train.py", "<frozen importlib._bootstrap>"],
        ["train.py", runpy.__file__],
        ["train.py", "/home/me/runpy.py"],
        [_OURS.replace("run_program.py", "programs/train.py")],
        ["/home/me/runpy.py"],
        [_LIBRARY],
    ],
)
def test_a_program_stays_wherever_it_lives_and_the_frames_below_its_own(kept):
    error = _raised(_OURS, *kept)
    failure_report.trim_traceback(error)
    assert _files(error)[: len(kept)] == kept


def test_causes_contexts_and_groups_are_cut_too():
    class Empty(Exception):
        """An error that is false."""

        def __len__(self):
            return 0

    outer = ValueError("outer")
    outer.__cause__ = _raised(_OURS, "cause.py", error=Empty())
    outer.__cause__.__context__ = _raised(_OURS, "context.py")
    outer.__context__ = ExceptionGroup("many", [_raised(_OURS, "one.py"), _raised(_OURS, "two.py")])
    outer.__context__.exceptions[0].__cause__ = outer  # a circle
    text = failure_report.format_traceback(_raised(_OURS, "train.py", error=outer))
    assert _OURS not in text
    assert "cause.py" in text
    inner = outer.__context__.exceptions
    assert [_files(error)[0] for error in (*inner, outer.__cause__.__context__)] == ["one.py", "two.py", "context.py"]


@pytest.mark.parametrize(("stage", "is_kept"), [("join", True), ("program", False)])
def test_an_error_of_ours_alone_keeps_its_frames_unless_it_is_about_the_program(stage, is_kept):
    error = _raised(_OURS)
    error.__traceback__.tb_next = None
    text = failure_report.describe_failure(error, 0, stage).traceback
    assert _OURS in text if is_kept else text == "ValueError: no\n"


def test_a_syntax_error_shows_the_line_and_nothing_else():
    try:
        compile("x = 1\nif x\n", "train.py", "exec")
    except SyntaxError as error:
        error.__traceback__ = None
        words = failure_report.describe_failure(error, 0, "program")
    assert words.error == "SyntaxError"
    assert words.traceback.startswith('  File "train.py", line 2\n    if x\n')
    assert words.message == "expected ':' (train.py, line 2)"


def test_the_report_holds_rank_stage_status_and_notes():
    error = _raised("train.py")
    error.add_note("in shard 2")
    words = failure_report.describe_failure(error, 3, "program")
    assert (words.rank, words.stage, words.status, words.error, words.message) == (3, "program", 1, "ValueError", "no")
    assert words.notes == ("in shard 2",)
    assert "in shard 2" in words.traceback


def test_a_sys_exit_has_a_message_but_no_traceback():
    words = failure_report.describe_failure(_raised("train.py", error=SystemExit("no data")), 0, "program")
    assert (words.error, words.message, words.traceback) == ("SystemExit", "no data", "")
    assert failure_report.describe_failure(SystemExit(3), 0, "program").message == ""


class _Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class _OddNotes(Exception):
    __notes__ = 7


def _exits(self):
    raise SystemExit(0)


_HOSTILE = [
    type("Text", (Exception,), {"__str__": _exits}),
    type("Repr", (Exception,), {"__repr__": _exits}),
    type("Notes", (Exception,), {"__notes__": property(_exits)}),
    type("Cause", (Exception,), {"__cause__": property(_exits)}),
    type("Reduce", (Exception,), {"__reduce__": _exits, "__getstate__": _exits}),
    type("Interrupts", (Exception,), {"__str__": lambda self: signal.default_int_handler(2, None)}),
]


@pytest.mark.parametrize(
    "error",
    [
        _Odd(),
        _OddNotes(),
        SystemExit(_Odd()),
        ExceptionGroup("many", [ValueError("one"), _Odd()]),
        ValueError("\udcff\ud83d\0\x1b[31m"),
        type("Näme", (Exception,), {})("x"),
        ValueError("x" * 1_000_000),
        ValueError("\U0001f600" * 300_000),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        OSError(2, "No such file", "\udcff"),
        *(kind("x") for kind in _HOSTILE),
        SystemExit(_HOSTILE[0]()),
        ExceptionGroup("many", [kind() for kind in _HOSTILE]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_exception_makes_a_report_that_can_be_sent_and_shown(error):
    words = failure_report.describe_failure(_raised(_OURS, "train.py", error=error), 0, "program")
    assert words.status == 1
    pickle_exception(error)  # raises nothing either
    (received,) = WorkerMessageDecoder().feed(encode(words))
    assert received == words
    for text in (words.error, words.message, words.traceback, *words.notes):
        text.encode()
        assert len(text) < 250_000


def test_many_and_long_notes_are_clipped():
    error = ValueError("no")
    for number in range(1000):
        error.add_note(f"{number} " + "x" * 100_000)
    words = failure_report.describe_failure(error, 0, "program")
    encode(words)
    assert words.notes[0].startswith("0 xxx")


def test_a_clipped_text_keeps_both_ends_and_says_how_much_is_missing():
    text = failure_report.clip_text("a" * 100 + "b" * 100, 100)
    assert text == "a" * 50 + "\n… 100 characters left out …\n" + "b" * 50
    assert failure_report.clip_text("short", 100) == "short"


# ---- errors that end a thread, and hooks of the program that print errors


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


def _end_thread(error, name):
    """Calls Python's hook as it does at the end of a thread that has raised this error."""
    thread = threading.Thread(name=name)  # which never runs
    threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))


def test_a_failing_thread_is_reported_and_still_printed_and_one_that_exits_is_not_reported(hook):
    channel = _Channel()
    failure_report.report_thread_failures(channel, 2)
    _end_thread(ZeroDivisionError("division by zero"), "loader\udcff")
    _end_thread(SystemExit(3), "quitter")
    (words,) = channel.sent
    assert isinstance(words, ThreadFailed)
    assert (words.rank, words.thread, words.error) == (2, "loader\\udcff", "ZeroDivisionError")
    assert words.traceback.endswith("ZeroDivisionError: division by zero\n")
    assert [args.exc_type for args in hook] == [ZeroDivisionError, SystemExit]


def test_a_thread_is_printed_also_when_it_cannot_be_reported(hook):
    failure_report.report_thread_failures(_Channel(AgentDisconnected()), 2)
    _end_thread(ZeroDivisionError(), "\udcff")
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


def test_a_hook_of_the_program_that_exits_does_not_hide_the_error(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda *args: sys.exit(0))
    failure_report.print_error(ValueError("the error"))
    assert "Error in sys.excepthook" in (shown := capsys.readouterr().err) and "ValueError: the error" in shown
