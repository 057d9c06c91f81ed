"""The supervisor finds out why agents end; at the end of a job it prints the verdict, and waits for the terminal."""

import signal
from types import SimpleNamespace

import pytest

from jaxrun.analysis.diagnosis.outcome import EndReason, JobOutcome
from jaxrun.analysis.verdict.decide import decide
from jaxrun.controller.supervisor.job_report import open_output, report_verdict
from jaxrun.controller.supervisor.loss_watch import Evidence, LossWatch, explain_losses
from jaxrun.protocol.agent_messages import AgentSignalled, StartFailed, WorkerExited
from jaxrun.records.event_log.events import AgentLost
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.backends.local import plan
from jaxrun.spec.job.devices import Machine
from jaxrun.spec.job.job import Job
from jaxrun.terminal import TerminalFormat

# ---- why agents end

ENDED = StartFailed("mpirun ended with status 1 before the job was over")
CLOSED = "the connection to its agent was closed"


def evidence(**changes):
    values = {"unanswered": (), "failure_reported": frozenset(), "launch_end": None, "launch_failed": False}
    return Evidence(**{**values, "all_reported": True, **changes})


@pytest.fixture
def losses():
    """A LossWatch of a job of one rank; `told` are the events that reach its head, `probes` counts those of hosts."""
    watch = LossWatch(
        SimpleNamespace(dispatcher=SimpleNamespace(hosts={0: "h1"}), clock=lambda: watch.now),
        SimpleNamespace(status=None, failed=False),
        SimpleNamespace(probe=lambda: watch.probes.append(watch.now), unanswered_ranks=lambda: ()),
        lambda event: watch.told.append(event),
        attached=False,
    )
    watch.now, watch.told, watch.probes, watch.reported = 100.0, [], [], {0}
    return watch


def test_a_lost_agent_is_passed_on_after_a_moment(losses):
    losses.hold(AgentLost(3, CLOSED), probe=False)
    assert 100.0 < losses.deadline < 100.1
    losses.tell()
    losses.tell()
    assert losses.told == [AgentLost(3, CLOSED)] and losses.deadline is None
    losses.reported = set()
    losses.hold(AgentLost(3, CLOSED), probe=False)
    assert losses.deadline == 100.5


def test_hosts_are_probed_once_and_given_the_time_to_answer(losses):
    for losses.now in (100.0, 100.2):
        losses.hold(AgentSignalled(0, 15), probe=True)
    assert losses.probes == [100.0] and losses.deadline == 101.0


LOST = [AgentLost(rank, CLOSED) for rank in range(4)]
TERM = [AgentSignalled(rank, 15) for rank in range(2)]
FAILED = {"launch_end": ENDED, "launch_failed": True}
# What was held, the evidence, and what is passed on, the cause first.
CAUSES = {
    "a host that does not answer": (
        [TERM[0], LOST[1]],
        {"unanswered": (4, 5), "launch_end": ENDED},
        [*(AgentLost(rank, "its host has not answered for 1 s") for rank in (4, 5)), TERM[0], LOST[1]],
    ),
    "a launch command that was killed": ([LOST[2]], {"launch_end": ENDED}, [ENDED, LOST[2]]),
    "the first agent that was lost, of a launch command that fails": (
        [WorkerExited(0, 1), LOST[3], LOST[2]],
        FAILED,
        [LOST[3], WorkerExited(0, 1), AgentLost(2, CLOSED, ended_by_launch_command=True)],
    ),
    "an agent that was not signalled, and whose worker had not failed": (
        [TERM[1], LOST[1], LOST[0], LOST[2]],
        {**FAILED, "failure_reported": frozenset({0})},
        [LOST[2], TERM[1], *(AgentLost(rank, CLOSED, ended_by_launch_command=True) for rank in (1, 0))],
    ),
    "a launch command that could not start all agents": (
        [LOST[0]],
        {**FAILED, "all_reported": False},
        [ENDED, LOST[0]],
    ),
    "a scheduler that signals all": (TERM, {"launch_end": ENDED}, TERM),
}


@pytest.mark.parametrize(("held", "known", "explained"), CAUSES.values(), ids=CAUSES)
def test_the_cause_of_losses_is_passed_on_first(held, known, explained):
    assert explain_losses(held, evidence(**known), "its host has not answered for 1 s") == explained


# ---- the end of a job


class StuckOutput:
    """An Output whose terminal has received everything at the call of `close` with this number."""

    def __init__(self, closes):
        self.lines = []
        self._left = closes

    terminal = TerminalFormat()

    def print_text(self, text):
        self.lines.append(text)

    def close(self, timeout):
        self._left -= 1
        return self._left <= 0


class Signals:
    """A SignalPipe from which these lists of signals come, one a call."""

    def __init__(self, *received):
        self._received = list(received)

    def receive(self):
        return self._received.pop(0) if self._received else []


def report(output, signals, reason=EndReason.OK):
    outcome = JobOutcome(reason, text="no agent")
    verdict = decide(outcome, {0: "box"}, started=0.0, ended=1.0)
    return report_verdict(verdict, outcome, RunDir(None), output, signals)


@pytest.mark.parametrize(("reason", "status"), [(EndReason.OK, 0), (EndReason.UNAVAILABLE, 69)])
def test_the_status_is_that_of_the_verdict(reason, status):
    output = StuckOutput(1)
    assert report(output, Signals(), reason) == status
    assert len(output.lines) == 1 and ("no agent" in output.lines[0]) == (status == 69)


def test_a_slow_terminal_is_waited_for():
    assert report(StuckOutput(5), Signals([], [signal.SIGCHLD], [signal.SIGUSR1])) == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait_for_a_stuck_terminal(signum):
    assert report(StuckOutput(10**9), Signals([], [], [signum])) == 128 + signum


def test_a_signal_that_came_during_the_job_does_not_end_the_wait():
    assert report(StuckOutput(3), Signals([signal.SIGINT])) == 0


@pytest.mark.parametrize("verbose", [False, True])
def test_verbose_names_the_variables_that_the_program_does_not_see(verbose, capfd):
    environ = {"JAX_PROCESS_ID": "3", "JAX_PARTITION_INDEX": "0"}
    job = Job(program=("p",), platform="cpu", verbose=verbose)
    made = plan(job, environ, "ab" * 16, Machine("box", (0, 1)))
    assert open_output(made, environ, RunDir(None)).close()
    line = "jaxrun: variables that are kept from the program: JAX_PROCESS_ID\n"
    assert (line in capfd.readouterr().err) == verbose
