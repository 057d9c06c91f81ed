"""The end of a job: the verdict is printed and kept; the command waits until the terminal has received all output."""

import signal

import pytest

from jaxrun.backends.local import plan
from jaxrun.head.actions import EndReason, JobOutcome
from jaxrun.job.devices import Machine
from jaxrun.job.job import Job
from jaxrun.rundir.rundir import RunDir
from jaxrun.supervisor.report import open_output, report_verdict
from jaxrun.terminal import TerminalFormat
from jaxrun.verdict.decide import decide


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
    verdict = decide(JobOutcome(reason, text="no agent"), {0: "box"}, started=0.0, ended=1.0)
    return report_verdict(verdict, (), RunDir(None), output, signals)


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
