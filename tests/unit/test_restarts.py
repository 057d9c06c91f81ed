"""Whether a job is started again after an attempt, how the ends of attempts are told apart, and on which hosts."""

import pytest

from jaxrun.analysis.diagnosis.outcome import EndReason, JobOutcome, WorkerOutcome
from jaxrun.analysis.verdict.restarts import AlikeFailure, AttemptEnd, Restart, Stop, decide_restart, summarize_end
from jaxrun.errors import UsageError
from jaxrun.protocol.worker_messages import Failed, WorkerStage
from jaxrun.spec.backends.mpi_hosts import HostSlots, place_on_hosts, spare_hosts
from jaxrun.spec.backends.remote_plan import HostChoice, agents_by_rank, assign_agents, replace_hosts
from jaxrun.spec.job.job import Job

KILLED = AttemptEnd("lost", AlikeFailure(status=-9))
LOST = AttemptEnd("lost")
STALL = AttemptEnd("stall")


def raised(place, saved=None):
    return AttemptEnd("exceptions and exit codes", AlikeFailure("ValueError", place=f" at {place}"), saved_step=saved)


def saved(step, failure=KILLED.failure):
    return AttemptEnd("lost", failure, saved_step=step)


def decide(*history, most=3, on="failure", first=1):
    return decide_restart(history, most, on, first_attempt=first)


def test_a_failure_is_followed_by_a_restart_which_says_how_many_there_may_be():
    assert decide(KILLED) == Restart(4)
    assert decide(KILLED, raised("a:1"), LOST) == Restart(4)
    assert decide(KILLED, first=5) == Restart(8)
    assert decide(saved(10), saved(20), saved(30), saved(40), saved(50), most=1) == Restart(6)


def test_without_max_restarts_and_after_success_nobody_asks():
    assert decide(KILLED, most=0) == Stop()
    assert decide(KILLED, AttemptEnd(EndReason.OK)) == Stop()


def test_restarts_are_used_up():
    assert decide(LOST, LOST, most=1) == Stop("the one restart is used up, and no step was saved since")
    assert "all 3 restarts are used up" in decide(LOST, KILLED, LOST, STALL).why


# The attempts, how many restarts there may be, and whether there is another.
HISTORIES = {
    "a step that is later than all before begins the count anew": ([LOST, LOST, saved(10, None), LOST], 2, True),
    "the same step does not": ([saved(10, None), saved(10, None)], 1, False),
    "an earlier step does not": ([saved(10, None), saved(5, None)], 1, False),
    "the same exception at another place": ([raised("a:1"), raised("a:2")], 3, True),
    "the same signal twice": ([KILLED, KILLED], 3, False),
    "the same exception with a step in between": ([raised("a:1", 3), raised("a:1", 4)], 3, True),
    "the same exception at the same step": ([raised("a:1", 4), raised("a:1", 4)], 3, False),
    "the same exception, but not in a row": ([raised("a:1"), KILLED, raised("a:1")], 3, True),
    "lost hosts are never alike": ([LOST, LOST, LOST], 3, True),
}


@pytest.mark.parametrize(("history", "most", "is_restarted"), HISTORIES.values(), ids=HISTORIES)
def test_progress_and_differences_between_failures_count(history, most, is_restarted):
    assert isinstance(decide(*history, most=most), Restart if is_restarted else Stop)


def test_two_failures_that_are_alike_are_a_bug_and_what_is_hopeless_is_not_tried_again():
    assert decide(raised("a:1"), raised("a:1")) == Stop(
        "it raised ValueError at a:1 twice in a row, and saved no step in between: that is a bug, not bad luck"
    )
    assert decide(AttemptEnd("lost", hopeless="because")) == Stop("because")


@pytest.mark.parametrize(("on", "restarted"), [("failure", "KRLS"), ("lost", "KL"), ("stall", "S")])
def test_restart_on_chooses(on, restarted):
    ends = {"K": KILLED, "R": raised("a:1"), "L": LOST, "S": STALL}
    assert "".join(name for name, end in ends.items() if isinstance(decide(end, on=on), Restart)) == restarted
    for end in ends.values():
        decision = decide(end, on=on)
        assert isinstance(decision, Restart) or decision == Stop(f"--restart-on {on} leaves this out")


# ---- ends


def worker(rank=0, **values):
    return WorkerOutcome(**{"rank": rank, "host": "h1", "time": 1.0, "status": 1, **values})


def failed(error, *, stage=WorkerStage.PROGRAM, status=1, traceback="", message=""):
    return worker(failure=Failed(0, 1.0, stage, status, error, message, traceback))


def end_of(*workers, reason=EndReason.FAILED, has_run_before=False, **values):
    return summarize_end(JobOutcome(reason, tuple(workers), run_at=0.5, **values), has_run_before=has_run_before)


