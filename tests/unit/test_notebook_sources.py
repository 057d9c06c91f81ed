"""Functions that are sent from a notebook take the lines of their cells along."""

import linecache
import pickle

import pytest

from jaxrun.notebook import cell_sources
from jaxrun.notebook.cell_sources import NotebookSources
from jaxrun.protocol.payload import GangMessageKind, pack

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
    parcel = pack(GangMessageKind.CALL, 1, function, share=False, reduce=cell_sources.reduce)
    return pickle.loads(parcel.body)


@pytest.mark.parametrize(("file", "name"), [(_FILE, "In[3]"), ("<doctest>", "<doctest>")])
def test_code_of_a_cell_arrives_under_the_cells_name(file, name, monkeypatch):
    cell_sources = NotebookSources(_Shell())
    arrived = _sent(_defined(file, monkeypatch), cell_sources)
    assert cell_sources.lines == {name: _CELL}
    assert arrived.__code__.co_filename == name
    assert arrived(1).__code__.co_filename == name
    with pytest.raises(ZeroDivisionError):
        arrived(1)()


def test_code_of_a_file_is_left_as_it_is(monkeypatch):
    cell_sources = NotebookSources(_Shell())
    monkeypatch.setitem(linecache.cache, __file__, (1, 2.0, ["x"], __file__))
    assert _sent(lambda: 1, cell_sources).__code__.co_filename == __file__
    assert cell_sources.lines == {}


def test_outside_of_ipython_there_is_nothing_to_send(monkeypatch):
    monkeypatch.delitem(cell_sources.sys.modules, "IPython", raising=False)
    assert cell_sources.find_sources() is None
