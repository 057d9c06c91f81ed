"""The verdict: which rank caused the end, its text, and the exit code."""

import signal

import pytest
from outcomes import ABORT, GLOO, HOSTS, NOW, RUN_AT, START, culprit_ranks, end, failed, raised, stopped, thread, weigh

from jaxrun.analysis.diagnosis.helpers import LostPoolWorker
from jaxrun.analysis.diagnosis.job_end import RankFailed
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.diagnosis.root_cause import Culpability, culpability, is_certain
from jaxrun.analysis.verdict.decide import decide

# ---- the culprit


GLOO_IN_LOG = f"ValueError: {GLOO}\n"
ASKED_TO_LEAVE = failed(0, "", error="SystemExit", status=3)
FINE = [
    end(0, 1.0, 0, finished=True),
    end(1, 1.0),
    end(2, 2.0, -signal.SIGKILL, finished=True, killed_by_launcher=True),
]
INNOCENT_THREAD = (thread(2, f"ValueError: {GLOO}"),)
CULPRITS = {
    "an exception after a broken connection": ([raised(0, 9.9, GLOO), raised(2, 10.0), *stopped(1, 3)], (2,)),
    "SIGKILL after one": ([raised(0, 9.9, GLOO), end(1, 10.0, -signal.SIGKILL), *stopped(2, 3)], (1,)),
    "SIGSEGV after one": ([raised(0, 9.9, GLOO), end(1, 10.0, -signal.SIGSEGV), *stopped(2, 3)], (1,)),
    "SIGTERM after one": ([raised(0, 9.9, GLOO), end(1, 10.0, -signal.SIGTERM), *stopped(2, 3)], (1,)),
    "a status after one": ([raised(0, 9.9, GLOO), end(1, 10.0, 7), *stopped(2, 3)], (1,)),
    "the earliest of two": ([raised(0, 5.0, "late"), raised(3, 4.0, "early"), *stopped(1, 2)], (3,)),
    "the lower rank of two at once": ([raised(3, 4.0, "a"), raised(1, 4.0, "b"), *stopped(0, 2)], (1,)),
    "all that failed alike": ([raised(rank, 5.0 - rank) for rank in range(4)], (0, 1, 2, 3)),
    "those that failed alike": ([raised(1, 4.0), raised(2, 4.5, "another"), raised(3, 5.0), *stopped(0)], (1, 3)),
    "not an abort that JAX explains": (
        [end(0, 9.0, -signal.SIGABRT, stderr_tail=ABORT), end(2, 9.5, -signal.SIGABRT), *stopped(1, 3)],
        (2,),
    ),
    "not who leaves for a broken connection": (
        [end(0, 9.0, 3, failure=ASKED_TO_LEAVE, stderr_tail=f"giving up: {GLOO}\n"), end(1, 10.0, 7)],
        (1,),
    ),
    "not who exits for one": ([end(0, 9.0, 5, stderr_tail=GLOO_IN_LOG), end(1, 10.0, 7)], (1,)),
    "not who was stopped": ([end(0, 9.0, -signal.SIGKILL, killed_by_launcher=True), end(1, 10.0, 7)], (1,)),
    "a kill from outside, whatever the log says": (
        [end(0, 9.0, -signal.SIGKILL, stderr_tail=ABORT), raised(1, 8.0, GLOO)],
        (0,),
    ),
    "status 0 before the end, rather than a consequence": ([raised(0, 8.0, GLOO), end(1, 9.0, 0)], (1,)),
    "an exception, rather than status 0 before the end": ([raised(0, 9.5), end(1, 9.0, 0)], (0,)),
    "a broken connection of whom a thread had died": (
        [raised(0, 9.0, GLOO), raised(2, 9.5, GLOO, thread_failures=(thread(2),)), *stopped(1, 3)],
        (2,),
    ),
    "not if the thread had died of the same": (
        [raised(0, 9.0, GLOO), raised(2, 9.5, GLOO, thread_failures=INNOCENT_THREAD)],
        (0,),
    ),
    "none of those that have finished or still run": (FINE, ()),
    "who has a consequence, rather than those": ([*FINE, raised(3, 9.0, GLOO)], (3,)),
}


