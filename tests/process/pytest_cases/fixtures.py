"""Fixtures of all scopes on the ranks, a gang, directories; and gangs of other shapes. All of these pass."""

import os
import unittest

import jax
import pytest
from unmarked import has_fork_server

HAD_SERVER = has_fork_server()
two = pytest.mark.processes(2)


@pytest.fixture(scope="session")
def log(tmp_path_factory):
    lines = []
    yield lines
    (tmp_path_factory.getbasetemp() / "torn-down").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def counter():
    return [0]


@pytest.fixture(scope="session")
def world(gang):
    return f"{gang.rank} of {gang.size}"


def test_the_fork_server_was_there_at_the_import():
    assert HAD_SERVER


@two
class TestOldStyle(unittest.TestCase):
    def setUp(self):
        self.processes = jax.process_count()

    def test_old_style(self):
        self.assertEqual(self.processes, 2)


@two
def test_directories(gang, tmp_path, shared_tmp_path):
    (shared_tmp_path / str(gang.rank)).touch()
    gang.barrier()
    assert sorted(path.name for path in shared_tmp_path.iterdir()) == ["0", "1"]
    assert len(set(gang.allgather(str(tmp_path)))) == 2
    assert len(set(gang.allgather(str(shared_tmp_path)))) == 1


@two
def test_gang(gang, world, process_index, process_count):
    assert (gang.rank, gang.size, gang.is_main) == (jax.process_index(), 2, gang.rank == 0)
    assert (process_index, process_count, world) == (gang.rank, 2, f"{gang.rank} of 2")
    assert gang.allgather({"rank": gang.rank}) == [{"rank": 0}, {"rank": 1}]
    assert [gang.broadcast(gang.rank, root) for root in (0, 1)] == [0, 1]
    with pytest.raises(ValueError, match="not one of the ranks 0 to 1"):
        gang.broadcast(1, root=2)


@pytest.mark.processes([1, 2])
@pytest.mark.parametrize("word", ["a", "b"])
def test_sizes(gang, word):
    assert jax.process_count() == gang.size


@pytest.mark.processes(2, devices=2, hosts=2, env={"COLOUR": "green"})
def test_shape(gang):
    assert (jax.device_count(), gang.devices, gang.local_rank) == (4, 2, 0)
    assert len(set(gang.allgather(gang.host))) == 2
    assert os.environ["COLOUR"] == "green"


@pytest.mark.processes(1)
def test_warm(log, counter):
    log.append("first")
    counter[0] += 1


def test_between_runs_in_the_parent(counter):
    assert counter == [0]


@pytest.mark.processes(1, fresh=True)
def test_fresh(counter):
    assert counter == [0]


@pytest.mark.processes(1)
def test_warm_again_sees_what_the_first_left(log, counter):
    log.append("second")
    assert counter == [1]


def test_gangs(gangs):
    gang = gangs(processes=1, options="--lockstep off")
    assert gang.run(os.getpid) == (gang.workers[0].pid,)
