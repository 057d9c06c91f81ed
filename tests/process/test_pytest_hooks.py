"""The plugin beside others: it costs little where it is not used, and knows when it is one of several processes."""

import subprocess
import sys

import pytest

from jaxrun.pytest_plugin.mpi_detection import find_mpi_place


def test_a_session_without_such_tests_loads_next_to_nothing():
    code = "import pytest, sys; import jaxrun.pytest_plugin.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    heavy = {"jax", "numpy", "cloudpickle", "click", "jaxrun.gang", "jaxrun.protocol.worker_messages", "jaxrun.verdict"}
    assert loaded & heavy == set()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"JAXRUN_RANK": "1", "JAXRUN_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
    ],
    ids=["alone", "mpirun", "mpirun of one", "nonsense", "a rank of ours", "a batch script"],
)
def test_a_process_is_among_others_if_they_were_started_together(environ, expected):
    place = find_mpi_place(environ)
    assert (place and (place.rank, place.size)) == expected
