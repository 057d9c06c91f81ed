"""A notebook's cells on a rank, and the lines of cells whose functions are pickled."""

import linecache
import os
import pickle
import sys
import traceback
import types

import pytest
from fakes import fake_module

from jaxrun.frontends.gang import ipython
from jaxrun.frontends.gang.ipython import NotebookSources
from jaxrun.protocol.gang_messages import CellOutput, GangMessageKind, pack
from jaxrun_runtime.gang import notebook_cells


@pytest.fixture(autouse=True)
def _a_fresh_rank(monkeypatch):
    monkeypatch.setattr(notebook_cells, "_main", None)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    before = set(linecache.cache)
    yield
    for name in set(linecache.cache) - before:
        del linecache.cache[name]


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("1 + 1", {"text/plain": "2"}),
        ("x = 1", {}),
        ("None", {}),
        ("", {}),
        ("# nothing", {}),
        ("x = [1]\nx.append(2)\nx", {"text/plain": "[1, 2]"}),
        ("1\nfor i in range(2): i", {}),
        ("def f(x: int): pass\nf.__annotations__", {"text/plain": "{'x': <class 'int'>}"}),  # as in a program
    ],
)
def test_the_last_expression_is_shown(source, shown):
    assert notebook_cells.run_cell(source, "In[1]").result == shown


def test_richer_forms_are_shown_as_a_notebook_does():
    source = """
class Table:
    def _repr_html_(self): return "<table/>"
    def _repr_latex_(self): raise RuntimeError
    def _repr_svg_(self): return None
    def __repr__(self): return "a table"
Table()
"""
    assert notebook_cells.run_cell(source, "In[1]").result == {"text/plain": "a table", "text/html": "<table/>"}
    assert "text/html" not in notebook_cells.run_cell("Table", "In[2]").result


def test_names_last_from_cell_to_cell_and_go_in_and_out():
    notebook_cells.run_cell("import math\ndef half(x): return x / n", "In[1]")
    notebook_cells.set_variable("n", 2)
    assert notebook_cells.run_cell("half(math.inf), __name__", "In[2]").result == {"text/plain": "(inf, '__main__')"}
    notebook_cells.run_cell("class Point: pass\npoint = Point()", "In[3]")
    point = notebook_cells.get_variable("point")
    assert type(pickle.loads(pickle.dumps(point))) is notebook_cells.get_variable("Point")
    with pytest.raises(NameError, match="'y' is not defined in the cells"):
        notebook_cells.get_variable("y")


def test_a_cell_runs_on_the_ranks_that_it_names(monkeypatch):
    monkeypatch.setattr(notebook_cells.jaxrun_runtime, "rank", 1)
    assert notebook_cells.run_cell("x = 1\nx", "In[1]", ranks=[0, 2]) == CellOutput()
    assert notebook_cells.run_cell("x = 2\nx", "In[2]", ranks=[1]).result == {"text/plain": "2"}


def test_a_cell_may_await_and_its_tasks_go_on_in_the_next_one_even_after_an_interrupt():
    source = "import asyncio\ndone = asyncio.Event()\nasync def f():\n    done.set()\n    return 7\n"
    source += "async def g():\n    raise KeyboardInterrupt\n"
    notebook_cells.run_cell(f"{source}task = asyncio.create_task(f())\nawait asyncio.sleep(0)", "In[1]")
    with pytest.raises(KeyboardInterrupt):
        notebook_cells.run_cell("await g()", "In[2]")
    assert notebook_cells.run_cell("await done.wait()\nawait task", "In[3]").result == {"text/plain": "7"}


def test_the_traceback_of_a_cell_that_awaits_has_no_frames_of_the_event_loop():
    source = "import asyncio\nasync def f(error):\n    await asyncio.sleep(0)\n    raise error\n"
    notebook_cells.run_cell(source, "In[1]")
    with pytest.raises(ZeroDivisionError) as caught:
        notebook_cells.run_cell("await f(ZeroDivisionError())", "In[2]")
    names = [frame.filename for frame in traceback.extract_tb(caught.tb)]
    assert names[-2:] == ["In[2]", "In[1]"]
    assert {*names[:-2]} <= {__file__, notebook_cells.__file__}  # those above, as of any cell


