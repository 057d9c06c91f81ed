"""Errors that nobody has seen when a job hangs: exceptions that are being handled, failed saves; and waits in JAX."""

import sys

import pytest
from deadlock_samples import FUTEX, SYNC, dump
from msgspec.structs import replace
from outcomes import HOSTS, RUN_AT, decide, end, failed, weigh, where
from unseen_error_samples import BAD, JAX, LIBRARY, PROGRAM, noted, sentences, stacks

from jaxrun.analysis.diagnosis.helpers import helpers_of
from jaxrun.analysis.diagnosis.job_end import EarlyExit, EndedBySignal, Stalled, TimedOut
from jaxrun.analysis.diagnosis.rank_state import Activity, find_rank_state
from jaxrun.analysis.diagnosis.stacks import is_waiting_in_jax
from jaxrun.analysis.diagnosis.wait_graph import wait_graph_of
from jaxrun.analysis.verdict.stack_text import describe_stacks, find_place, format_stall_notice
from jaxrun.protocol.error_chain import (
    BackgroundSave,
    ChainedError,
    CoordinationWait,
    ThreadNotes,
)
from jaxrun.protocol.query_messages import RankReply
from jaxrun.protocol.worker_messages import ThreadFailed

OURS = "SITE/jaxrun_runtime/coordination_waits.py 52 wait_at_barrier"
AT_SYNC = f"{SYNC}\nJOB/train.py 30 step"
CLOSES = f"{OURS}\nJOB/train.py 5 close\nJOB/train.py 20 main"
SAVES = """
    PY/threading.py 1092 join
    SITE/orbax/checkpoint/checkpoint_manager.py 155 join
    SITE/orbax/checkpoint/checkpoint_manager.py 1500 save
    JOB/train.py 28 main"""
COMMITS = f"""{OURS}
    SITE/orbax/checkpoint/_src/multihost/multihost.py 309 _fn
    SITE/orbax/checkpoint/_src/checkpointers/async_checkpointer.py 239 _thread_func
    PY/threading.py 1012 _bootstrap"""
FULL = ChainedError("OSError", "[Errno 28] No space left", ((LIBRARY, 9, "write"),))
CLOSE = CoordinationWait("wait_at_barrier", "close")
HERE = "train.py:5 close"
IN_SYNC = "in a barrier (sync_global_devices at train.py:30 step)"
ADVICE = ": this error came first; code that runs after an error must not wait for other ranks"


IN_BARRIER = noted(AT_SYNC)
HANDLES = noted(CLOSES, main=ThreadNotes((BAD,), CLOSE))


def test_an_exception_that_is_handled_while_its_rank_waits_is_the_cause():
    cause = (
        "rank 1 handles ValueError: bad record in shard 1 (data.py:31 load) and waits in JAX's barrier 'close' "
        f"at {HERE}, and ranks 0, 2 wait for it {IN_SYNC}"
    )
    assert sentences(IN_BARRIER, HANDLES, IN_BARRIER) == [cause + ADVICE]
    seen = stacks(IN_BARRIER, HANDLES, IN_BARRIER)
    assert cause in format_stall_notice(seen, 30.0, None)
    assert "bad record in shard 1" in describe_stacks(seen)
    assert wait_graph_of(seen).unseen_errors.keys() == {1}


def test_the_verdict_on_a_stall_names_the_rank_and_its_exception():
    dumps = {0: IN_BARRIER, 1: HANDLES, 2: IN_BARRIER, 3: IN_BARRIER}
    ends = [end(rank, 9.0, -9, killed_by_launcher=True) for rank in HOSTS]
    verdict = decide(ends, Stalled(where(dumps, FUTEX)))
    assert verdict.culprits == (1,) and verdict.outcome == "stall"
    assert "allows: rank 1 (h0) handles ValueError: bad record in shard 1 (data.py:31 load) and" in verdict.headline
    assert verdict.traceback == (
        'Traceback (most recent call last):\n  File "/job/data.py", line 31, in load\nValueError: bad record in shard 1'
    )
    without = decide(ends, Stalled(where(dict.fromkeys(dumps, IN_BARRIER), FUTEX)))
    assert not without.culprits and "ValueError" not in without.headline
    late = decide(ends, TimedOut(where(dumps, FUTEX)))
    assert late.headline.endswith("10 s, after rank 1 (h0) had raised ValueError: bad record in shard 1.")


