"""A running job that Ctrl-C, SIGTERM or SIGHUP ends, and when its workers count as ended."""

import signal

import pytest
from simulation import IN_JAX

from jaxrun.analysis.diagnosis.job_end import EndedBySignal, Preempted
from jaxrun.controller.head.head_state import REPEATED_SIGNAL_S
from jaxrun.controller.head.worker_table import WorkerTable
from jaxrun.job_events.events import EndRequested
from jaxrun.protocol.agent_messages import WorkerExited
from jaxrun.protocol.stop_messages import StopPolled, StopRequested
from jaxrun.protocol.worker_messages import Exit, Interrupted, PreemptionNotice, SignalHandlers

TERMINATION = (signal.SIGTERM, signal.SIGHUP)
TERMINAL = (signal.SIGINT, *TERMINATION)


def interrupted(job, *ranks):
    """KeyboardInterrupt is raised in these ranks, and ends their programs."""
    for rank in ranks:
        job.handle(Interrupted(rank, job.now), job.failure(rank, "KeyboardInterrupt", "", 130))
    return job


def failed(job, rank):
    return job.handle(job.failure(rank))


# ---- Ctrl-C


def test_ctrl_c_is_sigint_for_every_rank_and_all_leave_with_rank_0_last(simulate):
    job = simulate(3).run().interrupt(signal.SIGINT)
    assert job.killed == [(0.0, signal.SIGINT, (0, 1, 2))]
    assert job.lines == ["Ctrl-C: KeyboardInterrupt in ranks 0-2; another Ctrl-C kills at once"]
    interrupted(job, 0, 1).exit(130, 1)
    assert job.ranks_sent(Exit) == []
    interrupted(job, 2).exit(130, 2)
    assert job.ranks_sent(Exit)[-1] == 0
    job.exit(130, 0)
    assert job.outcome.end.reason == "interrupted" and job.outcome.end.signum == signal.SIGINT and not job.kills()


def test_ranks_that_catch_the_interrupt_and_finish_leave_too(simulate):
    job = interrupted(simulate(3).run().interrupt(signal.SIGINT), 0)
    job.handle(Interrupted(1, 0.0), Interrupted(2, 0.0)).done(1, 2)
    assert job.ranks_sent(Exit) == [1, 2]
    job.exit(0, 1, 2)
    assert job.ranks_sent(Exit) == [1, 2, 0]
    job.exit(130, 0)
    assert job.outcome.end.reason == "interrupted" and not job.kills()


def test_a_rank_that_the_interrupt_does_not_reach_is_shown_and_killed_after_the_grace(simulate):
    job = simulate(3).run()
    job.stacks = {2: IN_JAX}
    interrupted(job.interrupt(signal.SIGINT), 0, 1).exit(130, 1).wait(10)
    assert job.kills(signal.SIGTERM) == [(5000, (2,))] and job.kills() == [(5100, (2,))]
    assert job.lines[1].startswith("rank 2 did not end within 5 s; sent SIGTERM and SIGKILL · ")
    assert "train.py:2" in job.lines[1]
    assert job.outcome is None and job.ranks_sent(Exit) == [0]
    job.exit(130, 0)
    assert job.outcome.end.late_stacks == {2: IN_JAX} and [end.killed_by_launcher for end in job.outcome.workers] == [
        0,
        0,
        1,
    ]


@pytest.mark.parametrize("then", [(), (signal.SIGINT,)])
@pytest.mark.parametrize("first", [*TERMINAL, "SIGTERM that ranks handle", "SIGTERM where should_stop is asked"])
def test_the_verdict_names_where_ranks_were_when_the_signal_came(simulate, first, then):
    running = simulate(3).run()
    job = running.listen() if first == "SIGTERM that ranks handle" else running
    job = polling(job) if first == "SIGTERM where should_stop is asked" else job
    job.stacks = {1: IN_JAX}
    job.interrupt(signal.SIGTERM if isinstance(first, str) else first).wait(0.3)
    job.stacks = {}
    for signum in then:
        job.interrupt(signum)
    job.wait(40)
    assert job.outcome.end.reason == "interrupted" and job.outcome.end.stacks.dumps[1] == IN_JAX


