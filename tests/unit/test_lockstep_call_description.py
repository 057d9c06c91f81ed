"""What a rank records of a call: when its instruction was reached, the line of the program, and what it runs."""

import contextlib
import os
import re
import sys
import time
import traceback
import weakref

import jax
import numpy as np
import pytest
from fakes import Argument, Frame, Sharding
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxrun_runtime
from jaxrun.protocol.flight_file import ENTERED_WORD, HEADER_WORDS
from jaxrun_runtime.lockstep import call_sites, program_signature
from jaxrun_runtime.lockstep.call_sites import CallEntries, CallSites
from jaxrun_runtime.lockstep.program_facts import CallInfo
from jaxrun_runtime.lockstep.program_signature import LoweredProgram, lowering_fields

pytestmark = pytest.mark.jax_version


# ---- when its instruction is reached, as Python's monitoring tells

monitored = pytest.mark.skipif(sys.version_info < (3, 13), reason="the first releases of Python 3.12 cannot tell")


@pytest.fixture
def words():
    return memoryview(bytearray(8 * HEADER_WORDS)).cast("Q")


@pytest.fixture
def entries(words):
    yield CallEntries(words)
    for tool in range(6):
        if sys.monitoring.get_tool(tool) == "jaxrun":
            sys.monitoring.free_tool_id(tool)


def _instruction():
    frame = sys._getframe(1)
    return frame.f_code, frame.f_lasti


@monitored
def test_a_watched_call_is_noted_before_it_is_made_and_others_are_not(entries, words):
    told = []

    def caller():
        for turn in range(6):
            first = _instruction()
            second = _instruction()
            if turn == 1:
                entries.watch(*first)
            if turn == 3:  # which has been left alone until now
                entries.watch(*second)
            told.append([cell.entered for cell in entries.cells.values()])

    before = time.time_ns()
    caller()
    after = time.time_ns()
    assert told[:2] == [[], [0]]
    assert before < told[2][0] < told[3][0] < told[4][0] < told[4][1] < told[5][0] < told[5][1] < after
    assert told[3][1] == 0


@monitored
def test_only_functions_that_have_made_a_cross_process_call_from_there_count_as_entries(entries, words):
    """Through one line of a wrapper go local calls, too: they must not look like the next cross-process call."""

    def local():
        pass

    def crosses():  # as its dispatch does
        cell.entered = 0
        cell.add_dispatcher()

    def wrapper(function):
        return function()

    def place():
        return sys._getframe(1).f_code, sys._getframe(1).f_lasti

    cell = None
    entries.watch(*wrapper(place))
    (cell,) = entries.cells.values()
    cell.is_shared = True  # as that of a library is from the beginning
    wrapper(local)
    wrapper(crosses)
    wrapper(local)
    assert (words[ENTERED_WORD], cell.entered > 0) == (0, True)
    before = time.time_ns()
    wrapper(crosses)
    entered = words[ENTERED_WORD]
    assert entered >= before
    wrapper(local)
    assert words[ENTERED_WORD] == entered
    cell.is_shared, cell.entered = False, 0
    wrapper(crosses)
    wrapper(local)
    assert not cell.is_shared
    wrapper(crosses)  # the entry before it was none of a cross-process call
    assert cell.is_shared
    for _ in range(10_000):
        cell.function += 1
        cell.add_dispatcher()
    assert len(cell.dispatchers) <= 1000


@monitored
def test_a_forked_process_notes_no_entries(entries, words):
    def caller():
        return _instruction()

    entries.watch(*caller())
    entries.detach()
    caller()
    assert (entries.cells, words[ENTERED_WORD]) == ({}, 0)


@monitored
def test_where_other_tools_monitor_calls_are_known_without_their_entry(words):
    taken = [tool for tool in range(6) if sys.monitoring.get_tool(tool) is None]
    for tool in taken:
        sys.monitoring.use_tool_id(tool, "another")
    try:
        entries = CallEntries(words)

        def caller():
            return _instruction()

        code, instruction = caller()
        entries.watch(code, instruction)
        caller()
        assert entries.cells[id(code), instruction].entered == 0
    finally:
        for tool in taken:
            sys.monitoring.free_tool_id(tool)