@pytest.mark.parametrize(
    ("frames", "does"),
    [
        ("JOB/train.py 9 retry", "waits at train.py:9 retry"),
        ("PY/queue.py 202 get\nJOB/train.py 9 retry", "waits for data at train.py:9 retry"),
    ],
)
def test_a_rank_that_does_something_else_meanwhile_is_described_as_well(frames, does):
    assert sentences(IN_BARRIER, noted(frames, main=ThreadNotes((BAD,)))) == [
        f"rank 1 handles ValueError: bad record in shard 1 (data.py:31 load) and {does}, "
        f"and rank 0 waits for it {IN_SYNC}{ADVICE}"
    ]


def test_of_a_chain_the_cause_is_named():
    chosen = ChainedError("RuntimeError", "no shard", ((PROGRAM, 40, "load"),))
    replaced = ChainedError("KeyError", "'x'", ((PROGRAM, 39, "load"),), is_replaced=True)
    (sentence,) = sentences(IN_BARRIER, noted(CLOSES, main=ThreadNotes((replaced, chosen, FULL), CLOSE)))
    assert "handles RuntimeError: no shard (data.py:40 load), caused by KeyError: 'x' and waits" in sentence


@pytest.mark.parametrize(
    "error",
    [
        ChainedError("Empty", "", ((PROGRAM, 3, "poll"),)),
        ChainedError("ModuleNotFoundError", "No module named 'x'", ((PROGRAM, 3, "main"),)),
        ChainedError("KeyError", "'x'", ((LIBRARY, 3, "get"), (LIBRARY, 9, "find"))),
        ChainedError("ValueError", "no", ((JAX, 3, "get"),)),
        ChainedError("ValueError", "no"),
    ],
    ids=lambda error: error.error,
)
def test_ordinary_results_are_no_errors(error):
    routine = noted(AT_SYNC, main=ThreadNotes((error,)))
    assert not find_rank_state(0, routine, FUTEX).errors
    after = noted(AT_SYNC, main=ThreadNotes((error, BAD)))
    assert [found.choice.chosen for found in find_rank_state(0, after, FUTEX).errors] == [BAD]


def test_an_exception_that_all_ranks_handle_explains_no_difference_between_them():
    other = noted("JOB/train.py 9 retry", main=ThreadNotes((BAD,), CoordinationWait("wait_at_barrier", "retry")))
    first, second = sentences(HANDLES, other)
    assert first.startswith("rank 0 waits in JAX's barrier 'close' at train.py:5 close and rank 1 waits in JAX's")
    assert second.startswith("rank 0 handles ValueError")
    alike = sentences(HANDLES, HANDLES)
    assert alike == [
        "ranks 0-1 handle ValueError: bad record in shard 1 (data.py:31 load) and wait in JAX's barrier 'close' "
        f"at {HERE}{ADVICE}"
    ]
    assert not wait_graph_of(stacks(HANDLES, HANDLES)).unseen_errors


WAITS = [
    (CLOSE, Activity.BARRIER, "in JAX's barrier 'close' at train.py:5 close"),
    (CoordinationWait("wait_at_barrier"), Activity.BARRIER, "in a barrier of JAX's coordination service at"),
    (
        CoordinationWait("blocking_key_value_get", "a/3"),
        Activity.KEY,
        "for the key 'a/3' of JAX's coordination service",
    ),
    (CoordinationWait("blocking_key_value_get_bytes", "k"), Activity.KEY, "for the key 'k' of JAX's coordination"),
    (CoordinationWait("get_live_nodes"), Activity.BARRIER, "in JAX's live_devices at train.py:5 close"),
]