@pytest.mark.parametrize(("ends", "culprits"), CULPRITS.values(), ids=CULPRITS)
def test_who_is_blamed(ends, culprits):
    assert culprit_ranks(ends) == culprits


def test_an_exception_or_a_death_without_a_report_is_certain_and_an_abort_is_not():
    assert culpability(raised(0, 9.9, GLOO)) is Culpability.CONSEQUENCE
    assert culpability(raised(2, 10.0)) is not Culpability.CONSEQUENCE
    assert is_certain([raised(0, 9.9, GLOO), end(1, 10.0, -signal.SIGKILL), *stopped(2, 3)])
    assert not is_certain([end(0, 9.0, -signal.SIGABRT, stderr_tail=ABORT), end(2, 9.5, -signal.SIGABRT)])


# ---- the text


def test_an_exception_is_reported_with_rank_host_and_time():
    verdict = weigh(raised(2, 10.25), *stopped(0, 1, 3))
    assert verdict.headline == "rank 2 of 4 on h1 raised ValueError 10.2 s into the run."
    assert verdict.traceback.endswith("ValueError: bad record")
    assert (verdict.outcome, verdict.exit_code, verdict.culprits, verdict.log) == ("failed", 1, (2,), "rank-0002.err")
    assert verdict.victims == dict.fromkeys((0, 1, 3), "was stopped")
    assert (verdict.startup, verdict.run, verdict.stopping) == (2.0, 10.25, 0.25)


KINDS = {
    "SIGKILL": (end(1, 1, -9), "was killed by SIGKILL (9) 1.0 s into the run.", 137, "killed"),
    "SIGSEGV": (end(1, 1, -11), "crashed with SIGSEGV (11) 1.0 s into the run.", 139, "killed"),
    "SIGABRT": (end(1, 1, -6), "was aborted by SIGABRT (6) 1.0 s into the run.", 134, "killed"),
    "memory": (
        end(1, 1, -9, out_of_memory="the kernel says so"),
        "1.0 s into the run; the kernel says so.",
        137,
        "killed",
    ),
    "a status": (
        end(1, 1, 7),
        "exited with status 7 without an exception (os._exit?), 1.0 s into the run.",
        7,
        "exited",
    ),
    "status 0": (end(1, 1, 0), "exited with status 0 before the end of its program (os._exit?), ", 1, "early-exit"),
    "after its program": (
        end(1, 1, -11, finished=True),
        "crashed with SIGSEGV (11) after its program had ended, 1.0 s",
        139,
        "killed",
    ),
    "sys.exit": (raised(1, 1, "", error="SystemExit", status=3), "ended with status 3 (sys.exit) 1.0 s", 3, "exited"),
    "sys.exit with words": (
        raised(1, 1, "no data", error="SystemExit"),
        "ended with status 1: sys.exit('no data')",
        1,
        "exited",
    ),
    "joining": (
        raised(1, 1, stage="join"),
        "raised ValueError, while joining the others, 3.0 s after the start.",
        69,
        "failed",
    ),
}


@pytest.mark.parametrize(("culprit", "headline", "code", "outcome"), KINDS.values(), ids=KINDS)
def test_each_kind_of_end_has_its_text_and_its_code(culprit, headline, code, outcome):
    verdict = weigh(culprit, *stopped(0, 2, 3))
    assert verdict.headline.startswith("rank 1 of 4 on h0 ")
    assert headline in verdict.headline
    assert (verdict.exit_code, verdict.outcome) == (code, outcome)


def test_a_failure_before_the_run_is_counted_from_the_start():
    verdict = weigh(end(1, -1.0, 1), *stopped(0, 2, 3), run_at=None)
    assert verdict.headline.endswith("before the program's first line, 1.0 s after the start.")
    assert (verdict.startup, verdict.run) == (None, None)


