"""Gangs that lose a rank, fall out of step or time out: what is reported, and that the next call has a healthy gang."""

from __future__ import annotations

import os
import select
import signal
import time

import psutil
import pytest
from harness import kill, wait_until_dead

import jaxrun
from jaxrun.frontends.gang.call_events import RankMessage, Returned
from jaxrun.frontends.gang.gang_job import check_start
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.frontends.notebook import completion
from jaxrun.frontends.notebook.completion import complete_name


@pytest.fixture(scope="module")
def lasting():
    with pytest.MonkeyPatch.context() as patch, jaxrun.Gang(processes=2) as made:
        for name in ("call._VERDICT_TIMEOUT_S", "gang_job._SHUTDOWN_TIMEOUT_S"):
            patch.setattr(f"jaxrun.frontends.gang.{name}", 60.0)  # for the launcher to say who died, however slow it is
        yield made


def rank():
    import jax

    return jax.process_index()


def meet():
    """A call that needs all ranks."""
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(jnp.ones(2)).shape


def send(value):
    from jaxrun_runtime.gang import calls

    calls.current_call().send(value)


def rebuilt(gang, capsys, reason):
    """The next call has other processes, and the reason is printed."""
    before = {worker.pid for worker in gang.workers}
    capsys.readouterr()
    assert gang.run(meet) == ((2, 2),) * 2
    shown = capsys.readouterr().err
    assert shown.startswith("jaxrun: gang of 2: started again; its ranks' state is lost: ") and reason in shown
    assert shown.count("\n") == 1 and gang.healthy
    assert not before & {worker.pid for worker in gang.workers}


def kill_myself(number):
    os.kill(os.getpid(), number)


def rank_1_dies(how, *args):
    """The other one meets it in vain."""
    if rank() == 1:
        how(*args)
    meet()


DEATHS = {
    "killed": ((kill_myself, signal.SIGKILL), 137, signal.SIGKILL, "SIGKILL (9)"),
    "left as if all were well": ((os._exit, 0), 0, None, "rank 1 of this gang ended with os._exit(0) (exit status 0"),
}


@pytest.mark.extended
@pytest.mark.jax_version
@pytest.mark.parametrize(("how", "status", "number", "words"), DEATHS.values(), ids=DEATHS)
def test_a_rank_that_dies_is_named(lasting, capsys, how, status, number, words):
    host = lasting.workers[1].host
    with pytest.raises(jaxrun.WorkerDied, match="rank 1 of ") as caught:
        lasting.run(rank_1_dies, *how)
    error = caught.value
    assert (error.rank, error.ranks, error.host, error.signal) == (1, (1,), host, number)
    assert words in str(error)
    assert (error.status, error.exit_code) == (status, status or 1)
    rebuilt(lasting, capsys, "rank")


@pytest.mark.extended
def test_ranks_that_all_exit_with_0_without_reporting_are_named(lasting, capsys):
    with pytest.raises(jaxrun.WorkerDied, match=r"^all 2 ranks of this gang ended with os\._exit\(0\)") as caught:
        lasting.run(os._exit, 0)
    assert (caught.value.ranks, caught.value.exit_code) == ((0, 1), 1)
    rebuilt(lasting, capsys, "ended")


def test_a_rank_that_is_killed_between_two_calls(lasting, capsys):
    process = os.pidfd_open(lasting.workers[1].pid)
    lasting.kill(1)
    assert select.select([process], [], [], 60)[0]
    os.close(process)
    rebuilt(lasting, capsys, "between two calls, rank 1 of 2 was killed by SIGKILL (9), as its gang asked")


def test_a_launcher_that_is_killed_is_blamed_at_once(lasting, capsys):
    began = time.monotonic()
    with pytest.raises(jaxrun.WorkerDied) as caught, lasting.start_call(time.sleep, 60) as call:
        os.kill(psutil.Process(lasting.workers[0].pid).ppid(), signal.SIGKILL)
        call.results(100)
    assert str(caught.value) == "the launcher of this gang was killed or failed, and its ranks ended with it"
    assert caught.value.status == 1 and time.monotonic() - began < 30
    rebuilt(lasting, capsys, "ended")


def test_a_rank_that_does_not_answer_the_tab_key_keeps_its_variables(lasting, monkeypatch):
    lasting["losses"] = 7
    with monkeypatch.context() as patient:
        patient.setattr(completion, "_ASK_TIMEOUT_S", 60.0)
        assert complete_name(lasting, "los") == ["losses"]
    lasting.pause(1)
    try:
        assert complete_name(lasting, "los") == [] and lasting.healthy
        assert complete_name(lasting, "los") == []  # the first question has no answer yet
    finally:
        os.kill(lasting.workers[1].pid, signal.SIGCONT)
    assert lasting["losses"] == (7, 7)
    monkeypatch.setattr(completion, "_ASK_TIMEOUT_S", 60.0)
    assert complete_name(lasting, "los") == ["losses"]