@monitored
def test_no_more_instructions_are_kept_than_memory_allows(entries, monkeypatch):
    monkeypatch.setattr(call_sites, "_MAX_SITES", 2)
    codes = weakref.WeakSet()
    for source in "abc":
        code = compile(source, "program.py", "eval")
        codes.add(code)
        entries.watch(code, 0)
    del code
    assert len(entries.cells) == len(codes) == 1


# ---- the line of the program


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
    assert _here(sites) == _here(sites) == 2
    assert (numbers, len(found)) == ([1, 1, 1], 2)
    assert found[1][0] == f"{__file__}:{line} test_a_line_is_one_site_and_another_line_another"
    assert sites.place(1) == f"{os.path.basename(__file__)}:{line} test_a_line_is_one_site_and_another_line_another"
    assert (sites.find(None), sites.place(0)) == (0, "")


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

    traced.trace(1.0)
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
    exec(compile("number = _here()", f"{folder}programs/train.py", "exec"), scope)
    assert found[scope["number"]][0] == f"{folder}programs/train.py:1 <module>"


def _call_through(*files):
    """A function that calls another through a frame of each of these files, the outermost first."""

    call = None
    for file in reversed(files):
        scope = {"call": call}
        body = "call(function)" if call else "function()"
        exec(compile(f"def made(function):\n    return {body}", file, "exec"), scope)
        call = scope["made"]
    return call


PACKAGES = "/venv/lib/python3.13/site-packages"


def test_lines_that_call_through_one_line_of_a_library_are_distinguished(sites, found):
    scope = {"find": lambda: sites.find(sys._getframe(1))}
    exec(compile("def dispatch():\n    return find()", "/jax/_src/pjit.py", "exec"), scope)
    dispatch = scope["dispatch"]
    wrapper = f"{PACKAGES}/flax/nnx/compilation.py"
    wrapped = _call_through("/deps.zip/wrap/__init__.py", contextlib.__file__, wrapper)
    numbers = []
    for _ in range(3):
        numbers.append(wrapped(dispatch))
        numbers.append(wrapped(dispatch))
    assert numbers == [1, 2] * 3
    line = _line() - 3
    name = "test_lines_that_call_through_one_line_of_a_library_are_distinguished"
    assert [stack[0] for stack in found.values()] == [f"{__file__}:{n} {name}" for n in (line, line + 1)]
    between = ("flax", "deps.zip", "contextlib")
    assert not any(name in frame for stack in found.values() for frame in stack for name in between)
    inner = _call_through(wrapper)
    assert wrapped(lambda: inner(dispatch)) == 3  # what a library calls back is the program's
    assert found[3][0] == f"{__file__}:{_line() - 1} <lambda>"


def test_a_thread_of_a_library_has_the_librarys_own_line_and_leaves_the_programs_alone(sites, found):
    inner = f"{PACKAGES}/flax/nnx/compilation.py"
    alone = Frame(compile("pass", inner, "exec"), 1)
    assert sites.find(alone) == 1
    assert found[1] == [f"{inner}:1 <module>"]
    assert not sites.known


def test_an_installed_package_that_is_the_program_counts_as_the_users_code(found, monkeypatch):
    monkeypatch.setattr(call_sites, "_is_programs", call_sites._ProgramFiles())
    monkeypatch.setattr(sys.modules["__main__"], "__file__", f"{PACKAGES}/trainer/__main__.py", raising=False)
    sites = CallSites(found.__setitem__)

    def frame(file, line, back=None):
        code = compile("pass", f"{PACKAGES}/{file}", "exec")
        return Frame(code, line, back)

    main = frame("trainer/__main__.py", 2)
    step = frame("trainer/loop.py", 8, frame("absl/app.py", 3, main))
    assert sites.find(frame("flax/nnx/compilation.py", 1023, step)) == 1
    assert found == {1: [f"{PACKAGES}/trainer/loop.py:8 <module>", f"{PACKAGES}/trainer/__main__.py:2 <module>"]}


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
    codes = weakref.WeakSet()
    for number in range(100):
        code = compile("\n" * number + "number = _here()", "<made>", "exec")
        codes.add(code)
        exec(code, scope)
    assert scope["number"] == 0  # there are too many to tell
    assert len(found) <= 11
    assert len(sites.known) <= 10
    assert len(codes) <= 10


