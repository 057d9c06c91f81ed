"""The call site: which frames count, and that two lookups find the same."""

import contextlib
import os
import sys

import jax
import pytest

import jaxrun_runtime
from jaxrun_runtime.lockstep import call_sites
from jaxrun_runtime.lockstep.call_sites import CallSites

pytestmark = pytest.mark.jax_version


@pytest.fixture
def found():
    return {}


@pytest.fixture
def sites(found):
    return CallSites(found.__setitem__)


def _here(sites):
    return sites.find(sys._getframe(1))


def _line():
    return sys._getframe(1).f_lineno


def test_a_line_is_one_site_and_another_line_another(sites, found):
    numbers = []
    for _ in range(3):
        numbers.append(_here(sites))
    line = _line() - 1
    other = _here(sites)
    assert (numbers, other) == ([1, 1, 1], 2)
    assert found[1][0] == f"{__file__}:{line} test_a_line_is_one_site_and_another_line_another"
    assert sites.place(1) == f"test_lockstep_call_sites.py:{line} test_a_line_is_one_site_and_another_line_another"
    assert sites.place(0) == ""


def test_two_calls_in_a_line_are_one_site(sites, found):
    assert _here(sites) == _here(sites) == 1
    assert len(found) == 1


def test_the_stack_is_the_innermost_frames(sites, found):
    def deep(n):
        return deep(n - 1) if n else _here(sites)

    deep(20)
    assert len(found[1]) == 8
    assert all(" deep" in frame for frame in found[1])


def test_frames_of_jax_and_of_decorators_are_left_out(sites, found):
    @contextlib.contextmanager
    def around():
        yield _here(sites)

    numbers = []

    @jax.jit
    def traced(x):
        numbers.append(_here(sites))
        return x

    traced(1.0)
    with around() as number:
        numbers.append(number)
    for number in numbers:
        assert not any("/jax/" in frame or "contextlib" in frame for frame in found[number])
        assert "test_frames_of_jax_and" in found[number][1]


def test_frames_of_jaxrun_are_left_out_but_not_those_of_its_programs(sites, found):
    folder = os.path.dirname(jaxrun_runtime.__file__) + os.sep
    scope = {"_here": lambda: sites.find(sys._getframe(1))}
    exec(compile("number = _here()", f"{folder}worker.py", "exec"), scope)
    assert found[scope["number"]][0].startswith(__file__)
    exec(compile("number = _here()", f"{folder}programs/digits.py", "exec"), scope)
    assert found[scope["number"]][0] == f"{folder}programs/digits.py:1 <module>"


def test_where_no_frame_is_the_users_there_is_no_site(sites, found):
    assert sites.find(None) == 0
    assert found == {}


def test_a_file_has_its_full_path(sites, found, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile("_here()", "train.py", "exec"), {"_here": lambda: sites.find(sys._getframe(1))})
    exec(compile("_here()", "<cell 7>", "exec"), {"_here": lambda: sites.find(sys._getframe(1))})
    assert [stack[0] for stack in found.values()] == [f"{tmp_path}/train.py:1 <module>", "<cell 7>:1 <module>"]


def test_code_that_is_made_anew_each_time_does_not_fill_the_memory(sites, found, monkeypatch):
    monkeypatch.setattr(call_sites, "_MAX_SITES", 10)
    scope = {"_here": lambda: sites.find(sys._getframe(1))}
    for number in range(100):
        exec(compile(f"_here() + {number % 5}", "<made>", "exec"), scope)
    assert len(found) == 1
    for number in range(100):
        exec(compile("\n" * number + "number = _here()", "<made>", "exec"), scope)
    assert scope["number"] == 0  # there are too many to tell
    assert len(found) <= 11
    assert len(sites.known) <= 10
    assert len(sites._codes) <= 10


def test_an_error_ends_at_the_users_line():
    def fail(x):
        raise ValueError("here")

    with pytest.raises(ValueError, match="here") as caught:
        jax.jit(lambda x: jax.vmap(fail)(x))(jax.numpy.ones(2))
    error = caught.value
    error.add_note("the user's own")
    error.add_note("Set JAX_TRACEBACK_FILTERING=off to include these.")
    call_sites.trim_to_user_frames(error)
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    assert last.tb_frame.f_code.co_name == "fail"
    assert error.__notes__ == ["the user's own"]


def test_an_error_without_frames_of_the_users_is_left_as_it_is():
    error = ValueError("no frames")
    call_sites.trim_to_user_frames(error)
    assert error.__traceback__ is None