# ---- SIGTERM and SIGHUP


@pytest.mark.parametrize("signum", TERMINATION)
def test_where_nobody_listens_to_sigterm_the_job_ends_once_its_ranks_have_said_where_they_are(simulate, signum):
    job = simulate(3).run().listen(1).handle(SignalHandlers(1, False, False)).wait(2)
    job.stacks = {1: IN_JAX}
    job.interrupt(signum).wait(1)
    assert job.kills() == [(2100, (0, 1, 2))] and not job.kills(signal.SIGTERM)
    assert job.outcome.end.stacks.dumps == {0: "", 1: IN_JAX, 2: ""} and not job.outcome.end.late_stacks
    assert job.outcome.end.reason == "interrupted" and job.outcome.end.signum == signum and job.outcome.end.unheard


@pytest.mark.parametrize("signum", TERMINATION)
def test_ranks_that_listen_get_sigterm_and_are_killed_after_the_grace(simulate, signum):
    job = simulate(3, grace=4.0).run().listen().interrupt(signum)
    assert job.kills(signal.SIGTERM) == [(0, (0, 1, 2))]
    name = signal.Signals(signum).name
    assert job.lines == [f"{name}: asked ranks 0-2 to end (SIGTERM); SIGKILL follows in 4 s, or at once with Ctrl-C"]
    job.wait(1).exit(-signal.SIGTERM, 1)
    job.wait(10)
    assert job.kills() == [(4100, (0, 2))]
    assert "ranks 0, 2 did not end within 4 s" in job.lines[1]
    assert job.outcome.end.reason == "interrupted" and job.outcome.end.signum == signum and not job.outcome.end.unheard
    assert [(end.status, end.killed_by_launcher) for end in job.outcome.workers] == [
        (-9, True),
        (-15, False),
        (-9, True),
    ]


# ---- handlers that begin by giving their signals back


def gives_back(job, *ranks):
    """The programs of these ranks handle neither SIGINT nor SIGTERM any more."""
    return job.handle(*(SignalHandlers(rank, False, False) for rank in ranks))


@pytest.mark.parametrize("signum", TERMINAL)
def test_a_rank_whose_handler_gives_its_signal_back_has_its_whole_grace(simulate, signum):
    handles = [SignalHandlers(rank, True, True, own_termination=True) for rank in range(2)]
    job = gives_back(simulate(2).run().handle(*handles).interrupt(signum).wait(0.1), 0, 1)
    job.done(1).wait(25)  # rank 0 still saves
    assert not job.kills() and len(job.killed) == 1
    job.done(0).exit(0, 1).exit(0, 0)
    assert job.outcome is not None and not job.kills()


def test_ranks_that_a_scheduler_has_signalled_a_moment_before_jaxrun_have_the_grace(simulate):
    job = gives_back(simulate(2).run().listen().wait(1), 0, 1).wait(0.1).interrupt(signal.SIGTERM).wait(25)
    assert not job.kills() and job.lines[0].startswith("SIGTERM: asked ranks 0-1 to end (SIGTERM)")


def test_programs_that_have_given_up_their_handlers_long_ago_do_not_listen(simulate):
    job = gives_back(simulate(2, job=60.0, save=20.0).run().listen().wait(1), 0, 1).wait(50)
    assert not job.killed, "SIGTERM before the time limit would end them, and nothing would be saved"


# ---- jaxrun stop --now

NOW = EndRequested("an order at its socket")