TRACEBACK = 'Traceback …\n  File "train.py", line 88, in step\n    x\n  File "data.py", line 31, in next\n    y\nE: x'


def test_exceptions_are_alike_by_type_and_place_and_not_by_their_message():
    one, other = (failed("ValueError", traceback=TRACEBACK, message=message) for message in "ab")
    assert end_of(one) == end_of(other)
    assert str(end_of(one).failure) == "raised ValueError at data.py:31"
    assert end_of(failed("KeyError", traceback=TRACEBACK)) != end_of(one)
    assert end_of(failed("ValueError", traceback=TRACEBACK.replace("31", "32"))) != end_of(one)


BROKEN = failed("ValueError", message="UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
FAILURES = {
    "SIGKILL": (worker(0, status=-9), "was killed by SIGKILL (9)"),
    "SIGKILL of another rank": (worker(3, status=-9), "was killed by SIGKILL (9)"),
    "SIGSEGV": (worker(status=-11), "crashed with SIGSEGV (11)"),
    "a status": (worker(status=7), "exited with status 7"),
    "sys.exit": (failed("SystemExit", status=3), "exited with status 3"),
    "a lost host is nobody's fault": (worker(status=None, lost_reason="silent"), "None"),
    "a broken connection is nobody's fault": (BROKEN, "None"),
}


@pytest.mark.parametrize(("end", "failure"), FAILURES.values(), ids=FAILURES)
def test_ends_are_alike_by(end, failure):
    assert str(end_of(end).failure) == failure
    assert (end_of(end) == KILLED) == (failure == str(KILLED.failure)) and (end_of(end) == LOST) == (end.status is None)


@pytest.mark.parametrize("error", ["ModuleNotFoundError", "SyntaxError", "IndentationError"])
def test_what_the_program_lacks_does_not_come_by_itself(error):
    assert end_of(failed(error)).hopeless == f"a {error} does not go away by itself"


def test_the_program_may_ask_for_a_later_job():
    assert "exit 75" in end_of(failed("SystemExit", status=75)).hopeless


FINAL = ("REFUSED", "USAGE", "UNAVAILABLE", "TIMEOUT", "INTERRUPTED", "PREEMPTED")


@pytest.mark.parametrize("reason", [EndReason[name] for name in FINAL])
def test_ends_after_which_nothing_is_tried(reason):
    assert end_of(reason=reason).hopeless


def test_what_cannot_be_reached_is_a_loss_once_the_program_has_run():
    assert end_of(reason=EndReason.UNAVAILABLE, has_run_before=True) == LOST


def test_somebody_who_asks_for_the_end_of_a_failing_job_gets_it():
    assert "asked to stop" in end_of(worker(status=-9), stop_requested=True).hopeless


def test_the_saved_step_is_kept():
    assert end_of(worker(status=-9), saved_step=4).saved_step == 4
    assert end_of(reason=EndReason.STALL, saved_step=4) == AttemptEnd("stall", saved_step=4)


# ---- hosts

PLACEMENT = ("h1", "h1", "h2", "h2", "h3", "h3")


def test_a_spare_host_takes_all_ranks_of_the_lost_one_and_every_other_rank_keeps_its_host():
    assert replace_hosts(PLACEMENT, ("h4", "h5"), {"h2"}, None) == HostChoice(
        ("h1", "h1", "h4", "h4", "h3", "h3"), ("h5",), ("h2",), ("h4 takes the place of h2",)
    )


def test_several_hosts_are_replaced_in_the_order_of_their_ranks():
    choice = replace_hosts(PLACEMENT, ("h4", "h5"), {"h3", "h1"}, None)
    assert choice.placement == ("h4", "h4", "h2", "h2", "h5", "h5") and choice.left_out == ("h1", "h3")


def test_without_a_spare_host_the_job_stays_where_it_is_unless_it_may_be_smaller():
    assert replace_hosts(PLACEMENT, (), {"h2"}, None) == HostChoice(PLACEMENT)
    assert replace_hosts(PLACEMENT, (), {"h2"}, 2) == HostChoice(
        ("h1", "h1", "h3", "h3"), (), ("h2",), ("h2 is left out: 4 ranks on 2 hosts",)
    )
    assert replace_hosts(PLACEMENT, (), {"h2"}, 3) == HostChoice(PLACEMENT)


def test_spare_hosts_come_before_a_smaller_job():
    choice = replace_hosts(PLACEMENT, ("h4",), {"h1", "h2", "h3"}, 2)
    assert choice.placement == ("h4", "h4", "h3", "h3") and choice.left_out == ("h1", "h2")


def test_a_host_that_the_job_does_not_use_is_no_loss():
    assert replace_hosts(PLACEMENT, ("h4",), {"h9"}, 1) == HostChoice(PLACEMENT, ("h4",))


AGENTS = dict(enumerate((*PLACEMENT, "h4", "h4", "h5", "h5")))  # those behind the ranks' own wait


def without(*lost):
    return {number: host for number, host in AGENTS.items() if host not in lost}


def test_agents_that_wait_take_the_ranks_of_a_lost_host_and_every_other_rank_keeps_its_agent():
    numbers = assign_agents(("h1", "h1", "h4", "h4", "h3", "h3"), without("h2"), ("h5",))
    assert numbers == {0: (0,), 1: (1,), 6: (2,), 7: (3,), 4: (4,), 5: (5,), 8: (), 9: ()}
    again = assign_agents(("h5", "h5", "h4", "h4", "h3", "h3"), without("h1", "h2"))
    assert again == {8: (0,), 9: (1,), 6: (2,), 7: (3,), 4: (4,), 5: (5,)}


def test_a_smaller_job_keeps_the_agents_of_the_hosts_that_are_left():
    assert assign_agents(("h1", "h1", "h3", "h3"), without("h2", "h4", "h5")) == {0: (0,), 1: (1,), 4: (2,), 5: (3,)}


def test_without_an_agent_for_each_rank_nobody_goes_on():
    placement = ("h1", "h1", "h4", "h4", "h3", "h3")
    assert assign_agents(placement, without("h2", "h4")) is None
    assert assign_agents(placement, {number: host for number, host in AGENTS.items() if number != 7}) is None
    assert assign_agents(placement, {}, share=True) is None


def test_the_ranks_of_a_host_may_share_the_agents_that_are_there():
    placement = ("h1", "h4", "h4", "h4", "h1")
    there = {0: "h1", 1: "h1", 6: "h4", 7: "h4", 8: "h5"}
    assert assign_agents(placement, there, ("h5",), share=True) == {0: (0,), 1: (4,), 6: (1,), 7: (2, 3), 8: ()}


def test_at_first_each_rank_has_the_agent_of_its_number_and_the_others_wait():
    assert agents_by_rank(2) == {0: (0,), 1: (1,)}
    assert agents_by_rank(2, 4) == {0: (0,), 1: (1,), 2: (), 3: ()}


def job(**wanted):
    return Job(**{"program": ("p",), "backend": "mpirun", "max_restarts": 1, **wanted})


NAMED = [HostSlots(name, 2) for name in ("h1", "h2", "h3")]


@pytest.mark.parametrize(
    ("wanted", "placed", "spare"),
    [
        ({"spares": 1}, "h1 h1 h2 h2", "h3"),
        ({"spares": 1, "hosts": 1}, "h1 h1", "h2"),
        ({"spares": 2, "processes": 2}, "h1 h1", "h2 h3"),
        ({"spares": 1, "processes": 2}, "h1 h2", "h3"),
        ({}, "h1 h1 h2 h2 h3 h3", ""),
        ({"spares": 1, "placement": ("h3", "h1")}, "h3 h1", "h3"),
    ],
)
def test_the_spare_hosts_are_those_behind_the_hosts_of_the_job(wanted, placed, spare):
    assert place_on_hosts(job(**wanted), NAMED, None) == tuple(placed.split())
    assert spare_hosts(job(**wanted), NAMED, None) == tuple(spare.split())


REFUSED = {
    "a negative number of restarts": ({"max_restarts": -1}, "--max-restarts must be 0 or more, not -1"),
    "an unknown reason": ({"restart_on": "oom"}, "--restart-on must be one of .*, not 'oom'"),
    "a debugger": ({"pdb": True}, "--pdb and --max-restarts 1 contradict; give one of them"),
    "negative spares": ({"spares": -1}, "--spares must be 0 or more, not -1"),
    "no host": ({"min_hosts": 0}, "--min-hosts must be 1 or more, not 0"),
    "spares without restarts": ({"spares": 1, "max_restarts": 0}, "--spares 1 needs --max-restarts"),
    "fewer hosts without restarts": ({"min_hosts": 1, "max_restarts": 0}, "--min-hosts 1 needs --max-restarts"),
    "more hosts than there are": ({"min_hosts": 3, "hosts": 2}, "--min-hosts 3 is more than -N 2"),
    "only spares": ({"spares": 3}, "--spares 3 leave no host for the job, but there are 3 hosts"),
    "too many spares": ({"spares": 1, "hosts": 3}, "-N 3 and --spares 1 take 4 hosts, but there are 3 hosts"),
}


@pytest.mark.parametrize(("wanted", "words"), REFUSED.values(), ids=REFUSED)
def test_a_job_is_refused_for(wanted, words):
    with pytest.raises(UsageError, match=words):
        place_on_hosts(job(**wanted), NAMED, None)
