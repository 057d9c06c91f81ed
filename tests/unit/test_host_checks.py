"""--host-check before the workers start, and hosts that are excluded: what head, restarts and plans make of them."""

import os
import re

import pytest
from simulation import make_registry, report

from jaxrun.analysis.diagnosis.job_end import HostCheckFailed
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.restarts import Restart, Stop, decide_restart, summarize_end
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import HeadJob, TimeLimits
from jaxrun.errors import UsageError
from jaxrun.job_events.actions import Finish, PrintLine, SendToAgents
from jaxrun.job_events.events import Tick
from jaxrun.protocol.agent_messages import AgentConnected
from jaxrun.protocol.job_record import AttemptEnd
from jaxrun.spec.backends.quarantine import add_to_quarantine, excluded_hosts
from jaxrun.spec.backends.remote_plan import leave_out
from jaxrun.spec.backends.sbatch import sbatch_options
from jaxrun.spec.job.job import Job

INIT = 60.0


def starting(hosts, **wanted):
    """The head of a job with a rank on each of these hosts, and `handle`, which has the agent of a rank report."""
    registry = make_registry(len(hosts), init_timeout=INIT, **wanted)
    names = dict.fromkeys(range(len(hosts)), "?")
    expected, limits = Expected(len(hosts), "", "cpu", 1), TimeLimits(INIT, None, 5.0, 30.0)
    head = Head(HeadJob(names, registry.agents, expected, limits), 0.0, registry)

    def handle(rank, now, failure=""):
        return head.handle(report(rank, hosts[rank], len(hosts), check_failure=failure), now)

    return head, handle


def test_the_workers_start_once_all_hosts_are_good():
    head, handle = starting(["h1", "h1", "h2"], host_check="nvidia-smi -q")
    assert handle(1, 1.0) == handle(2, 3.0) == []
    (line,) = (action for action in head.handle(Tick(), 4.0) if isinstance(action, PrintLine))
    assert line.text == "checking the hosts: 2 of 3 ranks after 4 s, waiting for rank 0"
    starts = handle(0, 5.0)
    assert len([action for action in starts if isinstance(action, SendToAgents)]) == 3


def test_hosts_that_fail_are_named_all_and_once_with_the_last_line_and_no_worker_starts():
    _, handle = starting(["h1", "h2", "h2", "h3"], host_check="check")
    assert handle(3, 2.0, "exited with status 3: Xid 79") == handle(0, 2.0) == handle(1, 2.0, "was killed") == []
    (end,) = handle(2, 2.0, "was killed")
    assert isinstance(end, Finish)
    assert end.outcome.end.failed.keys() == {1, 2, 3}
    assert end.outcome.end.text == (
        "h2 failed --host-check: was killed; h3 failed --host-check: exited with status 3: Xid 79"
    )


def test_the_time_for_the_start_counts_anew_with_and_after_the_checks():
    head, handle = starting(["h1", "h2"], host_check="check")
    head.handle(AgentConnected(0, "h1"), INIT)
    assert head.handle(Tick(), 2 * INIT + 1) and head.phase.name == "STARTING"  # 1 s after the agents' own limit
    handle(0, 2 * INIT + 2)
    handle(1, 2 * INIT + 2)
    head.handle(Tick(), 3 * INIT)
    assert head.phase.name == "STARTING"
    head.handle(Tick(), 4 * INIT)
    assert head.phase.name == "OVER"


def test_agents_that_never_answer_end_the_job():
    head, handle = starting(["h1", "h2"], host_check="check")
    head.handle(AgentConnected(1, "h2"), 1.0)
    handle(0, 2.0)
    actions = head.handle(Tick(), 2.0 + INIT + 30)
    (text,) = [action.outcome.end.text for action in actions if isinstance(action, Finish)]
    assert "missing: rank 1 (h2)" in text


# ---- another attempt

FAILED = summarize_end(JobOutcome(HostCheckFailed("x", failed={1: "exited with status 1"})), has_run_before=False)
LOST = AttemptEnd("lost")


def decide(*history, most=0, on="failure"):
    return decide_restart(history, most, on)


def test_another_attempt_follows_a_failed_check_and_is_none_of_max_restarts():
    assert decide(FAILED) == Restart(2) and decide(FAILED, FAILED) == Restart(3)
    assert decide(FAILED, on="stall") == Restart(2)
    assert decide(FAILED, LOST) == Stop()
    assert decide(FAILED, LOST, most=1) == Restart(3)
    assert isinstance(decide(LOST, FAILED, LOST, most=1), Stop)


