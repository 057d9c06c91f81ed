"""Injected faults: how they are written, when they are due, and what the head does about them."""

import pytest

from jaxrun.errors import UsageError
from jaxrun.job_events.events import FaultRequested
from jaxrun.protocol.agent_messages import FaultNotInjected
from jaxrun.spec.job.fault_spec import FaultSpec, parse_faults

WRITTEN = {
    "kill:1@2s": (FaultSpec("kill", (range(1, 2),), 2.0),),
    "pause:0-3,7@1.5s": (FaultSpec("pause", (range(4), range(7, 8)), 1.5),),
    " kill : 1 @ 250ms , pause:0@.5s": (FaultSpec("kill", (range(1, 2),), 0.25), FaultSpec("pause", (range(1),), 0.5)),
    "kill:any@2s": (FaultSpec("kill", (), 2.0),),
    "kill:1@2s-2s": (FaultSpec("kill", (range(1, 2),), 2.0),),
    "kill:0,2@1s,pause:1,3@2s": (
        FaultSpec("kill", (range(1), range(2, 3)), 1.0),
        FaultSpec("pause", (range(1, 2), range(3, 4)), 2.0),
    ),
}


@pytest.mark.parametrize(("text", "faults"), WRITTEN.items(), ids=WRITTEN)
def test_faults_are_read_as_they_are_written(text, faults):
    assert parse_faults(text) == parse_faults(",".join(map(str, faults))) == faults


WRONG = {
    "": r"--chaos '': a fault is KIND:RANKS@TIME, such as kill:1@2s",
    "kill": "--chaos 'kill': a fault is KIND",
    "kill:1": "--chaos 'kill:1': a fault is KIND",
    "kill:1@2": "--chaos 'kill:1@2': a fault is KIND",
    "kill:1@-2s": "--chaos 'kill:1@-2s': a fault is KIND",
    "kill:1@2h": "--chaos 'kill:1@2h': a fault is KIND",
    "kill:1@.s": r"--chaos 'kill:1@\.s': a fault is KIND",
    "kill:1@٣s": "--chaos 'kill:1@٣s': a fault is KIND",
    "kill:1@2s,": "--chaos 'kill:1@2s,': a fault is KIND",
    "kill:1@2s,pause:2": "--chaos 'pause:2': a fault is KIND",
    "maim:1@2s": "--chaos 'maim:1@2s': the kind of a fault is one of kill, pause, not 'maim'",
    "kill:@2s": "--chaos takes ranks such as 1-3,7; '' in '' is not a rank",
    "kill:any@4s-1s": "--chaos 'kill:any@4s-1s': 1 s is before 4 s; write the earlier one first",
    "kill:3-1@2s": "--chaos '3-1': 3-1 runs backwards; write 1-3",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items(), ids=WRONG)
def test_an_invalid_fault_is_refused_with_the_right_form(text, message):
    with pytest.raises(UsageError, match=message):
        parse_faults(text)


def test_a_moment_is_drawn_anew_each_time():
    drawn = [parse_faults("kill:any@1s-1500ms")[0].after for _ in range(20)]
    assert all(1.0 <= after <= 1.5 for after in drawn) and len(set(drawn)) > 1


# ---- the head


def test_faults_come_when_they_are_due_counted_from_the_programs_start(simulate):
    job = simulate(3, chaos="pause:0,2@2s,pause:1@500ms").wait(10)
    job.run().wait(5)
    assert job.injected == [(10.5, "pause", (1,)), (12.0, "pause", (0, 2))]
    assert job.printed[-2:] == [
        (10.5, "rank 1 is stopped by SIGSTOP (19), as --chaos asked"),
        (12.0, "ranks 0, 2 are stopped by SIGSTOP (19), as --chaos asked"),
    ]
    assert job.outcome is None and not job.killed


