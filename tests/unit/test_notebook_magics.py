"""How %gang replaces the notebook's gang, with gangs by hand; its options; which ranks' errors a cell shows."""

import pytest
from fakes import EndedCall, RankWorker, Shell

from jaxrun.frontends.gang.gang_errors import GangError, GangStartError, RemoteError, RemoteFailure
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.frontends.notebook import magics
from jaxrun.frontends.notebook.arguments import parse_arguments


@pytest.fixture
def happened(monkeypatch):
    """What has happened, in order: starts, checks and ends of gangs, by their number of processes."""
    found = []

    class Gang:
        fails = False

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

        def close(self):
            found.append(f"end {self.processes}")
            self.closed = True

    def check(spec):
        found.append(f"check {spec.processes}")
        if spec.processes > 8:
            raise GangStartError("too many")

    monkeypatch.setattr(magics, "Gang", Gang)
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