@pytest.mark.parametrize(("wait", "activity", "words"), WAITS, ids=[wait.function for wait, _, _ in WAITS])
def test_a_wait_in_the_coordination_service_is_known_with_its_name(wait, activity, words):
    text = noted(CLOSES, main=ThreadNotes((), wait))
    state = find_rank_state(1, text, "ep_poll")
    assert (state.activity, state.wait, state.place) == (activity, wait, HERE) and state.sleeps_in_jax
    assert is_waiting_in_jax(text, "ep_poll")
    (sentence,) = sentences(IN_BARRIER, text)
    assert f"rank 1 waits {words}" in sentence and f"rank 0 waits {IN_SYNC}" in sentence


def test_ranks_at_one_line_in_different_barriers_are_apart():
    first, second = (noted(CLOSES, main=ThreadNotes((), CoordinationWait("wait_at_barrier", name))) for name in "ab")
    (sentence,) = sentences(first, second)
    assert sentence.startswith(f"rank 0 waits in JAX's barrier 'a' at {HERE} and rank 1 waits in JAX's barrier 'b'")
    assert sentences(first, first) == []


def test_the_fault_handlers_dump_shows_the_wait_without_its_name():
    assert find_rank_state(1, dump(CLOSES), FUTEX).activity is Activity.BARRIER
    of_key = dump(CLOSES.replace("wait_at_barrier", "blocking_key_value_get"))
    assert find_rank_state(1, of_key, FUTEX).activity is Activity.KEY


SAVE_WAIT = CoordinationWait("wait_at_barrier", "async_write_complete.1")
WAITS_FOR_SAVE = noted(SAVES, threads=[("async_save", COMMITS, ThreadNotes((), SAVE_WAIT))])
OF_RANK_0 = "JAX's barrier 'async_write_complete.1' (orbax.save at train.py:28 main, in its thread async_save)"


def test_a_background_save_that_fails_in_its_thread_is_the_cause():
    main = ThreadNotes(save=BackgroundSave(1))
    failing = noted(SAVES, main=main, threads=[("save_finalize", COMMITS, ThreadNotes((FULL,), CLOSE))])
    (sentence,) = sentences(WAITS_FOR_SAVE, failing)
    assert sentence == (
        "rank 1's background save of step 1 failed with OSError: [Errno 28] No space left (a.py:9 write); its thread "
        f"save_finalize waits in JAX's barrier 'close', and rank 0 waits for it in {OF_RANK_0}: the program gets this "
        "error at its next call of the checkpointer"
    )


def test_an_error_that_orbax_keeps_is_the_cause_after_its_thread_has_ended():
    kept = ThreadFailed(1, RUN_AT, "async_save", "OSError", "", chain=(FULL,), save=BackgroundSave(None))
    lost = ThreadFailed(0, RUN_AT, "Loader", "ValueError", "")
    helpers = helpers_of({0: RankReply(0), 1: RankReply(1)}, {0: [lost], 1: [kept]}, {})
    assert [one.name for one in helpers[0].lost_threads] == ["Loader"] and not helpers[1].any_dead
    (sentence,) = sentences(WAITS_FOR_SAVE, IN_BARRIER, helpers=helpers)
    assert sentence.startswith(
        "rank 1's background save failed with OSError: [Errno 28] No space left (a.py:9 write), "
    )
    assert f"and rank 0 waits for it in {OF_RANK_0}" in sentence


def test_another_threads_exception_is_the_threads():
    loader = ("Loader", "JOB/data.py 40 retry\nPY/threading.py 1012 _bootstrap", ThreadNotes((BAD,)))
    (sentence,) = sentences(IN_BARRIER, noted("JOB/train.py 30 step", threads=[loader]))
    assert sentence.startswith(
        "rank 1's thread Loader handles ValueError: bad record in shard 1 (data.py:31 load) and is"
    )


