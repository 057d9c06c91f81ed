"""What a notebook shows of the errors that ranks raise."""

from dataclasses import replace

from jaxrun.gang.exceptions import RemoteFailure
from jaxrun.notebook import errors

_TRACEBACK = """Traceback (most recent call last):
  File "In[8]", line 6, in <module>
    f(3)
  File "/home/me/model.py", line 4, in f
    raise ValueError("bad")
ValueError: bad
"""
_BAD = RemoteFailure(1, "h1", "ValueError", "bad", _TRACEBACK, (), 2.0, "builtins", b"")
_LATER = replace(_BAD, rank=0, error="KeyError", message="'k'\nmore", traceback="KeyError: 'k'\n", time=3.0)


def test_an_error_of_one_rank_names_it_and_the_cell():
    text = errors.format_main_error([_BAD], 4)
    assert text.splitlines()[0] == "rank 1 raised"
    assert "\n  Cell In[8], line 6, in <module>\n" in text
    assert '\n  File "/home/me/model.py", line 4, in f\n' in text
    assert text.endswith("\nValueError: bad")


def test_the_same_error_is_told_once():
    same = [_BAD, replace(_BAD, rank=2, time=1.0)]
    assert errors.format_main_error(same, 4).startswith("ranks 1-2 raised the same\n")
    assert errors.format_main_error(same, 2).startswith("all ranks raised the same\n")
    assert errors.fold_other_errors(same) == []


def test_the_first_error_in_time_comes_first_and_others_are_folded():
    text = errors.format_main_error([_LATER, _BAD], 2)
    assert text.startswith("rank 1 raised; other errors of rank 0 are folded above\n")
    assert "KeyError" not in text
    (other,) = errors.fold_other_errors([_LATER, _BAD])
    assert "<summary>rank 0 raised KeyError: &#x27;k&#x27;</summary>" in other["text/html"]


def test_lines_about_the_others_come_last():
    assert errors.format_main_error([_BAD], 4, ["rank 0 waits"]).endswith("ValueError: bad\nrank 0 waits")


def test_an_error_without_a_traceback_is_told_by_its_name():
    exits = replace(_BAD, error="SystemExit", message="3", traceback="")
    assert errors.format_main_error([exits], 4) == "rank 1 raised\nSystemExit: 3"
