"""Exceptions are pickled and arrive as they were raised."""

import json
import pickle
import subprocess
import threading

import pytest

from jaxrun.protocol.exceptions import pickle_exception


class Plain(Exception):
    """Nothing special."""


class TwoWords(Exception):
    """Cannot be called with its args."""

    def __init__(self, code, *, reason):
        super().__init__(f"{code}: {reason}")
        self.code, self.reason = code, reason


class Wrapped(Exception):
    """Can be called with its args, which then makes another message of it."""

    def __init__(self, code):
        super().__init__(f"status {code}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("place",)

    def __init__(self, place):
        super().__init__()
        self.place = place

    def __str__(self):
        return f"at {self.place}"


TRAVEL = [
    ValueError("bad record", 3),
    KeyError("a"),
    OSError(2, "No such file", "x.npy"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    json.JSONDecodeError("Expecting value", "{", 1),
    subprocess.CalledProcessError(3, ["make"], output="o"),
    StopIteration(5),
    KeyboardInterrupt(),
    Plain("a", 1),
    TwoWords(4, reason="late"),
    Wrapped(404),
    ExceptionGroup("several", [ValueError("a"), KeyError("b")]),
]


@pytest.mark.parametrize("error", TRAVEL, ids=lambda error: type(error).__name__)
def test_an_exception_arrives_as_it_was(error):
    made = pickle.loads(pickle_exception(error))
    assert type(made) is type(error)
    assert str(made) == str(error)
    assert {name: value for name, value in vars(made).items() if name != "__notes__"} == vars(error)


def test_args_arrive():
    assert pickle.loads(pickle_exception(OSError(2, "No such file", "x.npy"))).filename == "x.npy"
    assert pickle.loads(pickle_exception(Plain("a", 1))).args == ("a", 1)


def test_a_class_that_was_made_in_a_function_travels_with_it():
    class Local(Exception):
        pass

    made = pickle.loads(pickle_exception(Local("x")))
    assert type(made) is Local and made.args == ("x",)


def test_the_cause_of_an_exception_stays_behind():
    try:
        try:
            raise KeyError(threading.Lock())
        except KeyError as cause:
            raise ValueError("x") from cause
    except ValueError as error:
        made = pickle.loads(pickle_exception(error))
    assert made.__cause__ is None and made.__context__ is None and made.__traceback__ is None


@pytest.mark.parametrize("error", [Plain(threading.Lock()), Slotted("here")], ids=["a lock", "state that is lost"])
def test_an_exception_that_would_arrive_changed_does_not_travel(error):
    assert pickle_exception(error) == b""


def test_an_attribute_that_cannot_travel_keeps_all_of_it_back():
    error = Plain("x")
    error.lock = threading.Lock()
    assert pickle_exception(error) == b""