LOST = (
    "F1128 client.h:86] Terminating process because the JAX distributed service detected fatal errors. absl::Status: "
    "UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task was preempted/died/restarted"
)


def test_a_lost_coordinator_is_called_that():
    ends = [end(rank, 1.0 + rank / 100, -6, stderr_tail=LOST) for rank in HOSTS]
    verdict = weigh(*ends)
    assert verdict.headline == (
        "every rank lost its connection to JAX's coordinator, which is in rank 0, 1.0 s into the run; JAX then ended "
        "them, and no rank reported a cause of its own."
    )
    assert "--max-restarts" in verdict.advice and "although all processes may be alive" in verdict.means
    only = weigh(
        *[end(rank, 2.0, -9, killed_by_launcher=True) for rank in (0, 1, 3)], end(2, 1.0, -6, stderr_tail=LOST)
    )
    assert only.headline.startswith("rank 2 of 4 on h1 lost its connection to JAX's coordinator, which is in rank 0")
    # Its own end is the cause, where rank 0 was killed.
    assert weigh(end(0, 1.1, -9), *ends[1:]).culprits == (0,)


def test_the_table_shows_the_barrier():
    from jaxrun.analysis.diagnosis.stacks import main_stack

    assert find_place(main_stack(HANDLES)).format().startswith("train.py:5 close")
    assert "JAX: wait_at_barrier 'close'" in find_place(main_stack(HANDLES)).format()


def test_calls_of_the_coordination_service_are_noted_while_they_last():
    from fakes import fake_module

    from jaxrun_runtime import coordination_waits

    seen = []

    class Client:
        def wait_at_barrier(self, barrier_id, timeout_in_ms, process_ids=None):
            seen.extend(coordination_waits.current_waits().values())
            if timeout_in_ms == 0:
                raise TimeoutError(barrier_id)
            return self.blocking_key_value_get(key=barrier_id + "/key", timeout_in_ms=timeout_in_ms), process_ids

        def blocking_key_value_get(self, key, timeout_in_ms):
            seen.extend(coordination_waits.current_waits().values())
            return key

    module = fake_module("jaxlib._jax", DistributedRuntimeClient=Client)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jaxlib._jax", module)
        coordination_waits.watch()
    assert Client().wait_at_barrier("close", 9, [1]) == ("close/key", [1])
    with pytest.raises(TimeoutError, match="close"):
        Client().wait_at_barrier(barrier_id="close", timeout_in_ms=0)
    assert seen == [CLOSE, CoordinationWait("blocking_key_value_get", "close/key"), CLOSE]
    assert Client.wait_at_barrier.__code__.co_name == "wait_at_barrier"
    assert not coordination_waits.current_waits() and not hasattr(Client, "get_live_nodes")


def test_the_rank_that_handles_an_error_is_to_blame_where_the_others_have_finished():
    ends = [end(rank, 5.0, finished=True) for rank in (0, 2, 3)]
    ends.insert(1, end(1, 9.0, -9, killed_by_launcher=True))
    verdict = decide(ends, EarlyExit(where({1: HANDLES}, FUTEX)))
    assert verdict.culprits == (1,) and verdict.victims == dict.fromkeys((0, 2, 3), "had finished")
    assert verdict.headline.endswith("never come, after rank 1 (h0) had raised ValueError: bad record in shard 1.")
    assert "rank 1 (h0) handles ValueError: bad record in shard 1" in verdict.details[0]
    blameless = decide(ends, EarlyExit(where({1: noted(CLOSES, main=ThreadNotes((), CLOSE))})))
    assert blameless.culprits == (0, 2, 3) and "raised" not in blameless.headline