def test_an_interrupt_of_a_cell_that_awaits_shows_where_it_waited():
    loop = "import asyncio, signal\nloop = asyncio.get_running_loop()\n"
    source = f"{loop}loop.call_soon(signal.raise_signal, signal.SIGINT)\nawait asyncio.sleep(60)"
    with pytest.raises(KeyboardInterrupt) as caught:
        notebook_cells.run_cell(source, "In[1]")
    assert ("In[1]", 4) in [(frame.filename, frame.lineno) for frame in traceback.extract_tb(caught.tb)]


def test_a_traceback_shows_the_lines_of_the_cells():
    notebook_cells.run_cell("def f():\n    return 1 / 0", "In[1]")
    with pytest.raises(ZeroDivisionError) as caught:
        notebook_cells.run_cell("\nf()", "In[2]")
    first, second = traceback.extract_tb(caught.tb)[-2:]
    assert (first.filename, first.lineno, first.line) == ("In[2]", 2, "f()")
    assert (second.filename, second.lineno, second.line) == ("In[1]", 2, "return 1 / 0")


@pytest.mark.parametrize("source", ["x = 1\n1 +", "x = 1\nreturn", "x = 1\ndef f(): await g()"])
def test_a_cell_that_is_no_python_does_nothing(source):
    with pytest.raises(SyntaxError) as caught:
        notebook_cells.run_cell(source, "In[1]")
    assert caught.value.lineno == 2
    with pytest.raises(NameError):
        notebook_cells.get_variable("x")


# ---- functions of cells


_CELL = "def outer(x):\n    def inner():\n        return x / 0\n    return inner\n"
_FILE = "/nowhere/ipykernel_1/23.py"  # much as ipykernel names a cell


class _Compiler:
    def format_code_name(self, name):
        return ("Cell", "In[3]") if name == _FILE else None


class _Shell:
    compile = _Compiler()


def _defined(name, monkeypatch):
    monkeypatch.setitem(linecache.cache, name, (len(_CELL), None, _CELL.splitlines(keepends=True), name))
    namespace = {"__name__": "__main__"}
    exec(compile(_CELL, name, "exec"), namespace)
    return namespace["outer"]


def _sent(function, sources):
    message = pack(GangMessageKind.CALL, 1, function, share=False, reduce=sources.reduce)
    return pickle.loads(message.payload.body)


@pytest.mark.parametrize(("file", "name"), [(_FILE, "In[3]"), ("<doctest>", "<doctest>")])
def test_code_of_a_cell_arrives_under_the_cells_name(file, name, monkeypatch):
    sources = NotebookSources(_Shell())
    arrived = _sent(_defined(file, monkeypatch), sources)
    assert sources.lines == {name: _CELL}
    assert arrived.__code__.co_filename == name
    assert arrived(1).__code__.co_filename == name
    with pytest.raises(ZeroDivisionError):
        arrived(1)()


def test_code_of_a_file_is_left_as_it_is(monkeypatch):
    sources = NotebookSources(_Shell())
    monkeypatch.setitem(linecache.cache, __file__, (1, 2.0, ["x"], __file__))
    assert _sent(lambda: 1, sources).__code__.co_filename == __file__
    assert sources.lines == {}


def test_outside_of_a_notebook_there_is_no_shell(monkeypatch):
    monkeypatch.delitem(ipython.sys.modules, "IPython", raising=False)
    assert ipython.find_sources() is None and ipython.find_kernel_shell() is None
    terminal = fake_module("IPython", get_ipython=object)
    monkeypatch.setitem(ipython.sys.modules, "IPython", terminal)
    assert ipython.find_kernel_shell() is None


# ---- names on a rank


class _Strange:
    @property
    def asked(self):
        raise AssertionError("a property was evaluated")

    def __dir__(self):
        raise ValueError("no")


def test_names_are_completed_without_evaluating_a_property(monkeypatch):
    monkeypatch.setattr(notebook_cells, "_main", types.ModuleType("__main__"))
    for name, value in {"losses": [1], "lot": 2, "_low": 3, "os": os, "strange": _Strange()}.items():
        notebook_cells.set_variable(name, value)
    complete = notebook_cells.complete_name
    assert complete("lo") == ["losses", "lot"] and complete("_lo") == ["_low"]
    assert complete("losses.app") == ["losses.append"] and complete("os.path.joi") == ["os.path.join"]
    assert complete("strange.") == complete("strange.asked.") == complete("nothing.") == complete("os.nothing.x") == []
    assert notebook_cells.list_variables() == ["losses", "lot", "strange"]
