"""Jobs in which only some ranks call a function of jaxrun that all must call."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import jaxrun

pytestmark = pytest.mark.jax_version

ONE_RANK_SAVES = """
import sys
import jax
import jaxrun_runtime as jr
from jax.experimental import multihost_utils

everywhere = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), "d"), jax.sharding.PartitionSpec())
state = jax.make_array_from_callback((4,), everywhere, lambda index: jax.numpy.ones(4)[index])
if jr.is_main:
    jr.snapshot(1, {"state": state})
if "barrier" in sys.argv:
    multihost_utils.sync_global_devices("saved")
"""


@pytest.mark.extended
@pytest.mark.parametrize("lockstep", ["record", pytest.param("off", marks=pytest.mark.extended)])
def test_a_snapshot_of_rank_0_alone_ends_the_job_once_the_others_have_finished(
    tmp_path: Path, script, lockstep: str
) -> None:
    result = jaxrun(tmp_path, "-n", "3", "--lockstep", lockstep, str(script(ONE_RANK_SAVES)))
    assert result.code == 124 and "; rank 0 waits in jaxrun_runtime.snapshot for ranks that will never" in result.err, (
        result
    )
    told = "<module>) for ranks 1-2, which have finished without calling it: all ranks must"
    assert told in " ".join(result.err.split()), result


def test_while_others_wait_in_a_barrier_the_rank_that_has_not_called_it_is_named(tmp_path: Path, script) -> None:
    options = ("-n", "2", "--stall-notice", "0.5", "--stall-timeout", "4")
    result = jaxrun(tmp_path, *options, str(script(ONE_RANK_SAVES)), "barrier")
    assert result.code == 124, result
    notices = [line for line in result.err.splitlines() if "no progress for" in line]
    # Of one before, rank 1 may have been on its way to the barrier.
    both = [line for line in notices if "rank 1 waits in a barrier (sync_global" in line]
    assert both and "rank 0 waits in jaxrun_runtime.snapshot (" in both[0], result
    assert "for rank 1, which has not called it: all ranks must; rank 1 waits in a barrier (sync_global" in both[0]
    assert "in jaxrun_runtime.snapshot\n" in result.err, "the place in the table of stacks"
