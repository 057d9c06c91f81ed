"""How %gang replaces the notebook's gang, with gangs by hand; its options; which ranks' errors a cell shows."""

import pytest
from fakes import EndedCall, RankWorker, Shell

from jaxrun.errors import UsageError
from jaxrun.frontends.gang.gang_errors import GangError, GangStartError, RemoteError, RemoteFailure
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.frontends.notebook import completion, magics
from jaxrun.frontends.notebook.arguments import parse_arguments


@pytest.fixture
def happened(monkeypatch):
    """What has happened, in order: starts, checks and ends of gangs, by their number of processes."""
    found = []

    class Gang:
        fails = False
        healthy = False
        variables = ()

        def __init__(self, processes, platform="cpu"):
            found.append(f"start {processes}")
            if Gang.fails:
                raise GangStartError("no")
            self.processes, self.closed, self.stopped = processes, False, False
            self.spec, self.platform = GangSpec(processes), platform

        @property
        def workers(self):
            if self.stopped:
                raise GangError("stopped")
            return [RankWorker(platform=self.platform)]

        def run(self, function):
            assert function.name == "list_variables"
            return [self.variables, self.variables[:1]]

        def close(self):
            found.append(f"end {self.processes}")
            self.closed = True

    def check(spec):
        found.append(f"check {spec.processes}")
        if spec.processes > 8:
            raise GangStartError("too many")

    monkeypatch.setattr(magics, "Gang", Gang)
    monkeypatch.setattr(magics, "is_ready", lambda gang: gang.healthy)
    monkeypatch.setattr(magics, "check_start", check)
    yield found
    Gang.fails = False


def start(shell, processes):
    return magics._start(shell, {"processes": processes})


def shell_with(platform="cpu", *, stopped=False):
    gang = magics.Gang(2, platform)
    gang.stopped = stopped
    return Shell({"gang": gang})


def test_on_cpu_the_new_gang_starts_beside_the_one_that_was_there(happened):
    shell = shell_with()
    assert shell.user_ns["gang"] is not start(shell, 3) is shell.user_ns["gang"]
    assert happened == ["start 2", "start 3", "end 2"]


def test_a_gang_that_does_not_start_leaves_the_one_that_was_there(happened):
    shell = shell_with()
    magics.Gang.fails = True
    with pytest.raises(GangStartError):
        start(shell, 3)
    assert not shell.user_ns["gang"].closed and happened == ["start 2", "start 3"]


def test_a_gang_with_gpus_ends_before_the_new_one_starts_but_not_before_that_is_checked(happened):
    shell = shell_with("cuda")
    with pytest.raises(GangStartError, match="too many"):
        start(shell, 16)
    assert not shell.user_ns["gang"].closed
    start(shell, 3)
    assert happened == ["start 2", "check 16", "check 3", "end 2", "start 3"]
    assert start(shell_with("cuda", stopped=True), 4).processes == 4
    assert happened[-3:] == ["start 2", "start 4", "end 2"]


def test_a_closed_gang_counts_as_no_gang(happened):
    shell = shell_with()
    shell.user_ns["gang"].close()
    assert magics._find_gang(shell) is None
    start(shell, 3)
    assert happened == ["start 2", "end 2", "start 3"] and magics._find_gang(shell).processes == 3


@pytest.mark.parametrize(
    ("variables", "lost"), [((), ""), (("b", "a"), "a, b"), ([f"v{n}" for n in range(12)], "v0, v1, v10, …")]
)
def test_a_gang_with_variables_is_replaced_by_a_line_that_names_them_but_by_no_cell(happened, capsys, variables, lost):
    shell = shell_with()
    present = shell.user_ns["gang"]
    present.healthy, present.variables = True, variables
    if lost:
        with pytest.raises(UsageError, match=r"replace the gang that runs .* variables would be lost: "):
            magics._run_cell(shell, parse_arguments("-n 3"), "1")
    assert happened == ["start 2"] and not capsys.readouterr().out
    start(shell, 3)
    shown = capsys.readouterr().out
    assert ("variables are lost: " in shown) == bool(lost) and all(name in shown for name in lost.split(", ")[:3])
    assert happened[1:] == ["start 3", "end 2"]


# ---- completion


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%gang st", ["stop"]),
        ("%gang ", ["restart", "stop"]),
        ("%%gang st", []),
        ("%gang -n 2 st", []),
        ("%gang --lock", ["--lockstep"]),
        ("%gang -n 4 --backend ss", ["ssh"]),
        ("%gang --backend=ss", ["ssh"]),
        ("%gang -n 4 --timeo", []),
        ("%%gang --timeo", ["--timeout"]),
        ("%%gang --ra", ["--rank"]),
        ("%gang --en", ["--env", "--env-file"]),
    ],
)
def test_a_line_of_gang_completes_actions_options_and_values(line, found):
    assert completion.complete(line, line, None)[1] == found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("print(lo", "lo"),
        ("x = np.lin", "np.lin"),
        ("a[b].c", ""),
        ("2x", ""),
        ("f('da", ""),
        ("%mat", ""),
        ("!ls", ""),
        ("x.", "x."),
        ("", ""),
    ],
)
def test_the_name_at_the_end_of_a_line_is_completed(text, name):
    assert completion.find_name(text) == name


def test_names_are_completed_in_cells_of_a_gang_that_is_ready_only(monkeypatch):
    class Asked:
        def start_call(self, function, name):
            assert (function.name, name) == ("complete_name", "lo")
            return self

        def results(self, timeout):
            assert timeout <= 1
            return [["losses"], ["losses", "lot"]]

    ready = [True]
    monkeypatch.setattr(completion, "is_ready", lambda gang: ready[0])
    cell = "%%gang --rank 0\nprint(lo"
    assert completion.complete("print(lo", cell, Asked()) == ("lo", ["losses", "lot"])
    assert completion.complete("print(lo", "print(lo", Asked()) == ("", [])
    assert completion.complete("print(lo", cell, None) == ("", [])
    ready.clear()
    ready.append(False)
    assert completion.complete("print(lo", cell, Asked()) == ("lo", [])


def failure(rank, error):
    return RemoteFailure(rank, "h", error, "", f"{error} of rank {rank}", (), float(rank), "builtins", b"")


@pytest.mark.parametrize(
    ("raised", "shown"),
    [
        (KeyboardInterrupt(), ["rank 0 raised", "KeyboardInterrupt of rank 0", "rank 1 raised KeyboardInterrupt"]),
        (RemoteError(), ["rank 1 raised", "KeyboardInterrupt of rank 1"]),  # rank 0 was interrupted because of it
    ],
)
def test_a_rank_interrupted_because_another_failed_is_not_shown(raised, shown):
    failures = [failure(0, "KeyboardInterrupt"), failure(1, "KeyboardInterrupt")]
    call = EndedCall(failures, interrupted=(0,), outcomes=[0, 1])
    assert magics._merge_failures(raised, call)._render_traceback_() == shown


def test_a_variable_without_a_value_is_passed_on_from_the_environment():
    spec = GangSpec(**parse_arguments("-n 2 --env A --env B=c=d --env E=").gang)
    assert (spec.env, spec.options) == ({"B": "c=d", "E": ""}, ("--env", "A"))
