"""--stdin: which ranks have jaxrun's standard input, what input() says on the others, and the copies for several."""

import builtins
import io
import os
import pty
import sys
from io import FileIO

import pytest

from jaxrun.errors import UsageError
from jaxrun.node.agent.stdin_broadcast import StdinBroadcast
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.env import WorkerEnv
from jaxrun.spec.job.job import Job, check_rank_options
from jaxrun.spec.job.plan import LaunchCommand
from jaxrun.spec.job.standard_input import explain_no_terminal, must_be_copied, open_stdin, resolve_stdin
from jaxrun_runtime.standard_input import explain_missing_input

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


# ---- input() in a rank


@pytest.mark.parametrize(
    ("given", "owner"), [("1", "rank 1 has"), ("none", "no rank has"), ("all", ""), ("0", "")], ids=lambda value: value
)
def test_input_on_a_rank_without_standard_input_says_who_has_it(monkeypatch, given, owner):
    def finds_nothing(prompt):
        raise EOFError(f"after {prompt}")

    monkeypatch.setattr(builtins, "input", finds_nothing)
    monkeypatch.setattr(sys, "stdin", sys.__stdin__)
    explain_missing_input(WorkerEnv("ab" * 16, 0, 2, 0, 2, "h1", 7, 8, 9, 60.0, stdin=given))
    said = f"rank 0 has no standard input: {owner} jaxrun's (--stdin RANK|all|none)" if owner else "after ?"
    with pytest.raises(EOFError) as ended:
        input("?")
    assert str(ended.value) == said
    monkeypatch.setattr(sys, "stdin", io.StringIO())  # the program's own
    with pytest.raises(EOFError, match=r"after \?"):
        input("?")


# ---- the copies of jaxrun's standard input that several ranks get, over real pipes

MIB = 2**20


class Ranks:
    """Two ranks that read from pipes what is written to `source`, this process's standard input."""

    def __init__(self, source, to_ranks, from_ranks):
        self.source, self.to_ranks, self.from_ranks = source, to_ranks, from_ranks
        self.started = True
        self.loop = EventLoop()
        self.broadcast = StdinBroadcast(self.loop, 0, lambda: dict(enumerate(to_ranks)) if self.started else None)
        self.loop.add_poller(self.broadcast.pause_or_resume)

    def write(self, data):
        """Write to the standard input as much as it takes; returns how much that was."""
        for _ in range(3):  # what was read, given and forgotten makes room for more
            self.loop.run_once(0)
        return self.source.write(data) or 0

    def read(self, rank):
        """What has arrived at a rank; None at the end."""
        for _ in range(3):
            self.loop.run_once(0)
        data = self.from_ranks[rank].read()
        return None if data == b"" else data or b""


@pytest.fixture
def ranks():
    def pipe():
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        return FileIO(read), FileIO(write, "wb")

    before = os.dup(0)
    ours, source = pipe()
    os.set_blocking(ours.fileno(), True)
    os.dup2(ours.fileno(), 0)
    ends = [pipe() for _ in range(2)]
    made = Ranks(source, [write for _, write in ends], [read for read, _ in ends])
    yield made
    made.broadcast.close()
    made.loop.close()
    os.dup2(before, 0)
    os.close(before)
    for file in (ours, source, *made.to_ranks, *made.from_ranks):
        file.close()


def test_every_rank_reads_everything_and_then_the_end(ranks):
    ranks.write(b"a\n")
    assert [ranks.read(0), ranks.read(1)] == [b"a\n"] * 2
    ranks.write(b"b\n")
    ranks.source.close()
    assert [ranks.read(0), ranks.read(1)] == [b"b\n"] * 2
    assert [ranks.read(0), ranks.read(1)] == [None, None]


def test_nothing_is_read_before_all_ranks_are_started(ranks):
    ranks.started = False
    ranks.write(b"a\n")
    assert ranks.read(0) == b""
    ranks.started = True
    assert [ranks.read(0), ranks.read(1)] == [b"a\n"] * 2


def test_a_rank_that_reads_nothing_stops_the_others_until_it_reads(ranks):
    data = bytes(range(256)) * 256
    written, got = b"", [b"", b""]
    for _ in range(100):
        written += data[: ranks.write(data)]
        got[0] += ranks.read(0)
    assert MIB < len(got[0]) < len(written) < 2 * MIB  # what was accepted and what is on its way are bounded
    for _ in range(100):
        got = [read + (ranks.read(rank) or b"") for rank, read in enumerate(got)]
    assert got == [written, written]


@pytest.mark.parametrize("how", ["closes its standard input", "has ended"])
def test_a_rank_that_reads_no_more_stops_nobody(ranks, how):
    data = b"x" * 65536
    if how == "has ended":  # while what it has started holds the pipe
        ranks.write(data)
        ranks.broadcast.drop(1)
        ranks.broadcast.drop(1)
    else:
        ranks.from_ranks[1].close()
    written = got = 0
    for _ in range(100):
        written += ranks.write(data)
        got += len(ranks.read(0))
    assert written > 3 * MIB
    assert got >= written
    assert ranks.to_ranks[1].closed


def test_the_input_is_left_alone_once_no_rank_reads_it(ranks):
    ranks.read(0)
    for end in ranks.from_ranks:
        end.close()
    ranks.write(b"a\n")
    ranks.loop.run_once(0)
    assert not ranks.loop.has_reader(0)
    assert os.read(0, 10) == b"a\n"


def test_a_full_pipe_is_ended_once_it_has_taken_the_rest(ranks):
    data = b"x" * 65536
    written = sum(ranks.write(data) for _ in range(4))
    ranks.source.close()
    for rank in range(2):
        pieces = [ranks.read(rank) for _ in range(20)]
        assert pieces[-1] is None
        assert sum(map(len, filter(None, pieces))) == written
