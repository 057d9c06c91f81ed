"""Gangs that lose a rank, fall out of step or time out: what is reported, and that the next call has a healthy gang."""

from __future__ import annotations

import os
import select
import signal
import sys
import time

import psutil
import pytest

import jaxrun


@pytest.fixture(scope="module")
def lasting():
    with jaxrun.Gang(processes=3) as made:
        yield made


def rank():
    import jax

    return jax.process_index()


def meet():
    """A call that needs all ranks."""
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(jnp.ones(2)).shape


def alone(who, do, *args):
    """One rank does this, and the others meet it in vain."""
    if rank() == who:
        do(*args)
    meet()


def rebuilt(gang, capsys, reason):
    """The next call has other processes, and the reason is printed."""
    before = {worker.pid for worker in gang.workers}
    capsys.readouterr()
    assert gang.run(meet) == ((3, 2),) * 3
    shown = capsys.readouterr().err
    assert shown.startswith("jaxrun: gang of 3: started anew, what its ranks knew is lost: ") and reason in shown
    assert shown.count("\n") == 1 and gang.healthy
    assert not before & {worker.pid for worker in gang.workers}


def kill_myself(number):
    os.kill(os.getpid(), number)


DEATHS = {
    "killed": ((kill_myself, signal.SIGKILL), 137, signal.SIGKILL, "SIGKILL (9)"),
    "crashed": ((kill_myself, signal.SIGSEGV), 139, signal.SIGSEGV, "SIGSEGV (11)"),
    "aborted": ((os.abort,), 134, signal.SIGABRT, "SIGABRT (6)"),
    "left": ((os._exit, 7), 7, None, "7"),
    "left as if all were well": ((os._exit, 0), 1, None, "rank 1 of this gang ended"),
}


@pytest.mark.jax_version
@pytest.mark.parametrize(
    ("how", "status", "number", "words"),
    [
        pytest.param(*DEATHS[how], id=how, marks=pytest.mark.extended if how in ("crashed", "aborted", "left") else [])
        for how in DEATHS
    ],
)
def test_a_rank_that_dies_is_named(lasting, capsys, how, status, number, words):
    host = lasting.workers[1].host
    with pytest.raises(jaxrun.WorkerDied, match="rank 1 of ") as caught:
        lasting.run(alone, 1, *how)
    error = caught.value
    assert (error.rank, error.ranks, error.host, error.signal) == (1, (1,), host, number)
    assert words in str(error)
    assert error.status == error.exit_code == status
    rebuilt(lasting, capsys, "rank")


def test_a_rank_that_raises_before_another_dies_is_the_cause(lasting, capsys):
    """The error of the one is not lost over the death of the other."""

    def both():
        if rank() == 0:
            raise KeyError("first")
        time.sleep(0.2)
        if rank() == 1:
            os._exit(9)
        meet()

    with pytest.raises(jaxrun.WorkerDied, match="rank 1") as caught:
        lasting.run(both)
    assert isinstance(caught.value.__cause__, KeyError) and caught.value.__cause__.rank == 0
    rebuilt(lasting, capsys, "rank")


def test_a_rank_that_is_killed_between_two_calls(lasting, capsys):
    process = os.pidfd_open(lasting.workers[2].pid)
    lasting.kill(2)
    assert select.select([process], [], [], 30)[0]
    os.close(process)
    rebuilt(lasting, capsys, "between two calls, rank 2 of 3 was killed by SIGKILL (9), as its gang asked")


@pytest.mark.jax_version
def test_a_timeout_says_where_each_rank_is(lasting, capsys):
    with pytest.raises(jaxrun.CallTimeout, match=r"ranks 0-2 did not return within 0\.5 s") as caught:
        lasting.run(alone, 1, time.sleep, 60, timeout=0.5)
    error = caught.value
    assert isinstance(error, TimeoutError) and error.missing == (0, 1, 2)
    assert "test_gang_faults.py" in str(error) and "process_allgather" in str(error) and "alone" in str(error)
    rebuilt(lasting, capsys, "did not come back from the last call")


def test_a_call_that_can_be_interrupted_leaves_the_gang_as_it_was(lasting):
    before = [worker.pid for worker in lasting.workers]
    with pytest.raises(jaxrun.CallTimeout, match=r"rank 1 did not return within 0\.2 s") as caught:
        lasting.run(lambda: time.sleep(60 * (rank() == 1)), timeout=0.2)
    assert caught.value.missing == (1,)
    assert lasting.healthy and lasting.run(rank) == (0, 1, 2)
    assert [worker.pid for worker in lasting.workers] == before


def test_a_rank_that_is_stopped_is_reported_as_stopped(lasting, capsys):
    lasting.pause(1)
    assert psutil.Process(lasting.workers[1].pid).status() == psutil.STATUS_STOPPED
    with pytest.raises(jaxrun.CallTimeout, match="rank 1 is stopped by a signal"):
        lasting.run(meet, timeout=1)
    rebuilt(lasting, capsys, "did not come back")


