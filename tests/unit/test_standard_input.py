"""--stdin: which ranks have jaxrun's standard input."""

import os
import pty

import pytest

from jaxrun.errors import UsageError
from jaxrun.job.job import Job, check_rank_options
from jaxrun.job.plan import LaunchCommand
from jaxrun.job.standard_input import explain_no_terminal, must_be_copied, open_stdin, resolve_stdin

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


@pytest.mark.parametrize("given", ["1", "all"])
def test_over_hosts_srun_gives_it_to_any_rank_and_others_to_rank_0_alone(given):
    assert resolve(given, SRUN) == given
    with pytest.raises(UsageError, match=f"--stdin {given} is for .*; with Open MPI 5.0.11 it is --stdin 0 or none"):
        resolve(given, MPIRUN)


@pytest.mark.parametrize(("kind", "copied"), [("file", False), ("pipe", True), ("terminal", True)])
def test_what_can_be_read_once_is_copied_where_all_ranks_read_it(stdin, kind, copied):
    stdin(kind)
    assert must_be_copied("all") == copied
    assert not must_be_copied("0")


@pytest.mark.parametrize(("given", "read"), [("all", True), ("1", True), ("0", False), ("none", False)])
def test_a_rank_reads_the_pipe_that_a_launch_command_gives_to_it(stdin, given, read):
    stdin("pipe")
    descriptor = open_stdin(given, 1)
    assert os.path.samestat(os.fstat(descriptor), os.fstat(0)) == read
    os.close(descriptor)


@pytest.mark.parametrize("given", ["-1", "first", "1.5", "٣"])
def test_what_is_no_rank_is_refused(given):
    with pytest.raises(UsageError, match="--stdin must be the number of a rank, all or none, not"):
        Job(program=("train.py",), stdin=given)


def test_a_rank_that_the_job_does_not_have_is_refused():
    with pytest.raises(UsageError, match="--stdin names rank 2, but the ranks of this job are 0 to 1"):
        check_rank_options(Job(program=("train.py",), stdin="2"), 2)


@pytest.mark.parametrize(("given", "readers"), [("", [0]), ("1", [1]), ("all", [0, 1, 2]), ("none", [])])
def test_each_reader_reads_all_of_a_file_and_the_others_nothing(stdin, given, readers):
    stdin("file")
    found = []
    for rank in range(3):
        with open(open_stdin(given, rank)) as file:
            found += [rank] * (file.read() == "yes\n")
    assert found == readers


def test_a_debugger_needs_a_terminal_that_no_rank_reads(stdin):
    stdin("pipe")
    assert explain_no_terminal("0", over_hosts=False) == "jaxrun's standard input is not a terminal"
    stdin("terminal")
    assert explain_no_terminal("0", over_hosts=False) == explain_no_terminal("none", over_hosts=True) == ""
    assert explain_no_terminal("none", over_hosts=False, live=True) == "--live has the terminal"
    assert explain_no_terminal("0", over_hosts=True) == "--stdin 0 gives the terminal to rank 0"
    for over_hosts in (False, True):
        assert explain_no_terminal("all", over_hosts=over_hosts) == "--stdin all gives the terminal to all ranks"
