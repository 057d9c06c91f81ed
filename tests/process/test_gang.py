"""Functions on the ranks of a real gang: values, output and errors; whatever happens, the same processes go on."""

from __future__ import annotations

import collections
import contextlib
import os
import sys
import threading
import time

import numpy as np
import pytest

import jaxrun


@pytest.fixture(scope="module")
def lasting(patient_gangs):
    with jaxrun.Gang(processes=3, devices=2) as made:
        yield made


@pytest.fixture
def gang(lasting):
    """Whatever is raised, the same processes execute the next call."""
    before = [worker.pid for worker in lasting.workers]
    yield lasting
    assert lasting.healthy and list(lasting.run(os.getpid)) == before


def rank():
    import jax

    return jax.process_index()


def devices():
    import jax

    return jax.local_device_count(), jax.device_count()


def total(x):
    """What every rank gives, summed over all."""
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(jnp.asarray(x)).sum(0)


# ---- what it is


def test_a_gang_knows_its_workers_and_its_files_are_those_of_a_job(gang):
    assert [(worker.rank, worker.local_rank, worker.devices) for worker in gang.workers] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 2, 2),
    ]
    assert {worker.platform for worker in gang.workers} == {"cpu"} and len({w.host for w in gang.workers}) == 1
    assert (gang.processes, gang.devices, gang.healthy) == (3, 2, True)
    names = {path.name for path in gang.run_dir.iterdir()}
    assert {"job.json", "events.jsonl", "rank-0000.out", "rank-0002.err"} <= names


@pytest.mark.jax_version
def test_its_ranks_are_a_job_of_jax(gang):
    assert gang.run(devices) == ((2, 6),) * 3
    assert gang.run(total, np.arange(4)).main.tolist() == [0, 3, 6, 9]


def look():
    import jaxrun_runtime as jr

    print("for the log")
    return jr.host, jr.local_rank, os.environ["MINE"], str(jr.run_dir)


@pytest.mark.extended
@pytest.mark.jax_version
def test_another_gang_beside_it_has_simulated_hosts_a_variable_a_run_directory_and_no_lockstep(gang, tmp_path):
    options = {"env": {"MINE": "a=b"}, "run_dir": tmp_path / "run", "lockstep": "off", "options": ["--tag", "tagged"]}
    with jaxrun.Gang(processes=2, devices=1, hosts=2, **options) as other:
        assert other.run(devices) == ((1, 2),) * 2 and gang.run(devices) == ((2, 6),) * 3
        assert other.run(total, 1).main == 2 and gang.run(total, 1).main == 3
        pids, hosts = other.run(os.getpid), [worker.host for worker in other.workers]
        assert hosts[0] != hosts[1] and [worker.local_rank for worker in other.workers] == [0, 0]
        assert other.run(look) == tuple((host, 0, "a=b", str(tmp_path / "run")) for host in hosts)
        assert "tagged" in (tmp_path / "run" / "job.json").read_text()
        other.run(only_rank_0_computes)
        assert other.healthy  # as there is no record of the calls
        other.restart()
        assert other.run_dir == tmp_path / "run-2" and other.run(look).main[3] == str(tmp_path / "run-2")
        assert not set(other.run(os.getpid)) & {*pids, *gang.run(os.getpid)}
    for name in ("run", "run-2"):
        assert (tmp_path / name / "verdict.json").exists()
        assert "for the log\n" in (tmp_path / name / "rank-0001.out").read_text()


def only_rank_0_computes():
    """Needs no other rank to end, and they have not made it."""
    import jax

    whole = sharded(("x",))
    if rank() == 0:
        jax.jit(lambda x: x + 1)(whole)


@pytest.mark.extended
def test_launch_is_a_gang_for_one_call(capsys):
    def train(x, *, scale):
        print("training")
        return x * scale + rank(), devices(), os.environ["A"]

    results = jaxrun.launch(train, 2, scale=10, processes=2, devices=2, env={"A": "b"}, timeout=60)
    assert results == ((20, (2, 4), "b"), (21, (2, 4), "b")) and results.main[0] == 20
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] training", "[1] training"]


# ---- values


def test_arguments_arrive_and_results_come_by_rank(gang):
    results = gang.run(lambda a, *, b: (rank(), a, b), 1, b="two")
    assert isinstance(results, jaxrun.Results)
    assert results == ((0, 1, "two"), (1, 1, "two"), (2, 1, "two")) and results.main == results[0]
    assert gang.run(os.path.join, "a", "b") == ("a/b",) * 3
    assert gang.run(lambda **more: more, other=1, timeout=60).main == {"other": 1}


