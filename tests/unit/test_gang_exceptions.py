"""Exceptions of the ranks: pickled, and raised in the parent with their own type if possible, equal ones once."""

import asyncio
import json
import pickle
import signal
import subprocess
import sys
import threading
import traceback

import pytest

from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.errors import JaxrunError
from jaxrun.frontends.gang.gang_errors import (
    CallTimeout,
    GangError,
    GangStartError,
    RemoteError,
    RemoteFailure,
    WorkerDied,
    combined_exception,
)
from jaxrun.protocol.payload import pickle_exception


class Own(Exception):
    """A user's."""


class ExitsWhenLoaded:
    def __reduce__(self):
        return sys.exit, (0,)


class OwnProperties(Exception):
    """Has properties by the names of attributes that are set on a rank's exception."""

    rank = property(lambda self: "mine")
    __notes__ = property(lambda self: sys.exit(0))


class Frozen(Exception):
    """Takes no attributes."""

    def __setattr__(self, name, value):
        raise AttributeError(name)


def remote(error, rank=0, *, host="h1", time=1.0, home=None, data=None, notes=(), status=1):
    """What arrives when a rank has raised `error`."""
    name = type(error).__name__
    exits = isinstance(error, SystemExit)
    content = {
        "error": name,
        "message": "" if exits else str(error),
        "traceback": f'  File "train.py", line 3, in step\n{name}: {error}\n',
        "notes": notes,
        "status": status,
        "time": time,
        "home": home or type(error).__module__,
        "exception": pickle_exception(error) if data is None else data,
    }
    return RemoteFailure.from_rank(rank, host, content)


def test_one_failure_is_raised_as_itself_and_the_remote_traceback_is_shown_above_ours():
    error = combined_exception([remote(Own("x", 3), rank=2, host="h3")])
    assert type(error) is Own and error.args == ("x", 3)
    assert (error.rank, error.host, error.ranks) == (2, "h3", (2,))
    assert not hasattr(error, "__notes__")
    shown = "".join(traceback.format_exception(error))
    assert 'rank 2 (h3):\n  File "train.py", line 3, in step\nOwn: (\'x\', 3)\n"""' in shown
    assert "direct cause" in shown and shown.rstrip().endswith("Own: ('x', 3)")


def test_the_same_of_several_ranks_is_raised_once():
    error = combined_exception([remote(ValueError("bad"), rank, host=f"h{rank}", time=9.0 - rank) for rank in range(3)])
    assert type(error) is ValueError and error.__notes__ == ["the same on ranks 0-2 (h0, h1, h2)"]
    assert (error.rank, error.ranks) == (2, (0, 1, 2))  # the first in time


def test_errors_that_differ_by_the_addresses_of_objects_are_the_same():
    made = combined_exception(
        [remote(ValueError(f"bad <lock object at 0x7f{rank}3a4b5c6d7e>"), rank) for rank in (0, 1)]
    )
    assert type(made) is ValueError and made.ranks == (0, 1)
    assert isinstance(
        combined_exception([remote(ValueError(f"status 0x{rank}"), rank) for rank in (0, 1)]), ExceptionGroup
    )


def test_different_errors_are_a_group_the_first_one_first():
    failures = [
        remote(ValueError("late"), 0, time=3.0),
        remote(KeyError("early"), 1, time=1.0),
        remote(ValueError("late"), 2, time=2.0),
        remote(ValueError("later"), 3, time=4.0),
    ]
    group = combined_exception(failures)
    assert isinstance(group, ExceptionGroup) and group.message == "ranks 0-3 raised 3 different errors"
    assert [(type(error), error.ranks) for error in group.exceptions] == [
        (KeyError, (1,)),
        (ValueError, (0, 2)),
        (ValueError, (3,)),
    ]
    with pytest.raises(ExceptionGroup) as caught:
        raise group
    assert caught.group_contains(KeyError, match="early")


def test_equal_messages_from_two_places_differ():
    one, other = remote(ValueError("x")), remote(ValueError("x"), 1)
    other = RemoteFailure(
        **{name: getattr(other, name) for name in RemoteFailure.__slots__} | {"traceback": "elsewhere\n"}
    )
    assert isinstance(combined_exception([one, other]), ExceptionGroup)


def test_the_fate_of_the_others_is_a_note():
    assert combined_exception([remote(KeyError("x"))], "rank 1 did not return").__notes__ == ["rank 1 did not return"]
    both = combined_exception([remote(KeyError("x")), remote(ValueError("y"), 1)], "rank 2 did not return")
    assert both.__notes__ == ["rank 2 did not return"]


_BROKEN = "UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error [127.0.0.1]:{}: Connection reset by peer"


def test_a_lost_connection_is_a_note_to_the_error_of_another_rank():
    broken = [remote(ValueError(_BROKEN.format(4995 + rank)), rank, time=0.5) for rank in (0, 2)]
    error = combined_exception([*broken, remote(KeyError("own"), 1, time=1.0)])
    assert type(error) is KeyError and error.rank == 1
    assert error.__notes__ == ["ranks 0, 2 lost a connection to another rank"]
    alone = combined_exception(broken)
    assert type(alone) is ValueError and alone.ranks == (0, 2)