@pytest.mark.jax_version
def test_a_timeout_says_where_each_rank_is_and_which_is_stopped(lasting, capsys):
    lasting.pause(1)
    assert psutil.Process(lasting.workers[1].pid).status() == psutil.STATUS_STOPPED
    with pytest.raises(jaxrun.CallTimeout, match=r"ranks 0-1 did not return within 0\.1 s") as caught:
        with lasting.start_call(meet) as call:
            while "process_allgather" not in lasting.stacks():
                time.sleep(0.2)
            call.results(0.1)
    error = caught.value
    assert isinstance(error, TimeoutError) and error.missing == (0, 1)
    assert "test_gang_faults.py" in str(error) and "process_allgather" in str(error)
    assert "rank 1 is stopped by a signal" in str(error)
    rebuilt(lasting, capsys, "ranks 0-1 did not come back from the last call")


def nap_on_rank_1():
    if rank() == 1:
        send("asleep")
        time.sleep(60)


@pytest.mark.jax_version
def test_a_call_that_can_be_interrupted_leaves_the_gang_as_it_was(lasting, monkeypatch):
    monkeypatch.setattr("jaxrun.frontends.gang.call.INTERRUPT_TIMEOUT_S", 60.0)
    before = [worker.pid for worker in lasting.workers]
    while "idle" not in lasting.stacks():  # it may be about to be
        pass
    with pytest.raises(jaxrun.CallTimeout, match=r"rank 1 did not return within 0\.2 s") as caught:
        with lasting.start_call(nap_on_rank_1) as call:
            assert {type(call.receive()) for _ in range(2)} == {RankMessage, Returned} and call.running == (1,)
            while " nap_on_rank_1" not in (shown := lasting.stacks()):  # it may still be sending
                pass
            assert "test_gang_faults.py" in shown
            assert "in nap_on_rank_1" in lasting.stacks(full=True)
            call.results(0.2)
    assert caught.value.missing == (1,)
    assert lasting.healthy and lasting.run(rank) == (0, 1)
    assert [worker.pid for worker in lasting.workers] == before


def only_rank_0_computes():
    """Needs no other rank to end, and they have not made it."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    sharding = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
    whole = jax.make_array_from_callback((2,), sharding, lambda index: np.ones(2, np.float32)[index])
    if rank() == 0:
        jax.jit(lambda x: x + 1)(whole)


@pytest.mark.extended
@pytest.mark.jax_version
def test_ranks_that_are_out_of_step_are_not_used_again(lasting, capsys):
    lasting.run(only_rank_0_computes)
    rebuilt(lasting, capsys, "are out of step, having made different numbers of cross-process calls")


@pytest.mark.parametrize(
    ("kind", "who", "text"),
    [("maim", 0, "a fault is one of kill, pause, not 'maim'"), ("kill", 2, "0 to 1, so there is no rank 2")],
)
def test_an_impossible_fault_is_refused(lasting, kind, who, text):
    with pytest.raises(jaxrun.errors.UsageError, match=text):
        lasting.fault(kind, who)


def test_a_gang_that_does_not_start_raises_its_launchers_output():
    with pytest.raises(jaxrun.GangStartError, match="the gang did not start:\n") as caught:
        jaxrun.Gang(2, options=["--no-such"])
    assert caught.value.exit_code == 2 and "there is no option --no-such" in str(caught.value)


@pytest.mark.extended
def test_a_start_can_be_checked_before_it():
    check_start(GangSpec(2))
    with pytest.raises(jaxrun.GangStartError, match="the gang did not start:\njaxrun: there is no option") as caught:
        check_start(GangSpec(2, options=["--no-such"]))
    assert caught.value.exit_code == 2


@pytest.mark.extended
def test_a_gang_that_was_stopped_starts_at_the_next_call_and_one_that_is_closed_does_not(capfd):
    gang = jaxrun.Gang(processes=1)
    gang.stop()
    assert not gang.healthy
    with pytest.raises(jaxrun.GangError, match="this gang of 1 is stopped; its next call starts it again"):
        gang.workers  # noqa: B018
    assert gang.run(rank) == (0,) and gang.processes == 1
    directory = gang.run_dir
    gang.close()
    gang.close()
    assert not gang.healthy and not directory.exists()
    assert "their job is stopped" in gang.stacks()
    for attempt in (lambda: gang.run(rank), lambda: gang.workers, gang.restart):
        with pytest.raises(jaxrun.GangError, match="this gang of 1 is closed; make another"):
            attempt()
    assert capfd.readouterr().err == ""  # it was not broken


def fork_and_wait():
    """Fork a process that stays in the group of this rank, and report its process id."""
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
        os._exit(0)
    send(pid)
    time.sleep(600)


@pytest.mark.extended
def test_what_ranks_have_just_forked_is_killed_with_their_launcher():
    """It has no mark in its environment, and the guard has not looked since: only the ranks' groups lead to it."""
    children = []
    with jaxrun.Gang(processes=4) as gang:
        call = gang.start_call(fork_and_wait)
        try:
            while len(children) < 4:
                event = call.receive(60)
                assert event is not None
                children += [event.value] if isinstance(event, RankMessage) else []
            os.kill(psutil.Process(gang.workers[0].pid).ppid(), signal.SIGKILL)
            with pytest.raises(jaxrun.WorkerDied):
                call.results(60)
            wait_until_dead(*children)
        finally:
            kill(children)
