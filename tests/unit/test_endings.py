"""A rank whose program does not end, and one that waits for data of what has ended: what is told of them."""

import functools
import math
import sys

import pytest
from deadlock_samples import FUTEX, RUN_ALL, SAMPLES, SYNC, dump, sample

from jaxrun.analysis.diagnosis.helpers import Helpers, LostPoolWorker, LostThread
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.rank_state import Activity, find_rank_state
from jaxrun.analysis.diagnosis.stacks import main_stack
from jaxrun.analysis.verdict.deadlocks import explain_deadlock
from jaxrun.analysis.verdict.stack_text import find_place
from jaxrun.protocol.error_chain import ChainedError
from jaxrun.protocol.query_messages import ChildProcess
from jaxrun.stack_frames import EXIT_HANDLER
from jaxrun_runtime import exit_handlers

KILLED, FAILED, LIVES = ChildProcess(42, status=-9), ChildProcess(43, status=1), ChildProcess(44, "sleep 1000")


def explain(*ranks, helpers=None, finished=()):
    """What is said of ranks whose dumps these are."""
    hosts = dict.fromkeys(range(len(ranks)), "h1")
    dumps, waits = dict(enumerate(ranks)), dict.fromkeys(range(len(ranks)), FUTEX)
    stacks = JobStacks(0.0, hosts, dumps, waits, finished=finished, helpers=helpers or {})
    return list(map(str, explain_deadlock(stacks)))


# ---- at the end of the program

HANDLERS = "SITE/jaxrun_runtime/shutdown.py 80 _run_exit_handlers\nSITE/jaxrun_runtime/shutdown.py 36 exit_with_success"
IN_MP = "PY/multiprocessing/util.py 360 _exit_function"
# The frames of a rank at its end, as they were seen; what is said of it, and its place in the table.
ENDS = {
    "an exit handler": (
        f"JOB/train.py 5 flush\n{HANDLERS}",
        "is still in its exit handler train.py:5 flush: what does",
        "in the exit handler train.py:5 flush",
    ),
    "an exit handler of a library": (
        f"PY/threading.py 359 wait\nSITE/wandb/run.py 9 finish\n{HANDLERS}",
        "is still in its exit handler run.py:9 finish: what does",
        "in the exit handler run.py:9 finish",
    ),
    "a child": (
        f"PY/multiprocessing/popen_fork.py 28 poll\nPY/multiprocessing/process.py 149 join\n{IN_MP}\n{HANDLERS}",
        "waits for child processes that it started: process 44 (sleep 1000): end them",
        "waits for its child processes",
    ),
    "a queue": (
        f"PY/threading.py 1094 join\nPY/multiprocessing/queues.py 214 _finalize_join\n{IN_MP}\n{HANDLERS}",
        "waits for the thread of a multiprocessing.Queue, whose data no process takes: read it",
        "waits for the thread of a multiprocessing.Queue",
    ),
    "a finalizer": (
        "JOB/train.py 7 __del__\nSITE/jaxrun_runtime/shutdown.py 90 _finalize_program",
        "is still in the finalizer of an object, train.py:7 __del__: what does",
        "in a finalizer, train.py:7 __del__",
    ),
    "MPI": (
        "SITE/jaxrun_runtime/shutdown.py 99 _finalize_mpi",
        "waits in MPI_Finalize: every rank must",
        "in MPI_Finalize",
    ),
}


@pytest.mark.parametrize(("frames", "said", "place"), ENDS.values(), ids=ENDS)
def test_the_frame_that_does_not_end_is_shown_without_jaxruns_own_frames(frames, said, place):
    text = dump(frames)
    (told,) = explain(text, helpers={0: Helpers((LIVES,))})
    assert told.startswith(f"rank 0 is at its end, but {said}")
    assert find_place(main_stack(text)).format() == f"the end of the program, {place}"
    assert not main_stack(text).is_in_jax(), "that others have ended is no reason why it does not"


def test_several_ranks_at_their_end_and_one_that_others_wait_for():
    text = dump(ENDS["an exit handler"][0])
    assert explain(text, text)[0].startswith(
        "ranks 0-1 are at their end, but are still in their exit handler train.py:5"
    )
    (told,) = explain(text, dump(f"{SYNC}{RUN_ALL}"))
    assert "train.py:5 flush, and rank 1 waits for it in a barrier (sync_global_devices at" in told


def test_the_threads_that_python_waits_for_are_named_and_daemons_are_not():
    ending = dump("PY/threading.py 1540 _shutdown\nSITE/jaxrun_runtime/shutdown.py 66 _join_threads")
    threads = [
        dump(f"JOB/data.py {line} loader\nPY/threading.py 992 run").replace(" (most", f" [{name}] (most")
        for line, name in ((75, "Loader-1 (work)"), (80, "Watcher, daemon"))
    ]
    assert explain("\n".join([*threads, ending])) == [
        "rank 0 is at its end, but has threads that still run: Loader-1 (work) at data.py:75 loader: "
        "end them, or make them daemons: Thread(daemon=True)"
    ]


def test_a_handler_that_calls_jax_waits_there_like_any_other_call():
    text = dump(f"{SYNC}\nJOB/train.py 30 step\n{HANDLERS}")
    assert find_rank_state(0, text, FUTEX).activity is Activity.BARRIER and main_stack(text).is_in_jax()


# ---- exit handlers that are no Python code


@pytest.fixture
def registered(monkeypatch):
    """What has been registered with the original functions."""
    calls = []
    monkeypatch.setattr(exit_handlers, "_register", lambda func, *args, **kwargs: calls.append((func, args, kwargs)))
    monkeypatch.setattr(
        exit_handlers, "_unregister", lambda func: calls.__setitem__(slice(None), [c for c in calls if c[0] != func])
    )
    monkeypatch.setattr(exit_handlers, "_wrapped", [])
    return calls


