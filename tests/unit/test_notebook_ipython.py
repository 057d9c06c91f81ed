"""IPython's shell, and the lines of cells whose functions are pickled."""

import linecache
import pickle
from types import SimpleNamespace

import pytest

from jaxrun.notebook import ipython
from jaxrun.notebook.ipython import NotebookSources
from jaxrun.protocol.gang_messages import GangMessageKind, pack

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


def test_outside_of_ipython_there_is_nothing_to_send(monkeypatch):
    monkeypatch.delitem(ipython.sys.modules, "IPython", raising=False)
    assert ipython.find_sources() is None


def test_outside_of_a_notebook_there_is_no_shell(monkeypatch):
    monkeypatch.delitem(ipython.sys.modules, "IPython", raising=False)
    assert ipython.find_kernel_shell() is None
    terminal = SimpleNamespace(get_ipython=lambda: SimpleNamespace())
    monkeypatch.setitem(ipython.sys.modules, "IPython", terminal)
    assert ipython.find_kernel_shell() is None