@pytest.mark.parametrize("asks", [lambda job: job.run().listen(), lambda job: polling(job)], ids=["SIGTERM", "polls"])
def test_stop_now_asks_the_ranks_and_says_so_and_kills_them_half_a_second_later(simulate, asks):
    job = asks(simulate(3, grace=60.0))
    job.stacks = {1: IN_JAX}
    job.handle(NOW)
    assert job.kills(signal.SIGTERM) == [(0, (0, 1, 2))] and job.kills() == []
    said = "an order at its socket: asked ranks 0-2 to end (SIGTERM); SIGKILL follows in 0.5 s, or at once with Ctrl-C"
    assert job.lines == [said]
    job.wait(0.2).exit(-signal.SIGTERM, 1).wait(1)
    assert job.kills() == [(500, (0, 2))] and job.outcome.end.stacks.dumps[1] == IN_JAX
    assert (job.outcome.end.reason, job.outcome.end.signum, job.outcome.end.text) == (
        "interrupted",
        signal.SIGHUP,
        NOW.reason,
    )


def test_a_program_that_polls_is_asked_by_stop_now_as_well(simulate):
    assert polling(simulate(3)).handle(NOW).ranks_sent(StopRequested) == [0, 1, 2]


def test_stop_now_says_that_nobody_listens_and_where_the_ranks_were(simulate):
    job = simulate(3).run()
    job.stacks = {1: IN_JAX}
    job.handle(NOW).wait(1)
    assert job.kills() == [(100, (0, 1, 2))] and not job.kills(signal.SIGTERM) and job.outcome.end.unheard
    assert job.lines == ["an order at its socket: no rank handles SIGTERM; stopping 3 ranks"]
    assert job.outcome.end.stacks.dumps[1] == IN_JAX and job.outcome.end.signum == signal.SIGHUP


@pytest.mark.parametrize("asked", [lambda job: polling(job), lambda job: job.run().listen()])
def test_stop_now_after_stop_ends_at_once_since_the_ranks_were_asked(simulate, asked):
    job = asked(simulate(3, grace=60.0)).interrupt(signal.SIGTERM).wait(1).handle(NOW).wait(1)
    assert job.kills() == [(1000, (0, 1, 2))] and job.outcome.end.reason == "interrupted"


@pytest.mark.parametrize("stage", ["spawn", "say_hello", "join"])
def test_before_the_program_runs_stop_now_ends_at_once(simulate, stage):
    job = getattr(simulate(2), stage)().handle(NOW).wait(1)
    assert job.kills()[0][0] == 0 and job.outcome.end.text == NOW.reason


# ---- SIGTERM to one rank, by something else than jaxrun

HEARD = (
    "not by jaxrun: JAX says so to a program that asks for it (should_stop, reached_preemption_sync_point); the job "
    "goes on"
)


def test_sigterm_to_one_rank_asks_all_ranks_that_poll_to_stop(simulate):
    job = polling(simulate(3)).handle(PreemptionNotice(0))
    assert job.ranks_sent(StopRequested) == [0, 1, 2] and not job.killed
    assert job.wait(1).lines == ["SIGTERM to one rank, not by jaxrun: asked ranks 0-2 to stop (should_stop)"]


@pytest.mark.parametrize(("listening", "more"), [((), "; to end the job, send SIGTERM to jaxrun"), ((0, 1, 2), "")])
def test_sigterm_to_one_rank_does_not_end_a_job_that_does_not_poll_until_it_does(simulate, listening, more):
    running = simulate(3).run()
    job = (running.listen(*listening) if listening else running).handle(PreemptionNotice(0)).wait(1)
    assert job.lines == [f"SIGTERM to one rank, {HEARD}{more}"] and job.outcome is None and not job.killed
    assert polling(job).ranks_sent(StopRequested) == [0, 1, 2]