def test_the_same_error_of_all_is_shown_once():
    verdict = weigh(*(raised(rank, 5.0) for rank in range(4)))
    assert verdict.intro == "4 of 4 ranks raised the same error; rank 0 (h0)'s traceback:"
    assert verdict.headline == "4 of 4 ranks raised ValueError 5.0 s into the run."
    assert verdict.victims == {}
    killed = weigh(end(0, 1, -9), end(3, 2, -9), *stopped(1, 2))
    assert killed.headline.startswith("2 of 4 ranks (0, 3) were killed by SIGKILL (9) 1.0 s")


def test_a_death_without_a_failure_report_is_explained_by_a_thread_that_died_before():
    verdict = weigh(end(1, 5.0, -signal.SIGSEGV, thread_failures=(thread(1),)), *stopped(0, 2, 3))
    assert verdict.intro == "last words of thread Loader-1 of rank 1 (h0):"
    assert verdict.traceback == thread(1).traceback.rstrip()
    assert "crashed with SIGSEGV (11), after its thread Loader-1 had raised KeyError, 5.0 s" in verdict.headline
    assert verdict.details == ()


def test_a_thread_that_died_elsewhere_is_mentioned():
    verdict = weigh(
        raised(1, 5.0), end(2, 9.0, -9, killed_by_launcher=True, thread_failures=(thread(2),)), *stopped(0, 3)
    )
    assert verdict.details == ("rank 2 had lost a thread to an exception before: Loader-1 (KeyError).",)


def test_a_broken_executor_is_explained_by_the_worker_that_died():
    lost = (LostPoolWorker(RUN_AT, 1, 41), LostPoolWorker(RUN_AT + 4, -9, 42))
    broken = raised(1, 5.0, "A process in the process pool was …", error="BrokenProcessPool", lost_pool_workers=lost)
    verdict = weigh(broken, *stopped(0, 2, 3))
    assert (
        "raised BrokenProcessPool, as a worker of its pool (process 42) was killed by SIGKILL (9), " in verdict.headline
    )
    other = weigh(raised(1, 5.0, lost_pool_workers=lost), *stopped(0, 2, 3))
    assert "pool" not in other.headline


def test_a_crash_shows_the_stack_of_the_fault_handler():
    fatal = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1f (most recent call first):\n"
    fatal += '  File "train.py", line 9 in step\n'
    verdict = weigh(end(1, 5.0, -signal.SIGSEGV, crash_dump=fatal), *stopped(0, 2, 3))
    assert verdict.intro == "rank 1 (h0) was here when it ended:"
    assert verdict.traceback.endswith('  File "train.py", line 9, in step')


def test_a_death_without_any_report_shows_the_end_of_stderr():
    tail = "".join(f"line {n}\n" for n in range(50)) + ABORT.splitlines()[1] + "\nterminate called\n"
    verdict = weigh(end(1, 5.0, -signal.SIGABRT, stderr_tail=tail), *stopped(0, 2, 3))
    assert verdict.intro == "the last lines that rank 1 (h0) wrote to stderr:"
    assert verdict.traceback.endswith("  line 49\n  terminate called")
    assert len(verdict.traceback.splitlines()) == 12
    assert weigh(end(1, 5.0, -signal.SIGKILL, stderr_tail=tail), *stopped(0, 2, 3)).traceback == ""


@pytest.mark.parametrize(("uses_mpi", "call"), [(True, "(MPI_Abort, or os._exit?)"), (False, "(os._exit?)")])
def test_a_status_without_an_exception_is_mpi_abort_where_the_program_uses_mpi(uses_mpi, call):
    outcome = JobOutcome(RankFailed(), HOSTS, (end(1, 5.0, 5), *stopped(0, 2, 3)), run_at=RUN_AT, uses_mpi=uses_mpi)
    verdict = decide(outcome, started=START, ended=NOW)
    assert f"exited with status 5 without an exception {call}, 5.0 s" in verdict.headline