def test_an_error_ends_at_the_users_line():
    def fail(x):
        raise ValueError("here")

    with pytest.raises(ValueError, match="here") as caught:
        jax.jit(lambda x: jax.vmap(fail)(x))(np.ones(2))
    error = caught.value
    error.add_note("the user's own")
    error.add_note("Set JAX_TRACEBACK_FILTERING=off to include these.")
    call_sites.trim_to_user_frames(error)
    last = error.__traceback__
    while last.tb_next:
        last = last.tb_next
    assert last.tb_frame.f_code.co_name == "fail"
    assert error.__notes__ == ["the user's own"]


def test_an_error_below_a_library_ends_at_the_users_line_and_an_interrupt_does_not():
    def last_file(trim):
        with pytest.raises(TypeError) as caught:
            _call_through(f"{PACKAGES}/flax/nnx/compilation.py")(None)
        trim(caught.value)
        return list(traceback.walk_tb(caught.value.__traceback__))[-1][0].f_code.co_filename

    assert last_file(call_sites.trim_internal_frames).endswith("compilation.py")
    assert last_file(call_sites.trim_to_user_frames) == __file__


def test_an_error_without_frames_is_left_alone():
    without_frames = ValueError()
    call_sites.trim_to_user_frames(without_frames)
    assert without_frames.__traceback__ is None


# ---- the program


def _fields(sharding, devices=(0,)):
    """The fields of a program of one argument."""
    argument = Argument((4,), "float32")
    facts = CallInfo("jit(f)", (argument,), (sharding,), (), (), ("x",), "f at m.py:1")
    return lowering_fields(facts, LoweredProgram((0,), tuple(devices), "code", "text"))


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P(), "P()"),
        (P("data"), "P('data',)"),
        (P("data", None), "P('data',)"),
        (P(None, None), "P()"),
        (P(None, "model"), "P(None, 'model')"),
        (P(("data", "model"), None), "P(('data', 'model'),)"),
    ],
)
def test_a_sharding_is_written_without_what_means_nothing(spec, text):
    mesh = AbstractMesh((1, 1), ("data", "model"))
    fields = _fields(NamedSharding(mesh, spec))
    assert (fields["arguments"], fields["mesh"]) == ([["x", "float32[4]", text]], "data=1, model=1: 0")


def test_memory_that_is_not_the_ordinary_one_is_named():
    sharding = Sharding(P("data"), "pinned_host")
    assert _fields(sharding)["arguments"] == [["x", "float32[4]", "P('data',), pinned_host"]]


def test_a_long_list_of_devices_is_shortened_but_every_device_counts():
    assert _fields(None, range(32))["mesh"] == ",".join(map(str, range(32)))
    ids = list(range(4096))
    text = _fields(None, ids)["mesh"]
    assert re.fullmatch(r"0,1,2,3,4,5,6,7,… \(4096 devices, [0-9a-f]{16}\)", text)
    ids[100], ids[101] = ids[101], ids[100]
    assert _fields(None, ids)["mesh"] != text


def test_a_text_that_is_too_long_is_not_kept():
    rng = np.random.default_rng(0)
    assert program_signature.pack("x" * 100_000)
    assert program_signature.pack(rng.bytes(100_000).hex()) == ""
    assert program_signature.pack("x" * (program_signature._MAX_HLO_CHARACTERS + 1)) == ""