@pytest.mark.parametrize(("got", "who"), [((1,), "rank 1 (h2)"), ((0, 1), "ranks 0-1 (h1, h2)")])
def test_the_rank_that_got_sigterm_is_named_where_its_stderr_tells(simulate, got, who):
    job = simulate(3, hosts={0: "h1", 1: "h2", 2: "h2"}).run().listen()
    job.identities = {rank: {"got_sigterm": True} for rank in got}
    assert job.handle(PreemptionNotice(0)).wait(1).lines == [f"SIGTERM to {who}, {HEARD}"]
    mute_job = mute(simulate(2).run().listen()).handle(PreemptionNotice(0)).wait(2)
    assert mute_job.lines == [f"SIGTERM to one rank, {HEARD}"]


@pytest.mark.parametrize("prepare", [lambda job: polling(job), lambda job: job.run().listen()])
def test_sigterm_that_jaxrun_has_sent_is_no_news(simulate, prepare):
    job = prepare(simulate(3)).interrupt(signal.SIGTERM)
    lines = list(job.lines)
    assert job.handle(PreemptionNotice(0)).lines == lines


# ---- the table: whom SIGTERM and SIGKILL reach at which millisecond, and how the job has ended, by which signal


def ctrl_c(job, *caught):
    """Ctrl-C, which raises KeyboardInterrupt in these ranks and ends their programs."""
    return interrupted(job.run().interrupt(signal.SIGINT), *caught)


def reached(job, *ranks):
    """KeyboardInterrupt is raised in these ranks, whose programs catch it."""
    return job.handle(*(Interrupted(rank, job.now) for rank in ranks))


def warned(job, *listening, signum=signal.SIGTERM):
    return job.run().listen(*listening).interrupt(signum)


def polling(job, *ranks):
    """The programs of these ranks, or of all, ask should_stop."""
    return job.run().handle(*(StopPolled(rank) for rank in ranks or range(job.size)))


def mute(job):
    job.answers = False
    return job


