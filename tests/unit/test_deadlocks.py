"""Each common deadlock is explained in one sentence; the samples are real, shortened."""

import pytest
from deadlock_samples import ENTRY, FUTEX, SAMPLES, dump, sample
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.helpers import Helpers
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.rank_state import Activity, find_rank_state
from jaxrun.analysis.verdict.deadlocks import explain_deadlock
from jaxrun.analysis.verdict.stack_text import describe_stacks
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.query_messages import ChildProcess

BY_IF = "every rank must make this call; is it under an `if` that only this rank enters?"


def findings(*names, places=None, hosts=None, helpers=None):
    """The findings if rank 0 does the first of these, and so on; "finished" is a rank that has no stack."""
    present = {rank: sample(name) for rank, name in enumerate(names) if name != "finished"}
    flights = {rank: Flight(sites=dict(enumerate((site,) for site in known))) for rank, known in (places or {}).items()}
    stacks = JobStacks(
        time=0.0,
        hosts=hosts or dict.fromkeys(range(len(names)), "h1"),
        dumps={rank: text for rank, (text, _) in present.items()},
        waits={rank: wait for rank, (_, wait) in present.items()},
        flights=flights,
        finished=tuple(rank for rank, name in enumerate(names) if name == "finished"),
        helpers=helpers,
    )
    return list(map(str, explain_deadlock(stacks)))


@pytest.mark.parametrize(("name", "expected"), [(name, item[2:]) for name, item in SAMPLES.items()], ids=SAMPLES)
def test_the_activity_of_a_rank_is_recognised(name, expected):
    seen = find_rank_state(0, *sample(name))
    assert (seen.activity, seen.call) == expected
    assert seen.place.startswith("train.py:")


def test_only_rank_0_has_a_stdin():
    assert find_rank_state(3, *sample("input() from a pipe")).activity is Activity.ELSEWHERE


def test_a_program_that_is_a_library_is_known_by_its_own_frames():
    text = dump(f"PY/threading.py 359 wait\nPY/queue.py 202 get\nSITE/maxtext/data.py 9 load\n{ENTRY}")
    assert (seen := find_rank_state(0, text, FUTEX)).activity is Activity.DATA and seen.place == "data.py:9 load"


def test_a_call_of_rank_0_alone():
    assert findings("process_allgather", "a loop", "a loop", "a loop") == [
        "only rank 0 waits in JAX (process_allgather at train.py:32 step); "
        f"ranks 1-3 are elsewhere (train.py:124 step): {BY_IF}"
    ]
    assert findings("process_allgather", "finished", "a loop", "time.sleep") == [
        "only rank 0 waits in JAX (process_allgather at train.py:32 step); "
        f"ranks 2-3 are elsewhere (train.py:124 step and train.py:78 step) and rank 1 has finished: {BY_IF}"
    ]


_IDLE = dump(f"SITE/jaxrun/protocol/gang_messages.py 9 read\nSITE/jaxrun_runtime/gang/calls.py 9 _receive\n{ENTRY}")


@pytest.mark.parametrize(
    ("raised", "idle", "said"),
    [
        ({2: "ValueError"}, "idle: it has raised ValueError, and waits", "rank 2 has raised ValueError, and ranks 0-1"),
        ({}, "idle: it has returned, and waits", "rank 2 has finished, and ranks 0-1"),
    ],
)
def test_a_rank_of_a_gang_that_has_raised_has_not_returned_early(raised, idle, said):
    waiting, kernel = sample("process_allgather")
    stacks = JobStacks(
        0.0, dict.fromkeys(range(3), "h1"), {0: waiting, 1: waiting, 2: _IDLE}, {0: kernel, 1: kernel}, raised=raised
    )
    text = " ".join(describe_stacks(stacks).split())
    assert idle in text and f"{said} wait for it in JAX (process_allgather at train.py:32 step)" in text
    assert ("return early" in text) is not bool(raised)


