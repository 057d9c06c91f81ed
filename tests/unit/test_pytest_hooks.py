"""The plugin among others: it detects that mpirun or srun has started pytest, and causes no warnings of pytest's."""

import pytest
from _pytest.assertion.rewrite import AssertionRewriter

import jaxrun
import jaxrun_runtime
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


@pytest.mark.parametrize("package", [jaxrun, jaxrun_runtime])
def test_pytest_does_not_warn_of_packages_that_a_rank_has_imported(package):
    assert AssertionRewriter.is_rewrite_disabled(package.__doc__)