# What the job does until a signal comes, and whom SIGKILL reaches then.
AT_ONCE = {
    "nothing was started": (lambda job: job, [], "interrupted"),
    "ranks start": (lambda job: job.spawn(), [(0, (0, 1, 2))], "interrupted"),
    "ranks join": (lambda job: job.join(), [(0, (0, 1, 2))], "interrupted"),
    "the cause is looked for": (lambda job: failed(job.run(), 1).wait(0.01), [(10, (0, 1, 2))], "failed"),
    "exit handlers have their grace": (
        lambda job: failed(job.run(), 1).wait(1), [(30, (2,)), (1000, (0, 1))], "failed",
    ),
    "all is done": (lambda job: job.run().done(0, 1, 2), [(0, (0, 1, 2))], "ok"),
}  # fmt: skip
ENDS = {
    **{
        f"{signum.name} while {name}": (
            3, {}, lambda job, prepare=prepare, signum=signum: prepare(job).interrupt(signum), [], killed_at, reason,
            signum if reason == "interrupted" else 0,
        )
        for name, (prepare, killed_at, reason) in AT_ONCE.items()
        for signum in TERMINAL
    },
    **{
        f"{first.name} and then {second.name}": (
            2, {},
            lambda job, first=first, second=second: job.run().listen().interrupt(first).wait(0.3).interrupt(second),
            [] if first == signal.SIGINT else [(0, (0, 1))], [(300, (0, 1))], "interrupted", first,
        )
        for first in TERMINAL
        for second in TERMINAL
    },
    **{
        f"{first.name} that nobody handles, and then Ctrl-C before the ranks have said where they are": (
            2, {}, lambda job, first=first: job.run().interrupt(first).wait(0.05).interrupt(signal.SIGINT),
            [], [(50, (0, 1))], "interrupted", first,
        )
        for first in TERMINATION
    },
    **{
        f"{signum.name} that nobody handles, in a job whose agents do not answer": (
            2, {}, lambda job, signum=signum: mute(job.run()).interrupt(signum), [], [(1500, (0, 1))], "interrupted",
            signum,
        )
        for signum in TERMINATION
    },
    **{
        f"SIGTERM and then {second.name}, where should_stop is asked": (
            2, {}, lambda job, second=second: polling(job).interrupt(signal.SIGTERM).wait(0.3).interrupt(second),
            [], [(300, (0, 1))], "interrupted", signal.SIGTERM,
        )
        for second in TERMINAL
    },
    **{
        f"{signum.name} twice, as a wrapper sends it": (
            2, {},
            lambda job, signum=signum: reached(
                job.run().listen().interrupt(signum).wait(REPEATED_SIGNAL_S / 2).interrupt(signum), 0, 1
            ),
            [] if signum == signal.SIGINT else [(0, (0, 1))], [], "", 0,
        )
        for signum in TERMINAL
    },
    "SIGTERM twice, where should_stop is asked": (
        2, {},
        lambda job: polling(job).interrupt(signal.SIGTERM).wait(REPEATED_SIGNAL_S / 2).interrupt(signal.SIGTERM),
        [], [], "", 0,
    ),
    "SIGTERM, where one rank asks should_stop": (
        2, {"grace": 4.0}, lambda job: polling(job, 0).wait(1).interrupt(signal.SIGTERM),
        [(5000, (0, 1))], [(5100, (0, 1))], "interrupted", signal.SIGTERM,
    ),
    "a rank that cannot say where it is": (
        2, {}, lambda job: ctrl_c(mute(job), 0), [(5000, (1,))], [(6000, (1,)), (30_000, (0,))], "interrupted",
        signal.SIGINT,
    ),
    "handlers that go on for ever": (
        2, {}, lambda job: reached(ctrl_c(job), 0, 1), [(30_000, (0, 1))], [(30_100, (0, 1))], "interrupted",
        signal.SIGINT,
    ),
    "a program with its own handler of SIGINT": (
        2, {}, lambda job: interrupted(job.run().handle(SignalHandlers(1, True, False)).interrupt(signal.SIGINT), 0),
        [(30_000, (1,))], [(30_100, (1,)), (35_101, (0,))], "interrupted", signal.SIGINT,
    ),
    "rank 0 is late, without which JAX aborts the others": (
        3, {}, lambda job: interrupted(reached(ctrl_c(job), 1, 2).wait(10), 1, 2).exit(130, 1, 2),
        [(5000, (0,))], [(11_000, (0,))], "interrupted", signal.SIGINT,
    ),
    "rank 0 is late, and another that waits to leave later does not": (
        2, {}, lambda job: reached(ctrl_c(job), 1).wait(7).done(1),
        [(5000, (0,))], [(12_000, (0, 1))], "interrupted", signal.SIGINT,
    ),
    "another hangs in its exit handlers": (
        2, {}, lambda job: failed(warned(job).wait(1), 1),
        [(0, (0, 1)), (30_000, (0,))], [(35_100, (0, 1))], "interrupted", signal.SIGTERM,
    ),
    "where should_stop is asked, another waits to leave": (
        2, {}, lambda job: polling(job).interrupt(signal.SIGTERM).wait(1).done(1),
        [(30_000, (0,))], [(35_100, (0, 1))], "interrupted", signal.SIGTERM,
    ),
    "Ctrl-C and exits with 0": (2, {}, lambda job: ctrl_c(job).exit(0, 0, 1), [], [], "interrupted", signal.SIGINT),
    "SIGTERM, which has thirty seconds": (
        2, {}, warned, [(0, (0, 1)), (30_000, (0, 1))], [(30_100, (0, 1))], "interrupted", signal.SIGTERM,
    ),
    "the last that listens has ended": (
        3, {}, lambda job: warned(job, 0, 1).wait(1).done(0).wait(1).done(1),
        [(0, (0, 1, 2)), (7000, (2,))], [(7100, (2,)), (12_101, (0, 1))], "interrupted", signal.SIGTERM,
    ),
    "all end well": (
        2, {}, lambda job: warned(job).wait(1).done(0, 1).exit(0, 1).exit(0, 0), [(0, (0, 1))], [], "preempted",
        signal.SIGTERM,
    ),
    "a rank was done before": (
        3, {},
        lambda job: job.run().listen().done(1).interrupt(signal.SIGTERM).done(0, 2).exit(0, 1, 2).exit(0, 0),
        [(0, (0, 2))], [], "preempted", signal.SIGTERM,
    ),
    "SIGTERM and a status": (
        2, {}, lambda job: warned(job).exit(0, 0).exit(3, 1), [(0, (0, 1))], [], "interrupted", signal.SIGTERM,
    ),
    "death by SIGTERM": (
        2, {}, lambda job: warned(job).exit(0, 0).exit(-15, 1), [(0, (0, 1))], [], "interrupted", signal.SIGTERM,
    ),
    "a failure, which stops no others": (
        2, {}, lambda job: failed(warned(job), 1).exit(1, 1).wait(1).done(0).exit(0, 0),
        [(0, (0, 1))], [], "interrupted", signal.SIGTERM,
    ),
    "Slurm's warning of a job that goes on": (
        2, {"requeue": True}, lambda job: warned(job, 0, signum=signal.SIGUSR2).done(0, 1).exit(0, 1).exit(0, 0),
        [(0, (0, 1))], [], "preempted", signal.SIGUSR2,
    ),
    "a failure after the warning": (
        2, {"requeue": True}, lambda job: failed(warned(job, signum=signal.SIGUSR2), 0).done(1).exit(0, 1).exit(1, 0),
        [(0, (0, 1))], [], "interrupted", signal.SIGUSR2,
    ),
    **{
        f"{name} of a job that goes on and had to be killed": (
            2, {"requeue": True}, lambda job, signum=signum: job.run().interrupt(signum).wait(0.1).exit(-9, 0, 1),
            [], [(100, (0, 1))], "preempted", signum,
        )
        for name, signum in (("SIGTERM", signal.SIGTERM), ("SIGUSR2", signal.SIGUSR2))
    },
}  # fmt: skip


