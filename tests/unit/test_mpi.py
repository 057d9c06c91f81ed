"""mpi4py in a rank that no MPI has started."""

import importlib
import sys
from dataclasses import replace

import pytest

from jaxrun.protocol.env import WorkerEnv
from jaxrun_runtime import mpi

ENV = WorkerEnv("ab" * 16, 0, 2, 0, 2, "h1", channel_fd=7, stacks_fd=8, flight_fd=9, init_timeout=60.0)


@pytest.fixture(autouse=True)
def mpi4py(monkeypatch, tmp_path):
    """An mpi4py that is nothing but there."""
    (tmp_path / "mpi4py").mkdir()
    for name in ("__init__.py", "MPI.py"):
        (tmp_path / "mpi4py" / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in mpi._LAUNCH_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in ("mpi4py", "mpi4py.MPI"):
        sys.modules.pop(name, None)


def test_rank_0_says_once_that_mpi_does_not_know_the_others(capsys):
    mpi.warn_of_singletons(ENV)
    importlib.import_module("mpi4py")
    assert capsys.readouterr().err == ""
    importlib.import_module("mpi4py.MPI")
    assert "mpi4py sees rank 0 of 1 in every process" in capsys.readouterr().err
    importlib.reload(sys.modules["mpi4py.MPI"])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("env", [replace(ENV, rank=1), replace(ENV, size=1)])
def test_the_other_ranks_and_a_single_process_say_nothing(capsys, env):
    mpi.warn_of_singletons(env)
    importlib.import_module("mpi4py.MPI")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", mpi._LAUNCH_VARIABLES)
def test_where_an_mpi_has_started_the_ranks_nothing_is_said(capsys, monkeypatch, name):
    monkeypatch.setenv(name, "0")
    mpi.warn_of_singletons(ENV)
    importlib.import_module("mpi4py.MPI")
    assert capsys.readouterr().err == ""
