"""The plugin detects that mpirun or srun has started pytest."""

import pytest

from jaxrun.pytest_plugin.plugin import find_mpi_rank


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
def test_a_process_is_one_of_several_if_they_were_started_together(environ, expected):
    found = find_mpi_rank(environ)
    assert (found and (found.rank, found.size)) == expected
