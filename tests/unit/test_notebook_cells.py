"""A notebook's cells on a rank."""

import linecache
import pickle
import sys
import traceback

import pytest

from jaxrun.protocol.notebook_messages import CellOutput
from jaxrun_runtime.gang import notebook_cells

pytestmark = pytest.mark.jax_version


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


def test_names_last_from_cell_to_cell():
    notebook_cells.run_cell("import math\ndef half(x): return x / n", "In[1]")
    notebook_cells.run_cell("n = 2", "In[2]")
    assert notebook_cells.run_cell("half(math.inf), __name__", "In[3]").result == {"text/plain": "(inf, '__main__')"}


def test_variables_go_in_and_out():
    notebook_cells.set_variable("x", [1])
    notebook_cells.run_cell("x.append(2)", "In[1]")
    assert notebook_cells.get_variable("x") == [1, 2]
    with pytest.raises(NameError, match="'y' is not defined in the cells"):
        notebook_cells.get_variable("y")


def test_a_cell_runs_on_the_ranks_that_it_names(monkeypatch):
    monkeypatch.setattr(notebook_cells.jaxrun_runtime, "rank", 1)
    assert notebook_cells.run_cell("x = 1\nx", "In[1]", ranks=[0, 2]) == CellOutput()
    assert notebook_cells.run_cell("x = 2\nx", "In[2]", ranks=[1]).result == {"text/plain": "2"}


def test_a_cell_may_await_and_its_tasks_go_on_in_the_next_one():
    source = "import asyncio\ndone = asyncio.Event()\nasync def f():\n    done.set()\n    return 7\n"
    source += "task = asyncio.create_task(f())\nawait asyncio.sleep(0)"
    notebook_cells.run_cell(source, "In[1]")
    assert notebook_cells.run_cell("await done.wait()\nawait task", "In[2]").result == {"text/plain": "7"}


def test_an_interrupt_ends_what_a_cell_awaits():
    source = "import asyncio\nasync def f():\n    raise KeyboardInterrupt\nawait f()"
    with pytest.raises(KeyboardInterrupt):
        notebook_cells.run_cell(source, "In[1]")
    assert notebook_cells.run_cell("await asyncio.sleep(0, 5)", "In[2]").result == {"text/plain": "5"}


def test_what_a_cell_defines_is_found_where_python_looks_for_it():
    notebook_cells.run_cell("class Point: pass\npoint = Point()", "In[1]")
    assert type(pickle.loads(pickle.dumps(notebook_cells.get_variable("point")))) is notebook_cells.get_variable(
        "Point"
    )


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


def test_annotations_are_evaluated_as_in_a_program():
    assert notebook_cells.run_cell("def f(x: int): pass\nf.__annotations__", "In[1]").result == {
        "text/plain": "{'x': <class 'int'>}"
    }
