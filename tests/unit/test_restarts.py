"""Whether a job is started again after an attempt, how the ends of attempts are told apart, and on which hosts."""

import pytest

from jaxrun.analysis.diagnosis.job_end import (
    Completed,
    Diverged,
    EndedBySignal,
    OutOfStep,
    Preempted,
    RankFailed,
    Refused,
    Stalled,
    TimedOut,
    Unavailable,
    Unsupported,
)
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome, WorkerOutcome
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.lockstep.divergence import Divergence
from jaxrun.analysis.verdict.restarts import Restart, Stop, decide_restart, summarize_end
from jaxrun.errors import UsageError
from jaxrun.protocol.job_record import AlikeFailure, AttemptEnd
from jaxrun.protocol.worker_messages import Failed, WorkerStage
from jaxrun.spec.backends.mpi_hosts import HostSlots, place_on_hosts, spare_hosts
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


USED_UP, ALL_USED = (
    f"{which} used up, and no step has been saved since" for which in ("the one restart is", "all 3 restarts are")
)
BUG = "it raised ValueError at a:1 twice in a row, and saved no step in between: that is a bug, not bad luck"
OUT_OF_STEP = summarize_end(JobOutcome(OutOfStep()), has_run_before=False)
STEPS = [saved(10), saved(20), saved(30), saved(40), saved(50)]
SIGNAL_TWICE = "it was killed by SIGKILL (9) twice in a row, and saved no step in between: that is a bug, not bad luck"
# The attempts, the options, and the decision: a restart says how many attempts there may be.
DECISIONS = {
    "a failure": ([KILLED], {}, Restart(4)),
    "failures that differ": ([KILLED, raised("a:1"), LOST], {}, Restart(4)),
    "a job that a batch script has restarted": ([KILLED], {"first": 5}, Restart(8)),
    "each with a later step": (STEPS, {"most": 1}, Restart(6)),
    "no --max-restarts": ([KILLED], {"most": 0}, Stop()),
    "success": ([KILLED, AttemptEnd(Completed.reason)], {}, Stop()),
    "out of step": ([OUT_OF_STEP], {}, Stop("the program has run to its end")),
    "the one restart is used up": ([LOST, LOST], {"most": 1}, Stop(USED_UP)),
    "all restarts are used up": ([LOST, KILLED, LOST, STALL], {}, Stop(ALL_USED)),
    "a later step begins the count anew": ([LOST, LOST, saved(10, None), LOST], {"most": 2}, Restart(5)),
    "the same step does not": ([saved(10, None), saved(10, None)], {"most": 1}, Stop(USED_UP)),
    "an earlier step does not": ([saved(10, None), saved(5, None)], {"most": 1}, Stop(USED_UP)),
    "the same exception at another place": ([raised("a:1"), raised("a:2")], {}, Restart(4)),
    "the same signal twice": ([KILLED, KILLED], {}, Stop(SIGNAL_TWICE)),
    "the same exception twice": ([raised("a:1"), raised("a:1")], {}, Stop(BUG)),
    "the same exception with a step in between": ([raised("a:1", 3), raised("a:1", 4)], {}, Restart(5)),
    "the same exception at the same step": ([raised("a:1", 4), raised("a:1", 4)], {}, Stop(BUG)),
    "the same exception, but not in a row": ([raised("a:1"), KILLED, raised("a:1")], {}, Restart(4)),
    "lost hosts are never alike": ([LOST, LOST, LOST], {}, Restart(4)),
    "what is hopeless": ([AttemptEnd("lost", hopeless="because")], {}, Stop("because")),
}


@pytest.mark.parametrize(("history", "options", "decision"), DECISIONS.values(), ids=DECISIONS)
def test_whether_a_job_is_started_again_after(history, options, decision):
    assert decide(*history, **options) == decision


@pytest.mark.parametrize(("on", "restarted"), [("failure", "KRLS"), ("lost", "KL"), ("stall", "S")])
def test_restart_on_chooses(on, restarted):
    ends = {"K": KILLED, "R": raised("a:1"), "L": LOST, "S": STALL}
    assert "".join(name for name, end in ends.items() if isinstance(decide(end, on=on), Restart)) == restarted
    for end in ends.values():
        decision = decide(end, on=on)
        assert isinstance(decision, Restart) or decision == Stop(f"--restart-on {on} does not include this")


# ---- ends


def worker(rank=0, **values):
    return WorkerOutcome(**{"rank": rank, "host": "h1", "time": 1.0, "status": 1, **values})


def failed(error, *, stage=WorkerStage.PROGRAM, status=1, traceback="", message=""):
    return worker(failure=Failed(0, 1.0, stage, status, error, message, traceback))


FAILED = RankFailed()


def end_of(*workers, why=FAILED, has_run_before=False, **values):
    outcome = JobOutcome(why, workers=workers, **{"run_at": 0.5, **values})
    return summarize_end(outcome, has_run_before=has_run_before)


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


def test_ranks_out_of_step_are_alike_by_their_call():
    found = (Divergence("0-1", 7, ()), Divergence("0-1", 8, ()))
    first, again, other = (end_of(why=Diverged(), divergences=(one,)) for one in (found[0], *found))
    assert str(first.failure) == "had its ranks out of step at cross-process call #7" and not first.hopeless
    assert first == again != other


@pytest.mark.parametrize(("end", "failure"), FAILURES.values(), ids=FAILURES)
def test_ends_are_alike_by(end, failure):
    assert str(end_of(end).failure) == failure
    assert (end_of(end) == KILLED) == (failure == str(KILLED.failure)) and (end_of(end) == LOST) == (end.status is None)


NOWHERE = JobStacks(1.0, {}, {}, {})
SIGTERM = EndedBySignal(15)
FINAL = (Refused("x"), Unsupported("x"), Unavailable("x"), TimedOut(NOWHERE), SIGTERM, Preempted(signal=SIGTERM))
LACKS = ("ModuleNotFoundError", "SyntaxError", "IndentationError", "SnapshotError")
HOPELESS = {
    **{error: (end_of(failed(error)), f"a {error} does not go away by itself") for error in LACKS},
    "the program asks for a later job": (end_of(failed("SystemExit", status=75)), "exit 75"),
    "somebody has asked for the end": (end_of(worker(status=-9), stop_requested=True), "asked to stop"),
    **{why.reason: (end_of(why=why, run_at=None), "") for why in FINAL},
}


@pytest.mark.parametrize(("end", "why"), HOPELESS.values(), ids=HOPELESS)
def test_ends_after_which_nothing_is_tried(end, why):
    assert end.hopeless and why in end.hopeless


def test_what_cannot_be_reached_is_a_loss_once_the_program_has_run():
    assert end_of(why=Unavailable("x")) == LOST
    assert end_of(why=Unavailable("x"), run_at=None, has_run_before=True) == LOST


def test_the_saved_step_is_kept():
    assert end_of(worker(status=-9), saved_step=4).saved_step == 4
    assert end_of(why=Stalled(NOWHERE), saved_step=4) == AttemptEnd("stall", saved_step=4)


# ---- hosts


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
    ],
)
def test_the_hosts_listed_after_the_jobs_hosts_are_spare(wanted, placed, spare):
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
