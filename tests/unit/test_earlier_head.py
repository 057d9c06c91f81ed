"""A head that takes the place of a lost one: what it makes of what agents tell it."""

import pytest
from msgspec.structs import replace
from simulation import JOB_ID

from jaxrun.analysis.verdict.restarts import Stop
from jaxrun.analysis.verdict.verdict import Verdict, to_json
from jaxrun.controller.supervisor.earlier_head import FoundAgents, continue_job
from jaxrun.controller.supervisor.transport import ConnectedAgent
from jaxrun.protocol.job_record import AttemptEnd, JobRecord
from jaxrun.protocol.probe_messages import Machine
from jaxrun.spec.engines import by_hand
from jaxrun.spec.job.job import Job

HOSTS = {0: "h1", 1: "h2", 2: "h3"}
KILLED = AttemptEnd("lost", saved_step=4)
RECORD = JobRecord("cd" * 16, "/runs/one", 2, 1000.0, 1100.0, HOSTS, (KILLED,), saved_step=9)


def plan(**wanted):
    options = {"max_restarts": 1, "wait_hosts": 60.0, **wanted}
    job = Job(
        program=("train.py",), backend="hosts", platform="cpu", hosts=3, host_rank=0, head="h1:7",
        processes_per_host=1, **options,
    )  # fmt: skip
    return by_hand.plan(job, {}, JOB_ID, Machine("h1", (0, 1), {}, False, False))


def found(*agents, record=RECORD):
    return FoundAgents(tuple(ConnectedAgent(agent, None, ()) for agent in agents), record, "h2")


# ---- what is made of a record


def test_the_job_continues_with_the_next_attempt_and_waits_for_the_agents_that_have_not_come():
    begun = continue_job(plan(), found(1), 1500.0)
    assert (begun.plan.job_id, begun.plan.attempt, begun.plan.placement.awaited) == (RECORD.job_id, 3, {2: "h3"})
    assert (begun.history.started, begun.history.began) == (1000.0, 1500.0)
    assert begun.plan.restart_reason == "host 0 (h1) was lost in attempt 2, and the head of the job with it"
    assert begun.history.ends == (KILLED, AttemptEnd("lost", saved_step=9))


def test_the_verdicts_on_earlier_attempts_come_before_the_one_on_the_attempt_that_has_lost_its_head():
    earlier = Verdict("killed", 137, HOSTS, headline="rank 1 was killed", run=5.0)
    begun = continue_job(plan(), found(1, record=replace(RECORD, verdicts=(to_json(earlier),))), 1500.0)
    lost = begun.history.verdicts[-1]
    assert begun.history.verdicts[0] == earlier and (lost.outcome, lost.exit_code, lost.attempt) == ("lost", 69, 2)
    assert (lost.before, lost.run, lost.hosts) == (100.0, 400.0, HOSTS)


def test_restarts_without_progress_are_counted_over_both_heads():
    stuck = replace(RECORD, saved_step=None)
    stop = continue_job(plan(), found(1, record=stuck), 1500.0)
    assert isinstance(stop, Stop) and "; the one restart is used up" in stop.why
    assert not isinstance(continue_job(plan(max_restarts=2), found(1, record=stuck), 1500.0), Stop)
    assert isinstance(continue_job(plan(restart_on="stall"), found(1), 1500.0), Stop)


def test_a_head_whose_pod_was_drained_costs_no_restart():
    left = replace(RECORD, saved_step=None, head_left=True)
    begun = continue_job(plan(), found(1, record=left), 1500.0)
    assert not isinstance(begun, Stop)
    assert begun.plan.restart_reason.startswith("host 0 (h1) has left, as its pod was drained, in attempt 2")


@pytest.mark.parametrize(
    ("wanted", "returns"),
    [({}, True), ({"wait_hosts": None}, False)],
    ids=["asked for", "not asked for"],
)
def test_the_head_may_return_where_people_start_its_command(wanted, returns):
    assert plan(**wanted).head_may_return == returns