@pytest.mark.parametrize("native", [math.floor, functools.partial(math.floor)], ids=["itself", "partial"])
def test_a_handler_of_c_has_a_frame_with_its_name_and_is_called_as_it_was_registered(registered, native):
    class Number:
        def __floor__(self):
            self.frame = sys._getframe(1)
            return 7

    assert exit_handlers.register(native, number := Number()) is native
    ((call, args, kwargs),) = registered
    call(*args, **kwargs)
    assert (number.frame.f_code.co_filename, number.frame.f_code.co_name) == (EXIT_HANDLER, "math.floor")
    exit_handlers.unregister(native)
    assert registered == []


def test_python_functions_and_what_cannot_be_called_are_registered_as_they_are(registered):
    class Handler:
        def __call__(self): ...

        def method(self): ...

    handlers = [explain, Handler(), Handler().method, functools.partial(explain, 1), Handler, 3]
    assert [exit_handlers.register(handler, 1, a=2) for handler in handlers] == [None] * 6
    assert registered == [(handler, (1,), {"a": 2}) for handler in handlers]
    exit_handlers.unregister(explain)
    assert len(registered) == 5


def test_the_frame_of_a_handler_of_c_is_shown_as_the_function():
    text = dump(f"JOB/x.py 1 time.sleep\n{HANDLERS}").replace("/job/x.py", EXIT_HANDLER)
    assert explain(text)[0].startswith("rank 0 is at its end, but is still in its exit handler time.sleep: what does")


# ---- data of what has ended

QUEUE = sample("a queue")[0]
BARRIER = dump(f"{SYNC}{RUN_ALL}")
WAITS = "rank 0 waits for data (queue.get) at train.py:54 step"
RAISED = ChainedError("ValueError", "bad record", (("/job/data.py", 31, "load"),))
LOST = Helpers(lost_threads=(LostThread("Loader", "ValueError"),))


@pytest.mark.parametrize(
    ("helpers", "said"),
    {
        "a thread": (LOST, "its thread Loader ended with ValueError"),
        "a thread, and its exception": (
            Helpers(lost_threads=(LostThread("Loader", "ValueError", (RAISED,)),)),
            "its thread Loader ended with ValueError: bad record (data.py:31 load)",
        ),
        "a killed child": (Helpers((KILLED,)), "its child process 42 was killed by SIGKILL (9)"),
        "a failed child": (Helpers((FAILED, LIVES)), "its child process 43 exited with status 1"),
        "several": (
            Helpers((KILLED, ChildProcess(45, status=-9)), LOST.lost_threads),
            "its thread Loader ended with ValueError and its child processes 42, 45 were killed by SIGKILL (9)",
        ),
        "nothing": (Helpers(), "it has no other Python thread and no child process"),
    }.values(),
)
def test_a_rank_that_waits_for_data_is_reported_with_the_thread_or_process_that_ended(helpers, said):
    (told,) = explain(QUEUE, BARRIER, helpers={0: helpers})
    assert told.startswith(f"{WAITS}, but {said}, and rank 1 waits for it in a barrier")
    assert told.endswith("?" if said.startswith("it has no") else ": if it produced the data, no more will come")
    assert explain(QUEUE, helpers={0: helpers})[0].startswith(f"{WAITS}, but {said}: ")


def test_ranks_that_have_lost_alike_are_one_group():
    helpers = {0: Helpers((KILLED,)), 1: Helpers((ChildProcess(99, status=-9),))}
    (told,) = explain(QUEUE, QUEUE, BARRIER, helpers=helpers)
    assert "ranks 0-1 wait for data" in told and "but their child processes 42, 99 were killed by SIGKILL (9)" in told


LOST_WORKERS = Helpers((LIVES,), lost_workers=(LostPoolWorker(60.0, 1, 6), LostPoolWorker(91.0, -9, 7)))


def test_a_rank_that_waits_for_a_pool_is_reported_with_the_worker_that_was_killed():
    dumps, hosts = {0: sample("a pool")[0], 1: BARRIER}, {0: "h1", 1: "h1"}
    stacks = JobStacks(100.0, hosts, dumps, dict.fromkeys(hosts, FUTEX), helpers={0: LOST_WORKERS})
    (told,) = map(str, explain_deadlock(stacks))
    assert (
        "but a worker of its pool (process 7) was killed by SIGKILL (9) 9 s ago, and rank 1 waits for it in a barrier"
        in told
    )
    assert ": multiprocessing.Pool never answers for its task; " in told and "lock" not in told


def test_the_workers_of_a_pool_do_not_matter_to_a_rank_that_waits_for_another_thing():
    for name in ("a queue", "an event", "time.sleep"):
        assert "pool" not in explain(sample(name)[0], BARRIER, helpers={0: LOST_WORKERS})[0]


def test_where_something_lives_that_may_bring_the_data_nothing_is_said_of_it():
    assert "but" not in explain(QUEUE, BARRIER, helpers={0: Helpers((LIVES,))})[0]
    thread = "JOB/data.py 75 loader\nPY/threading.py 992 run\nPY/threading.py 1012 _bootstrap"
    busy = dump(f"{SAMPLES['a queue'][0]}{RUN_ALL}", thread)
    assert "but" not in explain(busy, BARRIER)[0]
    pool = sample("a pool")[0]
    assert "no child" not in explain(pool, BARRIER)[0], "its threads are of C, as far as is known"


def test_what_has_ended_does_not_matter_to_a_rank_that_waits_for_something_else():
    assert "SIGKILL" not in explain(sample("time.sleep")[0], BARRIER, helpers={0: Helpers((KILLED,))})[0]
