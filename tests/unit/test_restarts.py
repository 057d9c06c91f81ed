"""Whether a job is started again after an attempt, and how the ends of attempts are told apart."""

import pytest

from jaxrun.diagnosis.worker_outcome import WorkerOutcome
from jaxrun.head.actions import EndReason, JobOutcome
from jaxrun.protocol.worker_messages import Failed, WorkerStage
from jaxrun.verdict.restarts import AttemptEnd, Restart, Stop, decide_restart, summarize_end

KILLED = AttemptEnd("lost", "was killed by SIGKILL (9)")
LOST = AttemptEnd("lost")
STALL = AttemptEnd("stall")


def raised(place, saved=None):
    return AttemptEnd("exceptions and exit codes", f"raised ValueError at {place}", saved_step=saved)


def saved(step, failure="was killed by SIGKILL (9)"):
    return AttemptEnd("lost", failure, saved_step=step)


def decide(*history, most=3, on="failure", first=1):
    return decide_restart(history, most, on, first_attempt=first)


def test_a_failure_is_followed_by_a_restart_which_says_how_many_there_may_be():
    assert decide(KILLED) == Restart(4)
    assert decide(KILLED, raised("a:1"), LOST) == Restart(4)
    assert decide(KILLED, first=5) == Restart(8)


def test_without_max_restarts_and_after_success_nobody_asks():
    assert decide(KILLED, most=0) == Stop()
    assert decide(KILLED, AttemptEnd(EndReason.OK)) == Stop()


def test_restarts_are_used_up():
    assert decide(LOST, LOST, most=1) == Stop("the one restart is used up, and no step was saved since")
    assert "all 3 restarts are used up" in decide(LOST, KILLED, LOST, STALL).why


def test_a_saved_step_begins_the_count_anew_if_it_is_later_than_all_before():
    assert decide(saved(10), saved(20), saved(30), saved(40), saved(50), most=1) == Restart(6)
    assert isinstance(decide(LOST, LOST, saved(10, ""), LOST, most=2), Restart)
    assert isinstance(decide(saved(10, ""), saved(10, ""), most=1), Stop)
    assert isinstance(decide(saved(10, ""), saved(5, ""), most=1), Stop)


def test_two_failures_that_are_alike_are_a_bug_unless_a_step_was_saved_in_between():
    assert decide(raised("a:1"), raised("a:1")) == Stop(
        "it raised ValueError at a:1 twice in a row, and saved no step in between: that is a bug, not bad luck"
    )
    assert isinstance(decide(raised("a:1"), raised("a:2")), Restart)
    assert isinstance(decide(KILLED, KILLED), Stop)
    assert isinstance(decide(raised("a:1", 3), raised("a:1", 4)), Restart)
    assert isinstance(decide(raised("a:1", 4), raised("a:1", 4)), Stop)
    assert isinstance(decide(raised("a:1"), KILLED, raised("a:1")), Restart)


def test_lost_hosts_are_never_alike():
    assert isinstance(decide(LOST, LOST, LOST), Restart)


@pytest.mark.parametrize(("on", "restarted"), [("failure", "KRLS"), ("lost", "KL"), ("stall", "S")])
def test_restart_on_chooses(on, restarted):
    ends = {"K": KILLED, "R": raised("a:1"), "L": LOST, "S": STALL}
    assert "".join(name for name, end in ends.items() if isinstance(decide(end, on=on), Restart)) == restarted
    for end in ends.values():
        decision = decide(end, on=on)
        assert isinstance(decision, Restart) or decision == Stop(f"--restart-on {on} leaves this out")


def test_what_another_attempt_cannot_mend_is_not_tried_again():
    assert decide(AttemptEnd("lost", hopeless="because")) == Stop("because")


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
    assert end_of(one).failure == "raised ValueError at data.py:31"
    assert end_of(failed("KeyError", traceback=TRACEBACK)) != end_of(one)
    assert end_of(failed("ValueError", traceback=TRACEBACK.replace("31", "32"))) != end_of(one)


def test_signals_are_alike_whatever_the_rank():
    assert end_of(worker(0, status=-9)) == end_of(worker(3, status=-9)) == KILLED
    assert end_of(worker(status=-11)).failure == "was killed by SIGSEGV (11)"


def test_statuses_are_alike_by_their_number():
    assert end_of(worker(status=7)).failure == "exited with 7"
    assert end_of(failed("SystemExit", status=3)).failure == "exited with status 3"


def test_a_lost_host_and_a_broken_connection_are_nobodys_fault():
    assert end_of(worker(status=None, lost_reason="silent")) == LOST
    broken = failed("ValueError", message="UNKNOWN: Gloo all-reduce failed: Connection closed by peer")
    assert end_of(broken).failure == ""


@pytest.mark.parametrize("error", ["ModuleNotFoundError", "SyntaxError", "IndentationError"])
def test_what_the_program_lacks_does_not_come_by_itself(error):
    assert end_of(failed(error)).hopeless == f"a {error} does not go away by itself"


def test_the_program_may_ask_for_a_later_job():
    assert "exit 75" in end_of(failed("SystemExit", status=75)).hopeless


@pytest.mark.parametrize(
    "reason",
    [
        EndReason.REFUSED,
        EndReason.USAGE,
        EndReason.UNAVAILABLE,
        EndReason.TIMEOUT,
        EndReason.INTERRUPTED,
        EndReason.PREEMPTED,
    ],
)
def test_ends_after_which_nothing_is_tried(reason):
    assert end_of(reason=reason).hopeless


def test_what_cannot_be_reached_is_a_loss_once_the_program_has_run():
    assert end_of(reason=EndReason.UNAVAILABLE, has_run_before=True) == LOST


def test_somebody_who_asks_for_the_end_of_a_failing_job_gets_it():
    assert "asked to stop" in end_of(worker(status=-9), stop_requested=True).hopeless


def test_the_saved_step_is_kept():
    assert end_of(worker(status=-9), saved_step=4).saved_step == 4
    assert end_of(reason=EndReason.STALL, saved_step=4) == AttemptEnd("stall", saved_step=4)