def test_a_closure_travels_and_the_state_of_a_module_lasts(gang):
    offset = np.arange(3)
    Point = collections.namedtuple("Point", "x y")

    def count():
        sys.calls_so_far = getattr(sys, "calls_so_far", 0) + 1
        return Point(offset + rank(), sys.calls_so_far)

    gang.run(count)
    assert [(point.x.tolist(), point.y) for point in gang.run(count)] == [
        ([0, 1, 2], 2),
        ([1, 2, 3], 2),
        ([2, 3, 4], 2),
    ]


def sharded(spec):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    count = jax.device_count()
    sharding = NamedSharding(jax.make_mesh((count,), ("x",)), PartitionSpec(*spec))
    return jax.make_array_from_callback((count,), sharding, lambda index: np.arange(count)[index])


# ---- errors


class Own(Exception):
    """A user's own, which cannot be called with its args."""

    def __init__(self, where, reason):
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


def fail_after_a_collective_call():
    total(1)
    if rank() == 1:
        raise Own("here", "because")


def test_an_error_of_one_rank_is_raised_as_itself_and_leaves_the_ranks_in_step(gang):
    with pytest.raises(Own, match="here: because") as caught:
        gang.run(fail_after_a_collective_call)
    error = caught.value
    assert (error.rank, error.ranks, error.where, error.reason) == (1, (1,), "here", "because")
    assert error.host == gang.workers[1].host
    assert "test_gang.py" in str(error.__cause__) and "in fail_after_a_collective_call" in str(error.__cause__)
    assert "jaxrun_runtime" not in str(error.__cause__)
    assert gang.run(total, 1).main == 3


def test_what_cannot_travel_is_refused_on_both_ways(gang):
    with pytest.raises(TypeError, match="cannot pickle"):
        gang.run(len, threading.Lock())
    with pytest.raises(TypeError, match="a gang cannot be sent to its own ranks"):
        gang.run(lambda: gang.run(rank))
    with pytest.raises(TypeError, match="cannot pickle") as caught:
        gang.run(threading.Lock)
    assert "while pickling the function's return value to send it to the caller" in str(caught.value.__cause__)


def test_an_interrupt_ends_the_function_on_all_ranks(gang):
    with gang.start_call(time.sleep, 60) as call:
        call.interrupt()
        assert {call.receive().error.error for _ in range(3)} == {"KeyboardInterrupt"}


# ---- calls as futures


def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return rank()


def test_a_call_that_nobody_waits_for_ends_before_the_next_and_its_output_and_error_are_shown(gang, capsys):
    gang.start_call(print, "from a dropped call")
    assert gang.run(rank) == (0, 1, 2)
    assert sorted(capsys.readouterr().out.splitlines()) == [f"[{rank}] from a dropped call" for rank in range(3)]
    gang.start_call(fail_after_a_collective_call)
    assert gang.run(total, 1).main == 3
    warned = capsys.readouterr().err
    assert warned.startswith("jaxrun: an earlier call of fail_after_a_collective_call, whose results nobody waited for")
    assert "in fail_after_a_collective_call" in warned and "Own: here: because" in warned


def test_a_call_without_a_with_is_a_future(gang, tmp_path):
    early, late = gang.start_call(rank), gang.start_call(wait_for, str(tmp_path / "go"))
    with pytest.raises(jaxrun.CallTimeout):
        late.results(0.01)
    other = threading.Thread(target=lambda: [gang.run(rank) for _ in range(3)])
    other.start()  # finds the call of this thread, which waits for it below
    (tmp_path / "go").touch()
    assert late.results() == early.results() == late.results() == (0, 1, 2)
    other.join()


# ---- who may use it


def test_calls_of_several_threads_follow_each_other(gang):
    seen = []

    def caller(number):
        for step in range(10):
            seen.append(gang.run(lambda *args: args, number, step).main == (number, step))

    threads = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 40


def test_a_gang_has_one_call_at_a_time(gang):
    with gang.start_call(rank) as call:
        with pytest.raises(jaxrun.GangError, match="this gang runs another call; wait until it ends"):
            gang.run(rank)
        while call.receive() is not None:
            pass


def open_with_launcher():
    """The sockets that this rank shares with its launcher, and whether it holds what that prints to."""

    def links(pid):
        found = {}
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found[name] = os.readlink(f"/proc/{pid}/fd/{name}")
        return found

    own, of_launcher = set(links("self").values()), links(os.getppid())
    return {name for name in own & set(of_launcher.values()) if name.startswith("socket:")}, of_launcher["2"] in own


def test_ranks_hold_no_descriptor_of_their_launcher(gang):
    assert list(gang.run(open_with_launcher)) == [(set(), False)] * 3
