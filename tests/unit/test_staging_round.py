"""--stage: what the head orders, and what starts from a copy."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from simulation import make_registry, report

from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import HeadJob, JobPhase, TimeLimits
from jaxrun.controller.head.startup import Startup
from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.job_events.actions import Finish, PrintLine
from jaxrun.job_events.events import Tick
from jaxrun.protocol.agent_messages import StartWorkers
from jaxrun.protocol.staging_messages import CopyStaged, StagedCopied, read_staged, staged_path, use_copies

NBYTES = 1_288_490_188
VENV = Path("venv")


def staging_registry(size, *staged):
    registry = make_registry(size)
    registry.job = replace(registry.job, stage=staged)
    return registry


def startup(hosts, *staged):
    """The start-up of a job with an agent on each of `hosts`, on the first of which the launcher is."""
    registry = staging_registry(len(hosts), *staged)
    start = Startup(dict.fromkeys(range(len(hosts)), "?"), Expected(len(hosts), "", "cpu", 1), registry)
    for rank, name in enumerate(hosts):
        actions = start.handle(report(rank, name, len(hosts), stage_port=7000 + rank))
    return start, actions


def test_hosts_take_along_a_tree_whose_root_is_the_launcher():
    _, actions = startup([f"h{number}" for number in (1, 1, 2, 3, 4, 5, 6)], VENV)
    assert {action.agents: action.message for action in actions} == {
        (0,): CopyStaged("", 2),
        (2,): CopyStaged("", 2),
        (3,): CopyStaged("10.0.0.1:7000", 0),
        (4,): CopyStaged("10.0.0.1:7000", 0),
        (5,): CopyStaged("10.0.0.2:7002", 0),
        (6,): CopyStaged("10.0.0.2:7002", 0),
    }


def test_workers_start_once_all_hosts_have_a_copy():
    start, _ = startup(["h1", "h2", "h3"], VENV)
    assert start.is_staging
    assert start.handle(StagedCopied(0, 0)) == [] == start.handle(StagedCopied(2, NBYTES))
    assert start.describe_progress(4) == "copying what is staged: 2 of 3 ranks after 4 s, waiting for rank 1 (h2)"
    said, *starts = start.handle(StagedCopied(1, NBYTES))
    assert said == PrintLine("staged 1.2 GiB on 2 hosts; 1 host had it already")
    assert [type(action.message) for action in starts] == [StartWorkers] * 3 and not start.is_staging


def test_hosts_without_the_environment_copy_it_first_and_report_again():
    registry = staging_registry(3, VENV)
    start = Startup(dict.fromkeys(range(3), "?"), Expected(3, "", "cpu", 1), registry)
    for rank, name in enumerate(["h1", "h1", "h2"]):
        orders = start.handle(report(rank, name, 3, stage_port=7000 + rank, lacks_environment=True))
    assert {order.agents for order in orders} == {(0,), (2,)} and start.is_staging
    start.handle(StagedCopied(0, NBYTES))
    others = start.handle(StagedCopied(2, NBYTES))  # the other agent of h1 finds what the first one has brought
    assert [(order.agents, order.message) for order in others] == [((1,), CopyStaged("", 0))]
    assert [type(action) for action in start.handle(StagedCopied(1, 0))] == [PrintLine] and not start.is_staging
    for rank, name in enumerate(["h1", "h1", "h2"]):
        assert registry.lacks_environment
        starts = start.handle(report(rank, name, 3))
    assert [type(action.message) for action in starts] == [StartWorkers] * 3


def test_an_agent_reports_again_only_for_its_environment():
    registry = staging_registry(2, VENV)
    registry.add(report(0, "h1", 2, lacks_environment=True))
    with pytest.raises(NotUniformError, match="two agents say that they are rank 0"):
        registry.add(report(0, "h2", 2, pid=5))
    registry.add(report(0, "h1", 2))
    with pytest.raises(NotUniformError, match="two agents say that they are rank 0"):
        registry.add(report(0, "h1", 2))


def test_a_host_that_cannot_have_a_copy_is_named():
    start, _ = startup(["h1", "h2"], VENV)
    with pytest.raises(UnavailableError, match="h2 has no copy of what is staged: No space left"):
        start.handle(StagedCopied(1, 0, "No space left on device"))


def test_however_long_it_takes_the_job_is_not_given_up_for_it():
    registry = staging_registry(2, VENV)
    limits = TimeLimits(init=10.0, job=None, grace=5.0, signal_grace=30.0)
    job = HeadJob({0: "h1", 1: "h2"}, registry.agents, Expected(2, "", "cpu", 1), limits)
    head = Head(job, 0.0, registry)
    for rank in (0, 1):
        head.handle(report(rank, f"h{rank + 1}", 2), 4.0)
    assert not any(isinstance(action, Finish) for action in head.handle(Tick(), 1000.0))
    for rank in (0, 1):
        head.handle(StagedCopied(rank, 5), 2000.0)
    assert head.phase is JobPhase.STARTING
    head.handle(Tick(), 2007.0)  # of the 10 s, 4 had passed before
    assert head.phase is not JobPhase.STARTING


def test_nobody_is_heard_who_was_not_asked():
    start, _ = startup(["h1"])
    assert start.handle(StagedCopied(0, 5)) == []


def test_paths_below_a_source_lead_to_its_copy(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    staged = {"/home/me/venv": "/tmp/1/copy", str(tmp_path): "/tmp/2/copy"}
    assert staged_path("/home/me/venv/bin/python", staged) == "/tmp/1/copy/bin/python"
    assert staged_path("/home/me/venv2/bin/python", staged) == "/home/me/venv2/bin/python"
    assert staged_path("train.py", staged) == "/tmp/2/copy/train.py"
    assert staged_path("train.py", {}) == "train.py"
    python = "/home/me/venv/bin/python"
    environ = {"PATH": "/home/me/venv/bin:/bin", "PYTHONPATH": f"/x:{tmp_path}/src", "HOME": "/home/me/venv"}
    runtime = "/home/me/venv/lib/jaxrun_runtime"
    argv, variables = use_copies((python, runtime, "train.py", "train.py"), environ, staged)
    copies = ("/tmp/1/copy/bin/python", "/tmp/1/copy/lib/jaxrun_runtime")
    assert argv == (*copies, "/tmp/2/copy/train.py", "train.py")
    assert use_copies((python, runtime, "-m", "train"), {}, staged)[0] == (*copies, "-m", "train")
    assert read_staged(variables) == staged and read_staged({}) == {}
    assert variables.items() >= {"PATH": "/tmp/1/copy/bin:/bin", "PYTHONPATH": "/x:/tmp/2/copy/src"}.items()
    assert "HOME" not in variables