def _why_ended(job):
    match job.outcome and job.outcome.end:
        case None:
            return None
        case EndedBySignal(signum=signum) | Preempted(signal=EndedBySignal(signum=signum)) as end:
            return end.reason, signum
        case end:
            return end.reason, 0


@pytest.mark.parametrize(
    ("size", "options", "happen", "warned_at", "killed_at", "reason", "signum"), ENDS.values(), ids=ENDS
)
def test_a_job_that_is_asked_to_end_ends_in_time(simulate, size, options, happen, warned_at, killed_at, reason, signum):
    """A job without a reason goes on for now."""
    job = happen(simulate(size, **options)).wait(40 if reason else 1)
    assert (job.kills(signal.SIGTERM), job.kills()) == (warned_at, killed_at)
    assert _why_ended(job) == ((reason, signum) if reason else None)
    if reason == "failed":  # the others of the three were still there
        assert [end.killed_by_launcher for end in job.outcome.workers] == [True, False, True]


def test_those_that_wait_for_a_late_rank_0_are_told_to_leave_once(simulate):
    job = reached(ctrl_c(simulate(4)), 1, 2, 3).done(1, 2, 3).wait(6.5)
    assert job.ranks_sent(Exit) == [1, 2, 3]
    assert job.exit(0, 1).exit(0, 2, 3).wait(2).ranks_sent(Exit) == [1, 2, 3] and job.outcome is not None


# ---- the head's table of workers


def test_a_rank_that_had_finished_and_is_killed_later_ends_when_it_is_killed():
    table = WorkerTable({0: "h1", 1: "h1"})
    for rank in (0, 1):
        table.add_process(rank)
        table.add_done(rank, 5.0)
    table.add_exit(WorkerExited(0, 0), 50.0)
    table.add_exit(WorkerExited(1, -9), 60.0)
    assert [end.time for end in table.outcomes(70.0)] == [5.0, 60.0]