def test_a_rank_that_a_signal_does_not_end_is_described_with_what_it_handles():
    ends = [end(rank, 5.0, 0) for rank in (0, 2, 3)]
    ends.insert(1, end(1, 9.0, -9, killed_by_launcher=True))
    by_signal = ChainedError("KeyboardInterrupt", "", ((PROGRAM, 9, "load"),))
    text = noted(CLOSES, main=ThreadNotes((BAD, by_signal), CLOSE))
    verdict = decide(ends, EndedBySignal(2, late_stacks={1: text}, late_waits={1: FUTEX}))
    handled = "while it handled ValueError: bad record in shard 1 (data.py:31 load)"
    assert f"in JAX: wait_at_barrier 'close', {handled}), and was killed" in verdict.headline
    alone = noted(CLOSES, main=ThreadNotes((by_signal,), CLOSE))
    assert "handled" not in decide(ends, EndedBySignal(2, stacks=where({1: alone}, FUTEX))).headline


SIGNALS = {
    "nobody handles SIGTERM": ({"signum": 15, "unheard": True}, "no rank listens to SIGTERM, so 4 ranks were killed"),
    "a second Ctrl-C": ({"signum": 2}, "4 ranks were killed"),
    "late after Ctrl-C": (
        {"signum": 2, "late_stacks": dict.fromkeys(HOSTS, HANDLES)},
        "4 ranks did not end in time (st",
    ),
}


@pytest.mark.parametrize(("known", "did"), SIGNALS.values(), ids=SIGNALS)
def test_a_hang_that_a_signal_ends_is_explained_by_the_exception_that_a_rank_handled(known, did):
    interrupt = ChainedError("KeyboardInterrupt", "", ((PROGRAM, 9, "load"),))
    ends = [end(rank, 9.0, -9, killed_by_launcher=True) for rank in HOSTS]
    others = dict.fromkeys((0, 2, 3), noted(AT_SYNC, main=ThreadNotes((interrupt,))))
    dumps = {**others, 1: noted(CLOSES, main=ThreadNotes((BAD, interrupt), CLOSE))}
    verdict = decide(ends, EndedBySignal(**known, stacks=where(dumps, FUTEX)))
    assert (verdict.outcome, verdict.culprits) == ("interrupted", (1,)) and did in verdict.headline
    assert " into the run, while rank 1 (h0) handled ValueError: bad record in shard 1; " in verdict.headline
    assert verdict.headline.count("ValueError") == 1 and verdict.traceback.endswith("ValueError: bad record in shard 1")
    assert verdict.details == (
        "rank 1 (h0) handles ValueError: bad record in shard 1 (data.py:31 load) and waits in JAX's barrier 'close' "
        f"at {HERE}, and ranks 0, 2-3 wait for it {IN_SYNC}{ADVICE}",
    )
    healthy = decide(ends, EndedBySignal(**known, stacks=where(others, FUTEX)))
    assert not healthy.culprits and not healthy.details
    busy = {**dumps, 3: dump("JOB/train.py 30 load")}
    working = decide(ends, EndedBySignal(**known, stacks=where(busy, "0")))
    assert not working.culprits and "while rank 1 (h0) handled ValueError" in working.headline


def test_a_rank_that_fails_at_the_signal_is_not_told_twice_where_its_stack_came_a_moment_later():
    """Its stack shows the handler that raises; another rank that hangs with an error is told all the same."""
    full = failed(1, "No space left on device", error="OSError")
    ends = [end(0, 9.0, 0, finished=True), end(1, 9.0, 1, failure=full)]
    ends += [end(rank, 9.0, -9, killed_by_launcher=True) for rank in (2, 3)]
    handler = noted("JOB/train.py 6 on_term", main=ThreadNotes((FULL,)))
    verdict = decide(ends, EndedBySignal(15, stacks=where({1: handler}, "0")))
    assert verdict.headline.startswith("rank 1 of 4 on h0 raised OSError while it ended") and not verdict.details
    dumps = {1: handler, 2: IN_BARRIER, 3: HANDLES}
    verdict = decide(ends, EndedBySignal(15, stacks=where(dumps, FUTEX)))
    assert len(verdict.details) == 1 and "handles ValueError: bad record in shard 1" in verdict.details[0]