def test_a_barrier_that_the_others_never_reach():
    sync = "waits in a barrier (sync_global_devices at train.py:30 step)"
    order = "every rank must make the same calls in the same order"
    calls = ("a compiled call",) * 3
    assert findings("sync_global_devices", *calls) == [f"rank 0 {sync} and ranks 1-3 wait at train.py:23 step: {order}"]
    assert findings("sync_global_devices", "finished", "finished") == [
        f"only rank 0 {sync}; ranks 1-2 have finished: {BY_IF}"
    ]
    assert findings("an orbax save", "sync_global_devices") == [
        f"rank 0 waits in a barrier (sync_global_devices at train.py:38 step) and rank 1 {sync}: {order}"
    ]


def test_an_exit_while_others_wait():
    assert findings("a compiled call", "finished", "sync_global_devices", hosts={0: "h1", 1: "h2", 2: "h3"}) == [
        "rank 1 (h2) has finished, and ranks 0, 2 wait for it at train.py:23 step and train.py:30 step: "
        "every rank must take part in the same steps; does one of them have less data, or return early?"
    ]
    (text,) = findings("a compiled call", "its end", "a compiled call")
    assert text == (
        "rank 1 is at its end, but has threads that still run: data.py:75 loader, and "
        "ranks 0, 2 wait for it at train.py:23 step: end them, or make them daemons: Thread(daemon=True)"
    )


@pytest.mark.parametrize(
    ("name", "words"),
    {
        "pdb of 3.13": "waits at a debugger's prompt (pdb) at train.py:46 step, and ranks 1-2 wait for it in a barrier "
        "(sync_global_devices at train.py:30 step): continue it in jaxrun's terminal (c and Enter) "
        "or in the editor, or remove the breakpoint",
        "input() from a pipe": "waits for something to read, as in input(), at train.py:43 step, and ranks 1-2 wait",
        "grain": "waits for data (grain) at train.py:141 step (its other threads: data.py:139 __getitem__), and ranks",
        "an event": "waits for a lock or another of its threads (threading.wait) at train.py:70 step, and ranks 1-2",
        "stopped": "is stopped by a signal, and ranks 1-2 wait for it in a barrier (sync_global_devices at "
        "train.py:30 step): kill -CONT",
        "subprocess.run": "waits for a process that it started (subprocess.run) at train.py:91 step, and ranks 1-2",
        "time.sleep": "sleeps at train.py:78 step, and ranks 1-2 wait for it",
        "compiling": "is compiling at train.py:129 step, and ranks 1-2 wait for it in a barrier",
        "urllib": "waits for the network (urllib.urlopen) at train.py:105 step, and ranks 1-2 wait for it",
        "fcntl.flock": "waits for a file lock at train.py:116 step, and ranks 1-2 wait for it",
        "a loop": "is not in JAX but at train.py:124 step, and ranks 1-2 wait for it",
    }.items(),
)
def test_the_activity_of_a_rank_that_the_others_wait_for_is_explained(name, words):
    (text,) = findings(name, "sync_global_devices", "sync_global_devices")
    assert text.startswith(f"rank 0 {words}")


@pytest.mark.parametrize("name", ["a pool", "a multiprocessing child", "torch"])
def test_a_wait_for_children_names_the_way_out_if_they_are_forks(name):
    forks, spawned = ({0: Helpers((ChildProcess(9, is_fork=is_fork),))} for is_fork in (True, False))
    assert "use spawn or forkserver" in findings(name, "sync_global_devices", helpers=forks)[0]
    for other in ("a queue", "an event", "subprocess.run"):
        assert "forkserver" not in findings(other, "sync_global_devices", helpers=forks)[0]
    for helpers in (spawned, {}, None):
        assert "forkserver" not in findings(name, "sync_global_devices", helpers=helpers)[0]


def test_several_that_hold_the_others_up_are_put_in_the_plural():
    (text,) = findings("a compiled call", "a queue", "a queue")
    assert text.startswith("ranks 1-2 wait for data (queue.get) at train.py:54 step, and rank 0 waits for them at")


def test_the_most_telling_comes_first_and_two_are_enough():
    first, second = findings("a queue", "a compiled call", "stopped", "subprocess.run", "time.sleep")
    assert first.startswith("rank 2 is stopped by a signal, and rank 1 waits for it")
    assert second.startswith("rank 3 waits for a process") and "rank 1" not in second