def test_a_rank_killed_by_a_fault_does_not_count_as_stopped(simulate):
    job = simulate(3, chaos="kill:1@1s").run().wait(3)
    assert job.lines == ["rank 1 is killed by SIGKILL (9), as --chaos asked", "rank 1 failed; stopping 2 others"]
    assert job.kills() == [(1031, (0, 2))]
    assert job.outcome.end.reason == "failed"
    assert [(end.killed_by_launcher, [dealt.kind for dealt in end.injected_faults]) for end in job.outcome.workers] == [
        (True, []),
        (False, ["kill"]),
        (True, []),
    ]


def test_a_paused_rank_is_the_known_cause_of_its_broken_connection(simulate):
    job = simulate(3, chaos="pause:1@1s").run().wait(2)
    job.handle(job.failure(1, error="JaxRuntimeError", message="Gloo all-reduce failed: Connection closed by peer"))
    job.wait(10)
    assert job.kills()[0] == (2030, (2,))  # rank 0 goes last


def test_where_only_its_peers_fail_a_rank_that_was_paused_is_still_the_cause(simulate):
    job = simulate(3, chaos="pause:1@1s").run().wait(2)
    job.handle(job.failure(0, error="JaxRuntimeError", message="Gloo all-reduce failed: Connection closed by peer"))
    job.exit(1, 0).wait(1)
    assert job.lines[-1] == "rank 1 failed; stopping 2 others"


@pytest.mark.parametrize(
    "end",
    [lambda job: job.done(0, 1), lambda job: job.handle(job.failure(0)), lambda job: job.interrupt(15)],
    ids=["all done", "failure", "SIGTERM"],
)
def test_no_fault_comes_to_a_job_that_is_ending(simulate, end):
    assert end(simulate(2, chaos="kill:1@1s", grace=5.0).run()).wait(3).injected == []


def test_faults_that_come_too_late_are_reported(simulate):
    job = simulate(2, chaos="kill:1@5s,kill:0@200ms,pause:0@9s").run()
    job.done(0, 1).exit(0, 1).exit(0, 0)
    assert job.outcome.end.reason == "ok"
    assert job.lines == ["the job was over before --chaos kill:0@0.2s, kill:1@5s, pause:0@9s"]


def test_a_fault_that_cannot_be_injected_is_reported_and_not_blamed(simulate):
    job = simulate(2, chaos="pause:1@1s").run().wait(1).handle(FaultNotInjected(1, "pause", "it is forbidden"))
    assert job.lines[-1] == "rank 1 could not be stopped by SIGSTOP (19): it is forbidden; the job continues"
    job.done(0, 1).exit(0, 1).exit(0, 0)
    assert [end.injected_faults for end in job.outcome.workers] == [(), ()]


@pytest.mark.parametrize("stage", ["say_hello", "run"])
def test_the_parent_of_the_launcher_requests_faults_at_any_time(simulate, stage):
    job = getattr(simulate(2), stage)().handle(FaultRequested("kill", (1, 7))).wait(1)
    assert job.injected == [(0.0, "kill", (1,))]
    assert job.lines[:2] == [
        "rank 7 cannot be killed by SIGKILL (9), as its gang asked: it does not run",
        "rank 1 is killed by SIGKILL (9), as its gang asked",
    ]
    assert job.outcome.end.reason == "failed"


def test_faults_requested_of_an_ending_job_are_too_late(simulate):
    job = simulate(2).run().handle(FaultRequested("kill", (1,)), FaultRequested("kill", (0,)))
    job.handle(job.failure(0)).handle(FaultRequested("pause", (1,)))
    assert [kind for _, kind, _ in job.injected] == ["kill", "kill"]


def test_any_rank_is_one_of_those_that_live(simulate):
    hit = set()
    for _ in range(20):
        job = simulate(3, chaos="kill:any@1s").run().wait(1.01)
        ((_, kind, ranks),) = job.injected
        assert kind == "kill" and len(ranks) == 1
        hit |= set(ranks)
    assert hit <= {0, 1, 2} and len(hit) > 1


def test_faults_that_were_not_due_are_left_for_the_next_attempt(simulate):
    job = simulate(2, chaos="kill:1@1s,kill:0@9s").run().wait(3)
    assert [str(fault) for fault in job.outcome.faults_left] == ["kill:0@9s"]
