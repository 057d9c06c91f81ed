"""Functions on the ranks of a real gang: their arguments, results and output."""

from __future__ import annotations

import collections
import os
import sys

import numpy as np
import pytest

import jaxrun

pytestmark = pytest.mark.jax_version


@pytest.fixture(scope="module")
def gang():
    with jaxrun.Gang(processes=3, devices=2) as made:
        yield made


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


def test_a_gang_knows_its_workers(gang):
    pids = gang.run(os.getpid)
    assert tuple(worker.pid for worker in gang.workers) == pids
    assert [(worker.rank, worker.local_rank, worker.devices) for worker in gang.workers] == [
        (0, 0, 2),
        (1, 1, 2),
        (2, 2, 2),
    ]
    assert {worker.platform for worker in gang.workers} == {"cpu"} and len({w.host for w in gang.workers}) == 1
    assert (gang.processes, gang.devices, gang.healthy) == (3, 2, True)
    assert os.getpid() not in pids


def test_its_ranks_are_a_job_of_jax(gang):
    assert gang.run(devices) == ((2, 6),) * 3
    assert gang.run(total, np.arange(4)).main.tolist() == [0, 3, 6, 9]


def test_its_files_are_those_of_a_job(gang):
    names = {path.name for path in gang.run_dir.iterdir()}
    assert {"job.json", "events.jsonl", "rank-0000.out", "rank-0002.err"} <= names


# ---- values


def test_results_come_by_rank(gang):
    results = gang.run(rank)
    assert results == (0, 1, 2) and results.main == 0 and results[2] == 2
    assert isinstance(results, jaxrun.Results)


def test_arguments_and_keywords_arrive(gang):
    assert gang.run(lambda a, *, b: (a, b), 1, b="two").main == (1, "two")


def test_timeout_is_an_argument_of_the_gang_not_of_the_function(gang):
    assert gang.run(lambda **more: more, other=1, timeout=60).main == {"other": 1}


def test_a_closure_travels(gang):
    offset = np.arange(3)
    Point = collections.namedtuple("Point", "x y")
    made = gang.run(lambda: Point(offset + rank(), "y"))
    assert [point.x.tolist() for point in made] == [[0, 1, 2], [1, 2, 3], [2, 3, 4]]


def test_a_function_of_a_module_is_imported_there(gang):
    assert gang.run(os.path.join, "a", "b") == ("a/b",) * 3
    assert gang.run(devices).main == (2, 6)


def test_the_state_of_a_module_lasts_from_call_to_call(gang):
    def count():
        sys.calls_so_far = getattr(sys, "calls_so_far", 0) + 1
        return sys.calls_so_far

    assert [gang.run(count).main for _ in range(2)] == [1, 2]


SIZES = [0, 1, 2**14, 2**16, 2**20]  # elements; from inline to shared memory


@pytest.mark.parametrize("size", SIZES)
def test_arrays_of_any_size_go_there_and_back(gang, size):
    sent = np.arange(size, dtype=np.float64)
    results = gang.run(lambda x: x * 2, sent)
    assert all(np.array_equal(made, sent * 2) for made in results)
    assert all(made.flags.writeable for made in results)


def test_a_rank_that_changes_its_argument_changes_nothing_elsewhere(gang):
    def spoil(x):
        x += rank() + 1
        return x[0], x[-1]

    sent = np.zeros(2**17)
    assert gang.run(spoil, sent) == ((1, 1), (2, 2), (3, 3)) and not sent.any()


def test_an_array_of_jax_comes_as_numpys(gang):
    def make():
        import jax.numpy as jnp

        return {"loss": jnp.float32(0.5), "half": jnp.ones(3, jnp.bfloat16)}

    made = gang.run(make)[1]
    assert type(made["loss"]) is np.ndarray and made["loss"] == 0.5
    assert made["half"].dtype.name == "bfloat16" and made["half"].tolist() == [1, 1, 1]


def sharded(spec):
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    count = jax.device_count()
    sharding = NamedSharding(jax.make_mesh((count,), ("x",)), PartitionSpec(*spec))
    return jax.make_array_from_callback((count,), sharding, lambda index: np.arange(count)[index])


def test_an_array_that_all_ranks_hold_comes_whole(gang):
    assert gang.run(sharded, ()).main.tolist() == [0, 1, 2, 3, 4, 5]


def test_the_error_for_a_sharded_array_says_what_to_return(gang):
    with pytest.raises(ValueError, match=r"no rank can see all of .*addressable_shards.*process_allgather"):
        gang.run(sharded, ("x",))
    parts = gang.run(lambda: [shard.data for shard in sharded(("x",)).addressable_shards])
    assert [np.concatenate(part).tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]


def test_a_large_function_is_warned_of(gang):
    heavy = bytes(2**24)
    with pytest.warns(UserWarning, match="16 MiB, which go to every rank with each call; pass large arrays"):
        assert gang.run(lambda: len(heavy)).main == 2**24


# ---- printing


def test_output_is_shown_with_its_rank(gang, capsys):
    def printing():
        print("out", rank(), end="")
        print("err", rank(), file=sys.stderr)

    gang.run(printing)
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["[0] out 0", "[1] out 1", "[2] out 2"]
    assert sorted(shown.err.splitlines()) == ["[0] err 0", "[1] err 1", "[2] err 2"]


def test_no_line_is_lost_however_many_there_are(gang, capsys):
    def printing():
        for number in range(500):
            print(rank(), number)

    for _ in range(3):
        gang.run(printing)
        assert len(capsys.readouterr().out.splitlines()) == 1500


# ---- other gangs


def test_gangs_of_different_sizes_run_side_by_side(gang):
    with jaxrun.Gang(processes=2, devices=1) as other:
        assert other.run(devices) == ((1, 2),) * 2 and gang.run(devices) == ((2, 6),) * 3
        assert other.run(total, 1).main == 2 and gang.run(total, 1).main == 3
        assert not set(other.run(os.getpid)) & set(gang.run(os.getpid))


def test_a_gang_over_simulated_hosts_with_variables_and_files(gang, tmp_path):
    def look():
        import jaxrun_runtime as jr

        print("for the log")
        return jr.host, jr.local_rank, os.environ["MINE"], str(jr.run_dir)

    with jaxrun.Gang(
        processes=4, hosts=2, env={"MINE": "a=b"}, run_dir=tmp_path / "run", options=["--tag", "tagged"]
    ) as other:
        hosts = [worker.host for worker in other.workers]
        assert hosts[0] == hosts[1] != hosts[2] == hosts[3]
        assert [worker.local_rank for worker in other.workers] == [0, 1, 0, 1]
        assert other.run(look) == tuple((hosts[n], n % 2, "a=b", str(tmp_path / "run")) for n in range(4))
        assert "tagged" in (tmp_path / "run" / "job.json").read_text()
        other.restart()
        assert other.run_dir == tmp_path / "run-2" and other.run(look).main[3] == str(tmp_path / "run-2")
    for name in ("run", "run-2"):
        assert (tmp_path / name / "verdict.json").exists()
        assert "for the log\n" in (tmp_path / name / "rank-0003.out").read_text()


def test_launch_is_a_gang_for_one_call(capsys):
    def train(x, *, scale):
        print("training")
        return x * scale + rank(), devices()

    results = jaxrun.launch(train, 2, scale=10, processes=2, devices=2, env={"A": "b"}, timeout=60)
    assert results == ((20, (2, 4)), (21, (2, 4))) and results.main[0] == 20
    assert sorted(capsys.readouterr().out.splitlines()) == ["[0] training", "[1] training"]