def test_the_call_site_distinguishes_a_call_from_a_lock():
    """Both are the program's own line, asleep on a futex."""
    places = {0: ["train.py:23 step"], 1: ["train.py:23 step"], 2: ["train.py:99 step"]}
    (text,) = findings("a compiled call", "a compiled call", "a compiled call", places=places)
    assert text == (
        "rank 2 is asleep where it has made no cross-process call before, at train.py:23 step, and "
        "ranks 0-1 wait for it in JAX (train.py:23 step): does it wait for a lock, or for an earlier call?"
    )
    assert findings("a compiled call", "a compiled call", "a compiled call") == []


def test_ranks_in_different_calls():
    places = {0: ["train.py:23 step"]}
    assert findings("a compiled call", "process_allgather", places=places) == [
        "rank 0 waits in JAX (train.py:23 step) and rank 1 waits in JAX (process_allgather at train.py:32 step): "
        "every rank must make the same calls in the same order"
    ]
    assert findings("a compiled call", "process_allgather") == [], "the first may wait for a lock as well"


@pytest.mark.parametrize(
    "names",
    [
        ("a compiled call", "a compiled call"),
        ("sync_global_devices", "sync_global_devices"),
        ("a loop", "a loop"),
        ("a loop", "a queue"),
        ("time.sleep", "time.sleep"),
        ("sync_global_devices", "silence"),
        ("finished", "finished"),
        ("finished", "a loop"),
        (),
    ],
    ids=" and ".join,
)
def test_without_certainty_nothing_is_reported(names):
    assert findings(*names) == []


def test_a_call_that_all_ranks_wait_in_is_reported_without_a_culprit():
    assert findings("a queue", "a queue")[0].startswith("ranks 0-1 wait for data (queue.get) at train.py:54 step: has")
    assert findings("compiling", "compiling")[0].startswith("ranks 0-1 are compiling at train.py:129 step: it will")
    assert findings("pdb of 3.13", "a loop")[0].startswith("rank 0 waits at a debugger's prompt")


@pytest.mark.parametrize(
    ("platform", "group", "others", "needed"),
    [
        ("gpu", "0-2", ("a compiled call", "a compiled call"), "ranks 1-2"),
        ("gpu", "0-2", ("compiling", "a compiled call"), "rank 2"),
        ("gpu", "0-2", ("compiling", "finished"), "rank 2"),
        ("gpu", "0-1", ("compiling", "a compiled call"), ""),
        ("gpu", "0-2", ("compiling", "compiling"), ""),
        ("gpu", "", ("a compiled call", "a compiled call"), ""),
        ("cpu", "0-2", ("a compiled call", "a compiled call"), ""),
    ],
)
def test_a_compilation_goes_on_by_itself_unless_gpus_compile_together_and_some_ranks_do_not(
    platform, group, others, needed
):
    names = ("compiling", *others)
    flights = {
        rank: Flight(compiling=("jit(f)", 1.0), compiling_ranks=group)
        for rank, name in enumerate(names)
        if name == "compiling"
    }
    stacks = JobStacks(
        time=0.0,
        hosts=dict.fromkeys(range(3), "h1"),
        dumps={rank: sample(name)[0] for rank, name in enumerate(names) if name != "finished"},
        waits={rank: sample(name)[1] for rank, name in enumerate(names) if name != "finished"},
        flights=flights,
        finished=tuple(rank for rank, name in enumerate(names) if name == "finished"),
        platform=platform,
    )
    text = str(explain_deadlock(stacks)[0])
    waits = f"step, which on several GPUs waits for the ranks that do not compile ({needed})"
    assert (waits in text, "it will finish by itself" in text) == (bool(needed), not needed)
    unknown = str(explain_deadlock(replace(stacks, flights={}))[0])
    assert "it will finish by itself" not in unknown or platform == "cpu"


@given(st.lists(st.sampled_from([*SAMPLES, "stopped", "silence", "its end", "finished"]), max_size=6))
def test_no_scene_is_too_much(names):
    texts = findings(*names)
    assert len(texts) <= 2 and all(text.startswith(("rank", "only rank")) for text in texts)