@pytest.mark.parametrize(("message", "shown"), [("", "  ValueError: bad record"), ("no data", "")])
def test_an_exit_without_a_message_shows_the_end_of_stderr(message, shown):
    exits = failed(1, message, error="SystemExit", status=1)
    verdict = weigh(end(1, 5.0, 1, failure=exits, stderr_tail="ValueError: bad record\n"), *stopped(0, 2, 3))
    assert verdict.traceback == shown
    assert verdict.intro == ("the last lines that rank 1 (h0) wrote to stderr:" if shown else "")


def test_a_verdict_that_knows_only_consequences_says_so():
    verdict = weigh(*(raised(rank, 9.0 - rank, GLOO) for rank in range(4)))
    assert verdict.culprits == (3,) and verdict.exit_code == 1
    assert verdict.headline == (
        "every rank saw a broken connection; none reported a cause of its own; "
        "the first was rank 3 of 4 on h1: it lost its connection, 6.0 s into the run."
    )
    assert verdict.intro == "rank 3's traceback:"
    some = weigh(raised(1, 9.0, GLOO), *stopped(0, 2, 3))
    assert some.headline.startswith("rank 1 of 4 on h0 saw a broken connection; none reported a cause of its own; it")


@pytest.mark.parametrize(
    "limit",
    [
        "Gloo context initialization failed: DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:gloo/0,2/1",
        "Gloo AllGather failed: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        "INTERNAL: GetKeyValue() timed out with key: gpu:0,1 and duration: 10m",
    ],
)
def test_a_limit_of_jax_on_waiting_names_who_had_not_come_and_speaks_of_no_broken_connection(limit):
    verdict = weigh(raised(0, 5.0, limit), raised(2, 5.1, limit), *stopped(1, 3))
    assert verdict.headline == (
        "2 of 4 ranks (0, 2) waited for ranks 1, 3, which had not come when JAX gave up, "
        "5.0 s into the run; no connection was broken."
    )
    assert verdict.victims == {1: "was stopped", 2: "waited in vain", 3: "was stopped"}
    all_wait = weigh(*(raised(rank, 5.0, limit) for rank in range(4)))
    assert all_wait.headline.startswith("every rank waited for others, which had not come when JAX gave up")


# ---- what it means


LOOPBACK = "UNKNOWN: Gloo context initialization failed: timed out connecting: refused, remote=[127.0.1.1]:40357"


def test_a_known_error_is_explained_and_kept_as_it_is():
    message = "Fetching value for `jax.Array` that spans non-addressable (non process local) devices is not possible."
    verdict = weigh(raised(2, 5.0, message, error="RuntimeError"), *stopped(0, 1))
    assert verdict.traceback.endswith(f"RuntimeError: {message}")
    assert ("other processes" in verdict.means, "allgather" in verdict.advice, verdict.link[:8]) == (
        True,
        True,
        "https://",
    )
    assert weigh(raised(2, 5.0), *stopped(0, 1)).means == ""


def test_a_broken_connection_is_explained_only_where_it_is_that_of_a_network_between_hosts():
    assert weigh(*(raised(rank, 9.0, f"{GLOO}: can't start new thread") for rank in range(4))).means == ""
    ends = [raised(0, 9.0, LOOPBACK), *stopped(1)]
    assert "127.0.1.1" in weigh(*ends, hosts={0: "h1", 1: "h2"}).means
    assert weigh(*ends, hosts={0: "h1", 1: "h1"}).means == ""


def test_kinds_of_victims_are_distinguished():
    verdict = weigh(
        raised(1, 5.0),
        raised(0, 5.1, GLOO),
        raised(2, 5.2, "of another kind", error="KeyError"),
        end(3, 4.0, 0, finished=True),
    )
    assert verdict.victims == {0: "lost its connection", 2: "raised KeyError at train.py:88", 3: "had finished"}