ENDINGS = {
    "SystemExit: the function has called sys.exit with status 3": SystemExit(3),
    "KeyboardInterrupt: stop": KeyboardInterrupt("stop"),
    "GeneratorExit": GeneratorExit(),
    "CancelledError: by a rank": asyncio.CancelledError("by a rank"),
}


@pytest.mark.parametrize("text", ENDINGS)
def test_an_exception_that_would_end_the_parent_is_a_remote_error(text):
    made = combined_exception([remote(ENDINGS[text], rank=1, status=3)])
    assert type(made) is RemoteError and made.rank == 1 and str(made).startswith(text)


NOT_HERE = {
    "nothing could be pickled": b"",
    "its module is not here": pickle.dumps(Own("x")).replace(b"Own", b"Gon"),
    "no exception": pickle.dumps("text"),
    "no pickle": b"garbage",
    "its class exits when it is unpickled": pickle.dumps(ExitsWhenLoaded()),
}


@pytest.mark.parametrize("data", NOT_HERE.values(), ids=NOT_HERE)
def test_an_exception_that_cannot_be_made_here_is_a_remote_error(data):
    made = combined_exception([remote(Own("x"), rank=4, data=data)])
    assert type(made) is RemoteError and str(made) == "Own: x" and made.rank == 4
    assert isinstance(made.__cause__, Exception) and "train.py" in str(made.__cause__)


OF_JAX = ["jax", "jax.errors", "jaxlib.xla_extension"]


@pytest.mark.parametrize(
    ("home", "is_imported", "kind"),
    [*((home, False, RemoteError) for home in OF_JAX), ("jax.errors", True, Own), ("jaxtyping.errors", False, Own)],
)
def test_an_error_of_jax_does_not_bring_jax_here(home, is_imported, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", sys)
    if not is_imported:
        monkeypatch.delitem(sys.modules, "jax")
    made = combined_exception([remote(Own("shapes differ"), home=home)])
    assert type(made) is kind and str(made) == ("Own: " if kind is RemoteError else "") + "shapes differ"


def test_an_exception_that_takes_no_attributes_is_raised_all_the_same():
    one = combined_exception([remote(Frozen("x"), rank=1)])
    assert type(one) is Frozen and "rank 1 (h1)" in str(one.__cause__)
    several = combined_exception([remote(Frozen("x"), rank) for rank in range(2)])
    assert type(several) is Frozen and several.__notes__ == ["the same on ranks 0-1"]


def test_properties_of_an_exceptions_class_are_left_alone():
    made = combined_exception([remote(OwnProperties("x"), rank) for rank in range(2)], "rank 2 did not return")
    assert type(made) is OwnProperties and (made.rank, made.ranks) == ("mine", (0, 1))


DEATHS = {
    "by a signal": (("killed", 137, (1,)), (1, "h2", (1,), signal.SIGKILL, 137)),
    "by a signal without a name": (("killed", 168, (1,)), (1, "h2", (1,), 40, 168)),
    "by other means": (("exited", 7, (1, 2)), (1, "h2", (1, 2), None, 7)),
    "of which nobody is to blame": (("interrupted", 129, ()), (None, "", (), None, 129)),
}


@pytest.mark.parametrize(("verdict", "expected"), DEATHS.values(), ids=DEATHS)
def test_a_death_is_described(verdict, expected):
    outcome, code, culprits = verdict
    error = WorkerDied.from_verdict(Verdict(outcome, code, {0: "h1", 1: "h2", 2: "h2"}, culprits), "what it was")
    assert (error.rank, error.host, error.ranks, error.signal, error.status) == expected
    assert str(error) == "what it was" and error.exit_code == code
    assert isinstance(error.signal, signal.Signals) is (error.signal == signal.SIGKILL)


@pytest.mark.parametrize(
    ("error", "code"), [(GangStartError("x"), 69), (GangStartError("x", 2), 2), (CallTimeout("x", [1]), 124)]
)
def test_errors_of_gangs_have_exit_codes_as_all_of_ours_have(error, code):
    assert isinstance(error, GangError) and isinstance(error, JaxrunError) and error.exit_code == code
    assert isinstance(error, TimeoutError) is isinstance(error, CallTimeout)


# ---- pickling


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
    Own("a", 1),
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


def test_args_arrive_and_so_does_a_class_that_was_made_in_a_function():
    class Local(Exception):
        pass

    assert pickle.loads(pickle_exception(OSError(2, "No such file", "x.npy"))).filename == "x.npy"
    made = pickle.loads(pickle_exception(Local("a", 1)))
    assert type(made) is Local and made.args == ("a", 1)


def test_the_cause_of_an_exception_stays_behind():
    try:
        try:
            raise KeyError(threading.Lock())
        except KeyError as cause:
            raise ValueError("x") from cause
    except ValueError as error:
        made = pickle.loads(pickle_exception(error))
    assert made.__cause__ is None and made.__context__ is None and made.__traceback__ is None


def test_an_exception_that_would_arrive_changed_does_not_travel():
    locked = Own("x")
    locked.lock = threading.Lock()
    assert [pickle_exception(error) for error in (locked, Own(threading.Lock()), Slotted("here"))] == [b""] * 3
