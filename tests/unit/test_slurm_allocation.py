"""The allocation that Slurm's variables describe. The environments were printed by a Slurm 22.05."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.backends.slurm_allocation import Allocation, read_allocation, spread_tasks
from jaxrun.errors import UsageError

UNEVEN = {  # salloc -N3 -n5
    "SLURM_JOB_ID": "2",
    "SLURM_JOB_CPUS_PER_NODE": "3,1(x2)",
    "SLURM_JOB_NODELIST": "h[1-3]",
    "SLURM_NNODES": "3",
    "SLURM_NTASKS": "5",
    "SLURM_TASKS_PER_NODE": "3,1(x2)",
}
BATCH = {  # sbatch -N2 -n3 -c2, in the script itself
    "SLURM_JOB_ID": "5",
    "SLURM_CPUS_PER_TASK": "2",
    "SLURM_JOB_CPUS_PER_NODE": "4,2",
    "SLURM_JOB_NODELIST": "h[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2,1",
}
STEP_OF_ONE = {  # salloc -N2 -n4, and in it: srun -N1 -n1 bash
    "SLURM_JOB_ID": "167",
    "SLURM_CPUS_PER_TASK": "1",
    "SLURM_JOB_CPUS_PER_NODE": "3,1",
    "SLURM_JOB_NODELIST": "h[1-2]",
    "SLURM_NNODES": "1",
    "SLURM_NODELIST": "h1",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
}


def test_without_a_job_there_is_no_allocation():
    assert read_allocation({}) is None
    assert read_allocation({"SLURM_JOB_ID": "", "SLURM_CONF": "/etc/slurm.conf"}) is None


def test_nodes_need_not_be_alike():
    assert read_allocation(UNEVEN) == Allocation("2", ("h1", "h2", "h3"), (3, 1, 1), tasks=5)


def test_a_batch_script_is_not_taken_for_a_task():
    assert read_allocation(BATCH) == Allocation("5", ("h1", "h2"), (4, 2), tasks=3, cpus_per_task=2)


def test_the_size_of_a_small_step_is_not_that_of_the_allocation():
    assert read_allocation(STEP_OF_ONE) == Allocation("167", ("h1", "h2"), (3, 1), in_step=True)


def test_a_step_over_all_nodes_was_made_with_the_allocation():
    whole = {**STEP_OF_ONE, "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
    assert read_allocation(whole).tasks == 4


def test_the_shell_of_salloc_keeps_the_tasks_of_the_allocation_where_it_is_a_step():
    assert read_allocation({**STEP_OF_ONE, "SLURM_NTASKS": "4"}).tasks == 4


def test_tasks_per_node_count_where_no_total_is_given():
    environ = {**UNEVEN, "SLURM_NTASKS_PER_NODE": "2"}
    del environ["SLURM_NTASKS"]
    assert read_allocation(environ).tasks == 6
    del environ["SLURM_NTASKS_PER_NODE"]
    assert read_allocation(environ).tasks is None


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
        ({"SLURM_GPUS_PER_NODE": "8"}, 8),
        ({"SLURM_GPUS_PER_NODE": "a100:8", "SLURM_GPUS_ON_NODE": "4"}, 8),
        ({"SLURM_GPUS_PER_NODE": "a100:4,v100:2"}, 6),
        ({"SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_GPUS": "h100:12"}, 4),
        ({"SLURM_GPUS": "2"}, None),
        ({}, None),
    ],
)
def test_gpus_are_counted_for_each_node(variables, gpus):
    assert read_allocation({**UNEVEN, **variables}).gpus == gpus


def test_brackets_may_stand_in_several_places():
    environ = {**UNEVEN, "SLURM_JOB_NODELIST": "rack[1-2]n[07-08],login", "SLURM_JOB_CPUS_PER_NODE": "64(x4),8"}
    assert read_allocation(environ).nodes == ("rack1n07", "rack1n08", "rack2n07", "rack2n08", "login")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"SLURM_HET_SIZE": "2"}, r"job 2 is heterogeneous \(SLURM_HET_SIZE=2\).*ask for one component"),
        ({"SLURM_JOB_NODELIST": ""}, r"SLURM_JOB_NODELIST is not.*srun --jobid=2 --overlap --pty bash"),
        ({"SLURM_JOB_CPUS_PER_NODE": ""}, r"SLURM_JOB_CPUS_PER_NODE is not"),
        ({"SLURM_JOB_CPUS_PER_NODE": "4"}, r"h\[1-3\] names 3 nodes.*=4 counts 1"),
        ({"SLURM_NTASKS": "many"}, r"SLURM_NTASKS='many' is not a number"),
    ],
)
def test_an_allocation_that_cannot_be_used_is_refused(variables, message):
    with pytest.raises(UsageError, match=message):
        read_allocation({**UNEVEN, **variables})


def test_a_job_of_one_component_is_like_any_other():
    assert read_allocation({**UNEVEN, "SLURM_HET_SIZE": "1"}) == read_allocation(UNEVEN)


@pytest.mark.parametrize(
    ("processes", "room", "counts"),
    [  # each as srun did it
        (5, (3, 1, 1), (3, 1, 1)),
        (4, (3, 1, 1), (2, 1, 1)),
        (4, (3, 1), (3, 1)),
        (3, (4, 4), (2, 1)),
        (5, (4, 4, 4), (2, 2, 1)),
        (7, (3, 1, 1), (4, 2, 1)),
        (6, (4, 1), (5, 1)),
    ],
)
def test_tasks_are_counted_as_srun_does(processes, room, counts):
    assert spread_tasks(processes, room) == counts


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 100))
def test_no_node_gets_too_many_while_another_has_room(room, processes):
    counts = spread_tasks(processes, room)
    assert sum(counts) == processes
    if processes <= sum(room):
        assert all(count <= limit for count, limit in zip(counts, room, strict=True))
        with_room = [count for count, limit in zip(counts, room, strict=True) if count < limit]
        assert all(count >= max(counts) - 1 for count in with_room)