@pytest.mark.jax_version
def test_an_error_before_a_collective_call_names_the_waiting_ranks(lasting, capsys):
    with pytest.raises(KeyError, match="bad") as caught:
        lasting.run(alone, 1, {}.__getitem__, "bad")
    (note,) = caught.value.__notes__
    assert caught.value.rank == 1
    assert note.startswith("ranks 0, 2 did not return: ") and "process_allgather" in note
    rebuilt(lasting, capsys, "ranks 0, 2 did not come back from the last call")


def only_rank_0_computes():
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(jax.make_mesh((3,), ("x",)), PartitionSpec("x"))
    whole = jax.make_array_from_callback((3,), sharding, lambda index: np.ones(3, np.float32)[index])
    if rank() == 0:
        jax.jit(lambda x: x + 1)(whole)  # needs no other rank to end, and they have not made it


@pytest.mark.jax_version
def test_ranks_that_are_out_of_step_are_not_used_again(lasting, capsys):
    lasting.run(only_rank_0_computes)
    rebuilt(lasting, capsys, "are out of step, having made different numbers of cross-process calls")


@pytest.mark.jax_version
def test_without_lockstep_records_a_gang_out_of_step_goes_unnoticed(lasting):
    with jaxrun.Gang(processes=3, lockstep="off") as gang:
        gang.run(only_rank_0_computes)
        assert gang.healthy


def meet_for_ever():
    from jaxrun_runtime.gang import calls

    calls.current_call().send("meeting")
    while True:
        meet()


def test_a_connection_that_breaks_is_not_used_again(lasting, capsys):
    with pytest.raises((ExceptionGroup, ValueError, RuntimeError, jaxrun.GangError)) as caught:
        with lasting.start_call(meet_for_ever) as call:
            assert [call.receive().value for _ in range(3)] == ["meeting"] * 3
            lasting.cut(1)
            call.results(30)
    if isinstance(caught.value, jaxrun.WorkerDied):  # JAX's own service has noticed it first
        assert "rank 1 of 3 was cut off from the network, as its gang asked" in str(caught.value)
    else:
        assert all("Gloo" in str(error) for error in getattr(caught.value, "exceptions", [caught.value]))
    rebuilt(lasting, capsys, "rank")


def test_a_gang_that_was_stopped_starts_at_the_next_call(lasting):
    lasting.stop()
    assert not lasting.healthy
    with pytest.raises(jaxrun.GangError, match="this gang of 3 is stopped; its next call starts it anew"):
        lasting.workers  # noqa: B018
    assert lasting.run(rank) == (0, 1, 2) and lasting.processes == 3


@pytest.mark.parametrize(
    ("kind", "who", "text"),
    [("maim", 0, "a fault is one of kill, pause, cut, not 'maim'"), ("kill", 3, "0 to 2, so 3 is none")],
)
def test_an_impossible_fault_is_refused(lasting, kind, who, text):
    with pytest.raises(jaxrun.errors.UsageError, match=text):
        lasting.fault(kind, who)


def nap():
    from jaxrun_runtime.gang import calls

    calls.current_call().send("asleep")
    time.sleep(60)


@pytest.mark.jax_version
def test_stacks_say_where_each_rank_is(lasting):
    assert "idle" in lasting.stacks()
    with lasting.start_call(nap) as call:
        assert [call.receive().value for _ in range(3)] == ["asleep"] * 3
        assert "test_gang_faults.py" in (shown := lasting.stacks()) and " nap" in shown
        assert "in nap" in lasting.stacks(full=True)


def test_a_restart_forgets(lasting):
    def mark():
        sys.marked = True

    lasting.run(mark)
    before = {worker.pid for worker in lasting.workers}
    lasting.restart()
    assert lasting.run(lambda: hasattr(sys, "marked")) == (False,) * 3
    assert not before & {worker.pid for worker in lasting.workers}


# ---- what cannot be started

NO_STARTS = {
    "no such option": (dict(processes=2, options=["--no-such"]), 2, "there is no option --no-such"),
    "no such device": (dict(processes=2, platform="cuda"), 2, "none is visible"),
    "no such backend": (dict(processes=2, backend="pigeon"), 2, "pigeon"),
    "more hosts than processes": (dict(processes=2, hosts=3), 2, "3"),
}


@pytest.mark.parametrize(("asked", "code", "words"), NO_STARTS.values(), ids=NO_STARTS)
def test_a_gang_that_does_not_start_raises_its_launchers_output(asked, code, words):
    with pytest.raises(jaxrun.GangStartError, match="the gang did not start:\n") as caught:
        jaxrun.Gang(**asked)
    assert caught.value.exit_code == code and words in str(caught.value)


def test_an_impossible_size_is_refused_at_once():
    with pytest.raises(jaxrun.errors.UsageError, match="processes of a gang must be a whole number from 1, not 0"):
        jaxrun.Gang(processes=0)


def test_a_gang_that_is_closed_is_closed():
    gang = jaxrun.Gang(processes=1)
    directory = gang.run_dir
    gang.close()
    gang.close()
    assert not gang.healthy and not directory.exists()
    assert "is closed" in gang.stacks()
    for attempt in (lambda: gang.run(rank), lambda: gang.workers, gang.restart):
        with pytest.raises(jaxrun.GangError, match="this gang of 1 is closed; make another"):
            attempt()