def test_no_attempt_follows_a_failed_check_once_the_job_was_asked_to_stop():
    outcome = JobOutcome(HostCheckFailed("x", failed={0: "x"}), stop_requested=True)
    assert isinstance(decide(summarize_end(outcome, has_run_before=False)), Stop)


# ---- hosts that are excluded


def job(**wanted):
    return Job(**{"program": ("train.py",), "backend": "mpirun", **wanted})


def test_what_is_added_to_a_quarantine_is_excluded_with_its_reason(tmp_path):
    path = tmp_path / "bad"
    assert excluded_hosts(job(quarantine=path)) == {} and not path.exists()
    path.write_text("# ours\nn[07-08] since May  # a remark\n\n")
    add_to_quarantine(path, {"h3": "lost: its\nhost # is gone", "h4": "failed"})
    found = excluded_hosts(job(quarantine=path, exclude_hosts="h[5,9]"))
    assert list(found) == ["n07", "n08", "h3", "h4", "h5", "h9"]
    assert (found["n07"], found["h9"]) == (f"{path}: since May", "--exclude-hosts")
    assert re.fullmatch(rf"{path}: \d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\dZ lost: its host is gone", found["h3"])
    assert path.read_text().count("\n") == 5


def test_a_host_is_added_on_a_line_of_its_own_though_the_last_one_is_not_ended(tmp_path):
    path = tmp_path / "bad"
    path.write_text("h2 since May")
    add_to_quarantine(path, {"h3": "lost"})
    assert list(excluded_hosts(job(quarantine=path))) == ["h2", "h3"] and "\n\n" not in path.read_text()


def test_a_pipe_is_refused_as_a_quarantine_file_without_waiting_for_its_writer(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="pipe cannot be used: it is not a regular file"):
        excluded_hosts(job(quarantine=tmp_path / "pipe"))


def test_what_cannot_be_read_is_refused(tmp_path):
    bad = tmp_path / "bad"
    bad.write_text("h1 lost\nh[2 lost\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for wanted, text in (
        ({"quarantine": bad}, rf"--quarantine {bad}, line 2: 'h\[2' is not a list"),
        ({"quarantine": tmp_path}, "cannot be used: Is a directory"),
        ({"quarantine": tmp_path / "no" / "file"}, "cannot be used: it, or its directory, cannot be written"),
        ({"quarantine": tmp_path / "binary"}, "cannot be used: it is not a text file"),
        ({"exclude_hosts": "h3;h4"}, "--exclude-hosts: 'h3;h4' is not a list"),
    ):
        with pytest.raises(UsageError, match=text):
            excluded_hosts(job(**wanted))


OFFERED = ("h1", "h2", "h3", "h4")
# The excluded hosts, the request, and of the job that is left: hosts, processes, spares.
LEFT = {
    "one of all": ("h2", {}, (None, None, 0)),
    "a spare host": ("h2", {"spares": 1, "max_restarts": 1}, (None, None, 0)),
    "one that is not needed": ("h1", {"hosts": 3, "processes": 6}, (3, 6, 0)),
    "one of two spares": ("h1", {"hosts": 2, "spares": 2, "max_restarts": 1}, (2, None, 1)),
    "more than --min-hosts": ("h[1-2]", {"hosts": 4, "processes": 8, "min_hosts": 2, "max_restarts": 1}, (2, 4, 0)),
}


@pytest.mark.parametrize(("excluded", "wanted", "left"), LEFT.values(), ids=LEFT)
def test_excluded_hosts_take_the_places_of_spare_ones_and_then_of_the_jobs_own(excluded, wanted, left):
    asked = job(exclude_hosts=excluded, **wanted)
    made, names = leave_out(asked, OFFERED, excluded_hosts(asked))
    assert (made.hosts, made.processes, made.spares) == left
    assert names == excluded_hosts(asked)


@pytest.mark.parametrize("wanted", [{"hosts": 4}, {"min_hosts": 4, "max_restarts": 1}], ids=str)
def test_too_few_hosts_are_refused_by_name(wanted):
    with pytest.raises(UsageError, match=r"^3 hosts of 4 are left, too few for the job, .* h3 \(--exclude-hosts\)"):
        leave_out(job(**wanted), OFFERED, {"h3": "--exclude-hosts"})


def test_sbatch_gets_the_excluded_hosts_too(tmp_path):
    add_to_quarantine(tmp_path / "bad", {"h7": "lost"})
    options = sbatch_options(job(backend="slurm", hosts=2, exclude_hosts="h3", quarantine=tmp_path / "bad"))
    assert "--exclude=h7,h3" in options
