"""Under --no-gang, tests with the mark run in pytest itself, as the only process of their gang."""

import pytest
from unmarked import has_fork_server

from jaxrun.errors import UsageError

HAD_SERVER = has_fork_server()


@pytest.mark.processes([1, 4], devices=2)
def test_its_gang_is_this_process(gang, process_index, process_count, tmp_path, shared_tmp_path):
    gang.barrier("of one")
    assert (gang.rank, gang.size, gang.local_rank, gang.is_main, gang.devices) == (0, 1, 0, True, 1)
    assert (process_index, process_count, shared_tmp_path) == (0, 1, tmp_path)
    assert (gang.allgather("x"), gang.broadcast("y")) == (["x"], "y")
    assert not HAD_SERVER


@pytest.mark.processes(2)
@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_it_has_no_faults(gang, fault):
    with pytest.raises(UsageError, match=rf"gang\.{fault} would hit pytest itself"):
        getattr(gang, fault)(0)
