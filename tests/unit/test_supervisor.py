"""The supervisor hears its parent, ends an attempt, prints the verdict, and waits for the terminal."""

import contextlib
import os
import signal
import time
from collections import deque

import pytest
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import Completed, Unavailable
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.decide import decide
from jaxrun.analysis.verdict.restarts import Restart
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.controller.head.head_state import JobPhase
from jaxrun.controller.supervisor.attempt_head import AttemptHead
from jaxrun.controller.supervisor.attempt_loop import AttemptLoop
from jaxrun.controller.supervisor.job_history import JobHistory
from jaxrun.controller.supervisor.job_report import describe_restart, report_verdict
from jaxrun.controller.supervisor.job_server import JobServer, JobSockets
from jaxrun.controller.supervisor.job_terminal import Terminal
from jaxrun.controller.supervisor.notifier import Notifier
from jaxrun.controller.supervisor.supervision import Outside, Supervision
from jaxrun.controller.supervisor.train_job_status import TrainJobStatus
from jaxrun.job_events.actions import Finish, Send, SignalRanks
from jaxrun.job_events.events import LauncherSignalled, ParentExited, SignalRequested
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.agent_messages import SignalWorker
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.terminal import TerminalFormat

# ---- the end of an attempt, and of a job


def test_what_a_launch_command_has_said_stays_whole_where_the_job_is_started_again():
    said = "mpirun ended with status 0; it said:\n  no such host"
    verdict = Verdict("unavailable", 69, {}, headline=said)
    wanted = f"jaxrun: attempt 1 of 3 failed: {said}\njaxrun: restarting"
    assert describe_restart(verdict, Restart(3), None) == wanted


def test_of_a_rank_that_crashed_no_line_of_its_stack_passes_for_its_error():
    stack = 'Stack (most recent call last):\n  File "train.py", line 3, in <module>\n'
    verdict = Verdict("killed", 134, {}, headline="rank 1 of 2 was aborted by SIGABRT (6).", traceback=stack)
    wanted = "jaxrun: attempt 1 of 3 failed: rank 1 of 2 was aborted by SIGABRT (6); restarting"
    assert describe_restart(verdict, Restart(3), None) == wanted


def test_of_an_error_of_several_lines_the_first_is_shown_where_the_job_is_started_again():
    error = "jaxrun_runtime.DivergenceError: ranks 0-1 differ in call #3\nrank 0: step(f32[4])\n  at train.py:9 main"
    frames = 'Traceback (most recent call last):\n  File "train.py", line 9, in main\n    step(x)\n    ~~~~^^^\n'
    verdict = Verdict("diverged", 1, {}, headline="the ranks differ.", traceback=f"{frames}{error}\n")
    assert describe_restart(verdict, Restart(3), None).splitlines()[1].strip() == error.splitlines()[0]
    verdict = replace(verdict, traceback="ValueError: without frames")
    assert describe_restart(verdict, Restart(3), None).splitlines()[1].strip() == "ValueError: without frames"


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


def server():
    """A JobServer that nobody connects to."""
    return JobServer("ab" * 16, JobSockets(), EventLoop(), 0, pytest.fail, pytest.fail)


def report(output, signals, why, **more):
    outcome = JobOutcome(why, {0: "box"})
    verdict = decide(outcome, started=0.0, ended=1.0)
    return report_verdict(verdict, outcome, RunDir(None), output, signals, server(), **more)


@pytest.mark.parametrize(("why", "lines"), [(Completed(), 0), (Unavailable("no agent"), 1)])
def test_a_quiet_job_reports_only_what_is_wrong(why, lines):
    output = StuckOutput(1)
    report(output, Signals(), why, quiet=True)
    assert len(output.lines) == lines


@pytest.mark.parametrize(("why", "status"), [(Completed(), 0), (Unavailable("no agent"), 69)])
def test_the_status_is_that_of_the_verdict(why, status):
    output = StuckOutput(1)
    assert report(output, Signals(), why) == status
    assert len(output.lines) == 1 and ("no agent" in output.lines[0]) == (status == 69)


def test_a_slow_terminal_is_waited_for():
    assert report(StuckOutput(5), Signals([], [signal.SIGCHLD], [signal.SIGUSR1]), Completed()) == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_wait_for_a_stuck_terminal(signum):
    assert report(StuckOutput(10**9), Signals([], [], [signum]), Completed()) == 128 + signum


def test_a_signal_that_came_during_the_job_does_not_end_the_wait():
    assert report(StuckOutput(3), Signals([signal.SIGINT]), Completed()) == 0


class StubbornHead:
    """A Head that wants these actions whatever happens, at the first event."""

    def __init__(self, *actions):
        self.hosts = {0: "box"}
        self._actions = list(actions)

    def handle(self, event, now):
        actions, self._actions = self._actions, []
        return actions

    def deadline(self):
        return None


