"""--stdin: which rank has jaxrun's standard input, and what input() says on the others."""

import builtins
import io
import os
import pty
import sys
from types import SimpleNamespace

import pytest

from jaxrun.controller.supervisor.terminal import resolve_stdin, why_no_terminal
from jaxrun.errors import UsageError
from jaxrun.node.agent.spawn import open_stdin
from jaxrun.protocol.env import WorkerEnv
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand
from jaxrun_runtime.pitfalls import explain_missing_input

MPIRUN = LaunchCommand("open-mpi", "Open MPI 5.0.11", ("mpirun",))
SRUN = LaunchCommand("slurm", "srun in Slurm job 7", ("srun",), passes_stdin=True)


@pytest.fixture
def stdin(tmp_path):
    """stdin(kind) replaces this process's standard input until the end of the test: "file", "pipe" or "terminal"."""
    before = os.dup(0)
    opened = []

    def replace(kind):
        (tmp_path / "answers").write_text("yes\n")
        if kind == "file":
            new = [os.open(tmp_path / "answers", os.O_RDONLY)]
        else:
            new = os.pipe() if kind == "pipe" else pty.openpty()[::-1]
        opened.extend(new)
        os.dup2(new[0], 0)

    yield replace
    os.dup2(before, 0)
    for descriptor in (before, *opened):
        os.close(descriptor)


def resolve(given, command=None):
    return resolve_stdin(Job(program=("train.py",), stdin=given), command).stdin


@pytest.mark.parametrize(
    ("kind", "command", "decided"),
    [("file", None, "0"), ("terminal", None, "0"), ("pipe", MPIRUN, "0"), ("terminal", SRUN, "none")],
)
def test_rank_0_has_the_input_by_default_but_no_terminal_over_hosts(stdin, kind, command, decided):
    stdin(kind)
    assert resolve("", command) == decided
    assert resolve("0", command) == "0"


def test_over_hosts_srun_gives_it_to_any_rank_and_others_to_rank_0_alone():
    assert resolve("1", SRUN) == "1"
    with pytest.raises(UsageError, match=r"--stdin 1 is for .*; with Open MPI 5\.0\.11 it is --stdin 0 or none"):
        resolve("1", MPIRUN)


@pytest.mark.parametrize(("given", "read"), [("1", True), ("0", False), ("none", False)])
def test_a_rank_reads_the_pipe_that_a_launch_command_gives_to_it(stdin, given, read):
    stdin("pipe")
    descriptor = open_stdin(given, 1)
    assert os.path.samestat(os.fstat(descriptor), os.fstat(0)) == read
    os.close(descriptor)


@pytest.mark.parametrize(("given", "readers"), [("", [0]), ("1", [1]), ("none", [])])
def test_the_reader_reads_all_of_a_file_and_the_others_nothing(stdin, given, readers):
    stdin("file")
    found = []
    for rank in range(3):
        with open(open_stdin(given, rank)) as file:
            found += [rank] * (file.read() == "yes\n")
    assert found == readers


def test_a_debugger_needs_a_terminal_that_no_rank_reads(stdin):
    def why(given, command=None, live=False):
        return why_no_terminal(SimpleNamespace(job=Job(program=("p",), stdin=given, live=live), launch_command=command))

    stdin("pipe")
    assert why("0") == "jaxrun's standard input is not a terminal"
    stdin("terminal")
    assert why("0") == why("none", SRUN) == ""
    assert why("none", live=True) == "--live has the terminal"
    assert why("0", SRUN) == "--stdin 0 gives the terminal to rank 0"


# ---- input() in a rank


@pytest.mark.parametrize(
    ("given", "owner"), [("1", "rank 1 has"), ("none", "no rank has"), ("0", "")], ids=lambda value: value
)
def test_input_on_a_rank_without_standard_input_says_who_has_it(monkeypatch, given, owner):
    def finds_nothing(prompt):
        raise EOFError(f"after {prompt}")

    monkeypatch.setattr(builtins, "input", finds_nothing)
    monkeypatch.setattr(sys, "stdin", sys.__stdin__)
    explain_missing_input(WorkerEnv("ab" * 16, 0, 2, 0, 2, "h1", 7, 8, 9, init_timeout=60.0, stdin=given))
    said = f"rank 0 has no standard input: {owner} jaxrun's (--stdin RANK|none)" if owner else "after ?"
    with pytest.raises(EOFError) as ended:
        input("?")
    assert str(ended.value) == said
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # the program's own
    with pytest.raises(EOFError, match=r"after \?"):
        input("?")