def test_the_error_of_a_failed_save_is_named_where_a_signal_ends_the_hang():
    ends = [end(rank, 9.0, -9, killed_by_launcher=True) for rank in HOSTS]
    kept = ThreadFailed(1, RUN_AT, "async_save", "OSError", "", chain=(FULL,), save=BackgroundSave(1))
    helpers = helpers_of({1: RankReply(1)}, {1: [kept]}, {})
    dumps = {0: WAITS_FOR_SAVE, 1: IN_BARRIER, 2: WAITS_FOR_SAVE, 3: WAITS_FOR_SAVE}
    verdict = decide(ends, EndedBySignal(15, stacks=where(dumps, helpers=helpers), unheard=True))
    after = "after rank 1 (h0)'s background save of step 1 had failed with OSError: [Errno 28] No space left"
    assert verdict.culprits == (1,) and f" into the run, {after}; no rank" in verdict.headline
    (told,) = verdict.details
    assert told.startswith(
        "rank 1 (h0)'s background save of step 1 failed with OSError: [Errno 28] No space left (a.py:9"
    )


def test_a_thread_that_died_is_named_once_with_its_message_and_line():
    ends = [end(rank, 9.0, -9, killed_by_launcher=True) for rank in HOSTS]
    dead = ThreadFailed(1, RUN_AT, "Loader", "ValueError", "ValueError: bad", chain=(BAD,))
    ends[1] = replace(ends[1], thread_failures=(dead,))
    helpers = helpers_of({1: RankReply(1)}, {1: [dead]}, {})
    waits = {0: IN_BARRIER, 1: dump("PY/queue.py 202 get\nJOB/train.py 9 load"), 2: IN_BARRIER, 3: IN_BARRIER}
    stacks = where(waits, helpers=helpers)
    for why in (Stalled(stacks), TimedOut(stacks), EndedBySignal(15, stacks=stacks, unheard=True)):
        verdict = decide(ends, why)
        text = " ".join(" ".join([verdict.headline, *verdict.details]).split())
        assert "its thread Loader ended with ValueError: bad record in shard 1 (data.py:31 load), and ranks" in text
        assert text.count("Loader") == 1
    told = decide(ends, EndedBySignal(15, unheard=True))
    loader = "Loader (ValueError: bad record in shard 1 at data.py:31 load)"
    assert told.details == (f"rank 1 had lost a thread to an exception before: {loader}.",)


def test_what_an_interrupt_ended_is_named_by_what_the_rank_reports():
    """Its stack may come too late: the interrupt is quicker."""
    interrupt = ChainedError("KeyboardInterrupt", "", ((PROGRAM, 9, "close"),))

    def ended(*errors, saves=()):
        ends = [end(rank, 9.0, 130, failure=failed(rank, "", error="KeyboardInterrupt")) for rank in HOSTS]
        failure = replace(ends[2].failure, chain=(*errors, interrupt))
        ends[2] = replace(ends[2], failure=failure, thread_failures=saves)
        return decide(ends, EndedBySignal(2))

    verdict = ended(BAD)
    assert " into the run, while rank 2 (h1) handled ValueError: bad record in shard 1; all ranks" in verdict.headline
    assert (verdict.exit_code, verdict.culprits) == (130, ()) and "line 31, in load" in verdict.traceback
    kept = ThreadFailed(2, RUN_AT, "async_save", "OSError", "", chain=(FULL,), save=BackgroundSave(1))
    assert "rank 2 (h1)'s background save of step 1 had failed with OSError" in ended(saves=(kept,)).headline
    routine = ChainedError("Empty", "", ((PROGRAM, 3, "poll"),))
    assert "rank 2" not in ended(routine).headline and not ended().traceback