class Agents:
    """An AgentLink: `sent` are the orders for ranks, `signalled` the signals; each of those is an event."""

    def __init__(self, attempt):
        self._attempt = attempt
        self.sent, self.signalled = [], []

    def send(self, ranks, order):
        self.sent.append((ranks, order))

    def on_signal(self, signum):
        self.signalled.append(signum)
        self._attempt.handle(LauncherSignalled(signum))


class QuietOutput:
    congested = False

    def flush_due(self):
        return None

    def set_hosts(self, hosts):
        """It shows no prefixes."""


@contextlib.contextmanager
def attempt_of(*actions):
    """(an AttemptHead that wants these actions, what runs an attempt with it and these agents, its signals)."""
    with SignalPipe((signal.SIGCHLD, signal.SIGINT)) as signals:
        output, loop = QuietOutput(), EventLoop(time.time)
        shared = Supervision(
            {},
            RunDir(None),
            output,
            loop,
            None,
            Outside(
                signals,
                Terminal(output, loop, 0, pytest.fail),
                server(),
                Notifier(loop, "", {}, {}, pytest.fail),
                TrainJobStatus({}, pytest.fail),
                deque(),
            ),
            history=JobHistory(0.0, 0.0),
        )
        head = AttemptHead(shared, StubbornHead(*actions), 1)
        yield head, lambda agents: AttemptLoop(shared, head, agents).run(), signals
        loop.close()


def test_all_stand_still_before_the_first_is_killed():
    kills = [SignalRanks(ranks, signal.SIGKILL) for ranks in ((0, 2), (1,))]
    with attempt_of(*kills, Finish(JobOutcome(Completed()))) as (head, run, _):
        agents = Agents(head)
        head.handle(LauncherSignalled(signal.SIGINT))
        run(agents)
    stop, kill = SignalWorker(signal.SIGSTOP), SignalWorker(signal.SIGKILL)
    assert agents.sent == [((0, 2, 1), stop), ((0, 2), kill), ((1,), kill)]


def test_actions_are_executed_when_the_callback_that_caused_them_has_returned():
    reading, writing = os.pipe()
    with attempt_of(Send((0,), SignalWorker(signal.SIGUSR1)), Finish(JobOutcome(Completed()))) as (head, run, _):
        agents, seen = Agents(head), []

        def on_readable():
            head.handle(LauncherSignalled(signal.SIGINT))
            seen.append(list(agents.sent))

        head.loop.add_reader(reading, 0, on_readable)
        head.loop.add_reader(writing_end := os.dup(reading), 1, lambda: seen.append(list(agents.sent)))
        os.write(writing, b"x")
        run(agents)
    for fd in (reading, writing, writing_end):
        os.close(fd)
    assert seen == [[], [((0,), SignalWorker(signal.SIGUSR1))]]


def test_a_signal_that_comes_as_an_attempt_ends_is_for_the_next():
    over = Finish(JobOutcome(Completed()))
    with attempt_of(over) as (head, run, signals):
        agents = Agents(head)
        for signum in (signal.SIGCHLD, signal.SIGINT):
            os.kill(os.getpid(), signum)
        assert run(agents) == over.outcome
        assert agents.signalled == [signal.SIGCHLD]
        assert signals.receive() == [signal.SIGINT]


# ---- what the process that has started the launcher wants of it

BY_ORDER = ParentExited("the process that started it")
BY_DEATH = ParentExited("the end of the process that started it")


# ---- what the head makes of that


def test_a_signal_is_sent_to_all_running_ranks(simulate):
    job = simulate(3).run().done(1).handle(SignalRequested(signal.SIGUSR2))
    assert job.kills(signal.SIGUSR2) == [(0, (0, 2))]
    assert job.head.phase is JobPhase.RUNNING and not job.printed


@pytest.mark.parametrize("stage", ["spawn", "say_hello", "join"])
def test_a_worker_that_cannot_handle_a_signal_yet_is_sent_none(simulate, stage):
    assert getattr(simulate(2), stage)().handle(SignalRequested(signal.SIGINT)).killed == []


@pytest.mark.parametrize("stage", ["say_hello", "run"])
@pytest.mark.parametrize("asked", [BY_ORDER, BY_DEATH], ids=["by order", "by death"])
def test_the_end_comes_at_once(simulate, stage, asked):
    job = getattr(simulate(2, grace=5.0), stage)().handle(asked).wait(1)
    assert job.kills() == [(0, (0, 1))] and job.finished_at == pytest.approx(0.001)
    assert (job.outcome.end.signum, job.outcome.end.text) == (signal.SIGHUP, asked.reason)


def test_before_anything_was_started_there_is_nothing_to_end(simulate):
    assert simulate(2).handle(BY_DEATH).outcome.end.reason == "interrupted"


def test_a_running_grace_period_is_cut_short(simulate):
    job = simulate(2, grace=60.0).run().listen().interrupt(signal.SIGTERM).wait(1).handle(BY_DEATH).wait(1)
    assert job.kills() == [(1000, (0, 1))] and job.outcome.end.signum == signal.SIGTERM
