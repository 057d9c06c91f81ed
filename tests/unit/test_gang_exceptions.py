"""Exceptions of the ranks raised in the parent: with their own type if possible, equal ones once."""

import pickle
import signal
import sys
import traceback

import pytest

from jaxrun.errors import JaxrunError
from jaxrun.gang.exceptions import (
    CallTimeout,
    GangError,
    GangStartError,
    RemoteError,
    RemoteFailure,
    WorkerDied,
    combined_exception,
)
from jaxrun.protocol.exceptions import pickle_exception
from jaxrun.verdict.verdict import Verdict


class Own(Exception):
    """A user's."""


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


def test_one_failure_is_raised_as_itself():
    error = combined_exception([remote(Own("x", 3), rank=2, host="h3")])
    assert type(error) is Own and error.args == ("x", 3)
    assert (error.rank, error.host, error.ranks) == (2, "h3", (2,))
    assert not hasattr(error, "__notes__")


def test_the_remote_traceback_is_shown_above_ours():
    shown = "".join(traceback.format_exception(combined_exception([remote(ValueError("bad"), rank=2, host="h3")])))
    assert 'rank 2 (h3):\n  File "train.py", line 3, in step\nValueError: bad\n"""' in shown
    assert "direct cause" in shown and shown.rstrip().endswith("ValueError: bad")


def test_the_same_of_several_ranks_is_raised_once():
    error = combined_exception([remote(ValueError("bad"), rank, host=f"h{rank}", time=9.0 - rank) for rank in range(3)])
    assert type(error) is ValueError and error.__notes__ == ["the same on ranks 0-2 (h0, h1, h2)"]
    assert (error.rank, error.ranks) == (2, (0, 1, 2))  # the first in time


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
    assert error.__notes__ == ["ranks 0, 2 lost a connection to another"]
    alone = combined_exception(broken)
    assert type(alone) is ValueError and alone.ranks == (0, 2)


ENDINGS = [SystemExit(3), KeyboardInterrupt("stop"), GeneratorExit()]


@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
def test_an_exception_that_would_end_the_parent_is_a_remote_error(error):
    made = combined_exception([remote(error, rank=1, status=3)])
    assert type(made) is RemoteError and made.rank == 1
    assert str(made).startswith(type(error).__name__)


def test_a_sys_exit_says_its_status():
    assert str(combined_exception([remote(SystemExit(3), status=3)])) == (
        "SystemExit: the function has called sys.exit with status 3"
    )


NOT_HERE = {
    "nothing could be pickled": b"",
    "its module is not here": pickle.dumps(Own("x")).replace(b"Own", b"Gon"),
    "no exception": pickle.dumps("text"),
    "no pickle": b"garbage",
}


@pytest.mark.parametrize("data", NOT_HERE.values(), ids=NOT_HERE)
def test_an_exception_that_cannot_be_made_here_is_a_remote_error(data):
    made = combined_exception([remote(Own("x"), rank=4, data=data)])
    assert type(made) is RemoteError and str(made) == "Own: x" and made.rank == 4
    assert isinstance(made.__cause__, Exception) and "train.py" in str(made.__cause__)


@pytest.mark.parametrize("home", ["jax", "jax.errors", "jaxlib.xla_extension"])
def test_an_error_of_jax_does_not_bring_jax_here(home, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "jax")
    made = combined_exception([remote(ValueError("shapes differ"), home=home)])
    assert type(made) is RemoteError and str(made) == "ValueError: shapes differ"


def test_where_jax_is_there_its_errors_are_themselves(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", sys)
    assert type(combined_exception([remote(ValueError("shapes differ"), home="jax.errors")])) is ValueError


def test_a_module_that_is_only_called_similarly_is_no_part_of_jax(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.delitem(sys.modules, "jax")
    assert type(combined_exception([remote(Own("x"), home="jaxtyping.errors")])) is Own


def test_an_exception_that_takes_no_attributes_is_raised_all_the_same():
    made = combined_exception([remote(Frozen("x"), rank=1)])
    assert type(made) is Frozen and "rank 1 (h1)" in str(made.__cause__)


def test_several_that_take_no_attributes_are_raised_all_the_same():
    made = combined_exception([remote(Frozen("x"), rank) for rank in range(2)])
    assert type(made) is Frozen and made.__notes__ == ["the same on ranks 0-1"]


def _verdict(outcome, code, culprits=(1,)):
    return Verdict(outcome, code, {0: "h1", 1: "h2", 2: "h2"}, culprits)


def test_a_death_of_a_signal_has_its_number_and_name():
    error = WorkerDied.from_verdict(_verdict("killed", 137), "rank 1 was killed")
    assert (error.rank, error.ranks, error.host, error.status) == (1, (1,), "h2", 137)
    assert error.signal is signal.SIGKILL and str(error) == "rank 1 was killed"


def test_a_death_of_a_signal_without_a_name_has_its_number():
    error = WorkerDied.from_verdict(_verdict("killed", 128 + 40), "rank 1 was killed")
    assert (error.signal, error.status) == (40, 168)


def test_a_death_by_other_means_has_no_signal():
    error = WorkerDied.from_verdict(_verdict("exited", 7, (1, 2)), "ranks 1-2 ended")
    assert (error.signal, error.status, error.exit_code, error.ranks) == (None, 7, 7, (1, 2))


def test_nobody_may_be_to_blame():
    error = WorkerDied.from_verdict(_verdict("interrupted", 129, ()), "stopped")
    assert (error.rank, error.host, error.ranks, error.signal) == (None, "", (), None)


@pytest.mark.parametrize(
    ("error", "code"), [(GangStartError("x"), 69), (GangStartError("x", 2), 2), (CallTimeout("x", [1]), 124)]
)
def test_errors_of_gangs_have_exit_codes_as_all_of_ours_have(error, code):
    assert isinstance(error, GangError) and isinstance(error, JaxrunError) and error.exit_code == code


def test_a_call_that_timed_out_is_a_timeout():
    assert isinstance(CallTimeout("x", [2, 1]), TimeoutError) and CallTimeout("x", [2, 1]).missing == (2, 1)
