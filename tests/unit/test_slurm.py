"""Slurm: the allocation that its variables describe, and the srun command for it."""

import re

import pytest

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.spec.backends.slurm_allocation import Allocation, read_allocation, spread_tasks
from jaxrun.spec.backends.srun import plan
from jaxrun.spec.engines.slurm import SLURM
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import AGENT_ARGV
from jaxrun.spec.job.rank_placement import Placement


def env(text):
    return dict(word.split("=", 1) for word in text.split())


# salloc -N3 -n5
UNEVEN = env(
    "SLURM_JOB_ID=2 SLURM_JOB_CPUS_PER_NODE=3,1(x2) SLURM_JOB_NODELIST=h[1-3] SLURM_NNODES=3 SLURM_NTASKS=5 "
    "SLURM_TASKS_PER_NODE=3,1(x2)"
)
# sbatch -N2 -n3 -c2, in the script itself
BATCH = env(
    "SLURM_JOB_ID=5 SLURM_CPUS_PER_TASK=2 SLURM_JOB_CPUS_PER_NODE=4,2 SLURM_JOB_NODELIST=h[1-2] SLURM_LOCALID=0 "
    "SLURM_NNODES=2 SLURM_NTASKS=3 SLURM_PROCID=0 SLURM_TASKS_PER_NODE=2,1"
)
# salloc -N2 -n4, and in it: srun -N1 -n1 bash
STEP_OF_ONE = env(
    "SLURM_JOB_ID=167 SLURM_CPUS_PER_TASK=1 SLURM_JOB_CPUS_PER_NODE=3,1 SLURM_JOB_NODELIST=h[1-2] SLURM_NNODES=1 "
    "SLURM_NODELIST=h1 SLURM_NTASKS=1 SLURM_STEP_ID=0 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1"
)


def test_without_a_job_there_is_no_allocation():
    assert read_allocation({}) is None
    assert read_allocation({"SLURM_JOB_ID": "", "SLURM_CONF": "/etc/slurm.conf"}) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (UNEVEN, Allocation("2", ("h1", "h2", "h3"), (3, 1, 1), tasks=5)),
        (UNEVEN | {"SLURM_HET_SIZE": "1"}, Allocation("2", ("h1", "h2", "h3"), (3, 1, 1), tasks=5)),
        (BATCH, Allocation("5", ("h1", "h2"), (4, 2), tasks=3, cpus_per_task=2)),
        (STEP_OF_ONE, Allocation("167", ("h1", "h2"), (3, 1), in_step=True)),
    ],
)
def test_an_allocation_is_read_without_the_step_of_this_process(environ, expected):
    assert read_allocation(environ) == expected


@pytest.mark.parametrize(
    ("environ", "tasks"),
    [
        # A step over all nodes was made with the allocation.
        (STEP_OF_ONE | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}, 4),
        (STEP_OF_ONE | {"SLURM_NTASKS": "4"}, 4),  # the shell of salloc, where it is a step
        (UNEVEN | {"SLURM_NTASKS": "", "SLURM_NTASKS_PER_NODE": "2"}, 6),
        (UNEVEN | {"SLURM_NTASKS": ""}, None),
    ],
)
def test_the_tasks_that_the_allocation_was_made_for_are_counted(environ, tasks):
    assert read_allocation(environ).tasks == tasks


@pytest.mark.parametrize(
    ("variables", "gpus"),
    [
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


@pytest.mark.parametrize(
    ("processes", "room", "counts"),
    [  # each as srun did it
        (5, (3, 1, 1), (3, 1, 1)),
        (4, (3, 1, 1), (2, 1, 1)),
        (4, (3, 1), (3, 1)),
        (3, (4, 4), (2, 1)),
        (5, (4, 4, 4), (2, 2, 1)),
        (6, (4, 1), (5, 1)),
    ],
)
def test_tasks_are_counted_as_srun_does(processes, room, counts):
    assert spread_tasks(processes, room) == counts


# ---- the srun command: its words and its environment

ID = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory):
    """A folder for PATH that holds nothing but an srun; it is never run."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "srun").symlink_to("/bin/true")
    return folder


@pytest.fixture
def make(bin_folder):
    def make(allocation=None, *, placed=(), **request):
        """`placed`: the hosts of the ranks, where that is decided."""
        environ = {"PATH": str(bin_folder), **(allocation or {})}
        return plan(Job(program=("train.py",), backend="slurm", **request), environ, ID, Placement(placed))

    return make


def allocation(nodes="h[1-2]", cpus="4(x2)", **more):
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_CPUS_PER_NODE": cpus, **more}


def hosts(made):
    return [worker.host for worker in made.workers]


def words(made):
    return set(made.launch_command.argv)


def test_the_command_contains_everything_that_srun_would_otherwise_guess(make, bin_folder):
    made = make(allocation(SLURM_NTASKS="4"))
    asked = "--nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=2 --distribution=block --nodelist=h1,h2 --overlap"
    always = "--kill-on-bad-exit=1 --wait=0 --input=0 --export=ALL"
    assert made.launch_command.argv == (str(bin_folder / "srun"), *f"{asked} {always}".split(), *AGENT_ARGV)
    assert (made.launch_command.engine, made.launch_command.title) == (SLURM, "srun in Slurm job 7")
    assert made.launch_command.set_env == {"SRUN_CPUS_PER_TASK": "2"} and made.launch_command.passes_stdin
    for stdin in ("0", "1", "none"):  # the ranks that are to read it
        assert f"--input={stdin}" in words(make(allocation(), stdin=stdin))


@pytest.mark.parametrize(
    ("found", "request_", "where"),
    [
        (allocation(SLURM_NTASKS="4"), {}, ["h1", "h1", "h2", "h2"]),
        (allocation(), {}, ["h1", "h2"]),
        (allocation(cpus="3,1", SLURM_NTASKS="4"), {}, ["h1", "h1", "h1", "h2"]),
        (allocation(cpus="3,1", SLURM_NTASKS="4"), {"hosts": 1}, ["h1", "h1", "h1"]),
        (allocation(SLURM_NTASKS="4"), {"hosts": 1}, ["h1", "h1"]),
        (allocation(SLURM_NTASKS="4"), {"processes": 3}, ["h1", "h1", "h2"]),
        (allocation(), {"processes_per_host": 3}, ["h1", "h1", "h1", "h2", "h2", "h2"]),
        (allocation(), {"processes": 4, "processes_per_host": 4}, ["h1"] * 4),
        (allocation(cpus="64(x2)", SLURM_GPUS_PER_NODE="a100:8"), {}, ["h1"] * 8 + ["h2"] * 8),
        (allocation(SLURM_GPUS_ON_NODE="4"), {"devices_per_process": 2}, ["h1", "h1", "h2", "h2"]),
        (allocation(SLURM_GPUS_ON_NODE="4"), {"platform": "cpu"}, ["h1", "h2"]),
        (allocation(), {"gpus_per_host": 2}, ["h1", "h1", "h2", "h2"]),
        (allocation(cpus="4,1"), {"processes": 6, "slurm_args": ("--overcommit",)}, ["h1"] * 5 + ["h2"]),
    ],
)
def test_ranks_are_expected_where_srun_puts_them(make, found, request_, where):
    made = make(found, **request_)
    assert hosts(made) == where
    assert {f"--ntasks={len(where)}", f"--nodes={len(set(where))}"} <= words(made)
    assert f"--nodelist={','.join(dict.fromkeys(where))}" in words(made)
    is_even = len({where.count(host) for host in where}) == 1
    assert any(word.startswith("--ntasks-per-node=") for word in words(made)) == is_even


@pytest.mark.parametrize(
    ("found", "request_", "each"),
    [
        (allocation(cpus="64(x2)"), {}, 64),
        (allocation(cpus="64(x2)"), {"processes": 16}, 8),
        (allocation(cpus="64,32"), {"processes": 3}, 32),
        (allocation(cpus="64(x2)"), {"cpus_per_process": 3}, 3),
        (allocation(cpus="64(x2)", SLURM_CPUS_PER_TASK="4", SLURM_NTASKS="2"), {}, 4),
        (allocation(cpus="64(x2)", SLURM_CPUS_PER_TASK="64", SLURM_NTASKS="2"), {"processes": 16}, 8),
        (allocation(cpus="4,1"), {"processes": 6, "slurm_args": ("-O",)}, 1),
    ],
)
def test_cpus_per_process_come_from_the_options_or_the_allocation(make, found, request_, each):
    assert f"--cpus-per-task={each}" in words(make(found, **request_))


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        *(({name: "1"}, ["--gpu-bind=none"]) for name in ("SLURM_GPUS_PER_TASK", "SLURM_JOB_GPUS")),
        ({"SLURM_GPUS_ON_NODE": "4"}, ["--gpu-bind=none"]),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_GPU_BIND": "closest"}, []),  # that someone chose
        ({}, []),
    ],
)
def test_gpus_are_not_hidden_from_a_neighbour(make, found, asked):
    assert [word for word in make(allocation(**found)).launch_command.argv if word.startswith("--gpu")] == asked


def test_gpus_are_requested_per_node_only(make):
    made = make(allocation(SLURM_GPUS="16", SLURM_GPUS_PER_TASK="1"), gpus_per_host=2)
    assert {"--gpus-per-node=2", "--gpu-bind=none"} <= words(made)
    assert {"SLURM_GPUS", "SLURM_GPUS_PER_TASK"} <= set(made.launch_command.unset_env)


def test_variables_that_srun_would_read_are_taken_away(make):
    leaks = {"SLURM_NO_KILL": "1", "SLURM_LABELIO": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_EXCLUSIVE": "1"}
    kept = {"SLURM_MPI_TYPE": "pmix", "SLURM_CPU_BIND": "cores", "SLURM_CONF": "/c"}
    made = make(allocation(SLURM_TRES_PER_TASK="cpu=8", **leaks, **kept))
    assert set(made.launch_command.unset_env) == {*leaks, "SLURM_TRES_PER_TASK"}
    assert make(allocation(SLURM_TRES_PER_TASK="cpu=8,gres/gpu=1")).launch_command.unset_env == ()


def test_the_binding_of_a_step_is_not_handed_on(make):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "1"}
    made = make(allocation(SLURM_CPU_BIND="mask_cpu:0x1", SLURM_CPU_BIND_LIST="0x1", **step))
    assert {"SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST"} <= set(made.launch_command.unset_env)
    assert hosts(made) == ["h1", "h2"]


def test_further_arguments_come_last_and_win(make):
    argv = make(allocation(), slurm_args=("--mpi=pmix", "--wait=5", "--exclusive")).launch_command.argv
    assert argv[-len(AGENT_ARGV) - 3 :] == ("--mpi=pmix", "--wait=5", "--exclusive", *AGENT_ARGV)
    assert "--overlap" not in argv
    made = make(allocation(nodes="h[1-3]", cpus="4(x3)"), hosts=2, slurm_args=("-w", "h3,h2"))
    assert hosts(made) == ["?", "?"] and not any(word.startswith("--nodelist=h1") for word in words(made))


@pytest.mark.parametrize(
    ("found", "request_", "message"),
    [
        (
            allocation(SLURM_NTASKS="8"),
            {"processes": 9},
            "9 processes x 1 CPU do not fit Slurm job 7, made for 8 tasks: its CPUs are h1 4, h2 4. Ask salloc or "
            "sbatch for -n 9 -c 1, start fewer with -n, or let processes share CPUs: --slurm-args --overcommit",
        ),
        (allocation(), {"cpus_per_process": 5}, "2 processes x 5 CPUs do not fit Slurm job 7: its CPUs are h1 4, h2 4"),
        (allocation(cpus="4,1"), {"cpus_per_process": 2, "processes": 2}, "2 processes x 2 CPUs do not fit"),
        (allocation(), {"hosts": 3}, "3 hosts were requested, but Slurm job 7 has 2 nodes: h1, h2; give a smaller -N"),
        (allocation(cpus="4,1"), {"processes_per_host": 2}, "with 1 CPU a process, h1 4, h2 1 of them can run there"),
        (allocation(), {"slurm_args": ("-n3",)}, "--slurm-args -n3: jaxrun needs to know this, too; use -n"),
        (allocation(), {"slurm_args": ("--cpus-per-task=3",)}, "to know this, too; use --cpus-per-process"),
        (allocation(), {"hosts": 2, "spares": 1, "max_restarts": 1}, "-N 2 and --spares 1 take 3 hosts, but there"),
        (allocation(), {"only_ranks": (range(2, 3),)}, "names rank 2, but the ranks of this job are 0 to 1"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_with_a_remedy(make, found, request_, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        make(found, **request_)


def test_outside_of_an_allocation_the_error_says_what_to_type(make):
    with pytest.raises(UsageError) as caught:
        make(hosts=2, gpus_per_host=8, partition="gpu", time_limit="2:00:00")
    message = str(caught.value)
    assert "SLURM_JOB_ID is not set" in message and "--submit" in message and "--sbatch job.sh" in message
    assert message.endswith(
        "salloc --nodes=2 --ntasks=16 --ntasks-per-node=8 --gpus-per-node=8 --partition=gpu --time=2:00:00"
    )


def test_without_srun_it_says_where_one_may_be():
    with pytest.raises(UnavailableError, match=r"needs srun, which is not on PATH.*module load slurm") as caught:
        plan(Job(program=("train.py",), backend="slurm"), {"PATH": "/nowhere", **allocation()}, ID)
    assert caught.value.exit_code == 69


def test_no_value_of_a_variable_is_on_the_command_line_and_options_of_a_batch_job_give_a_note(make):
    made = make(allocation(), env={"XLA_FLAGS": "--a=1,2 --b"})
    assert [word for word in made.launch_command.argv if "export" in word] == ["--export=ALL"]
    assert made.set_env["XLA_FLAGS"] == "--a=1,2 --b" and made.notes == ()
    assert make(allocation(), partition="gpu", account="me").notes == (
        "--partition, --account cannot change Slurm job 7, which is already running",
    )


def test_spare_nodes_are_left_and_a_restart_names_the_node_of_each_rank(make):
    made = make(allocation("h[1-4]", "2(x4)", SLURM_NTASKS="8"), spares=1, max_restarts=1)
    assert (hosts(made), made.placement.spares) == (["h1", "h1", "h2", "h2", "h3", "h3"], ("h4",))
    assert {"--nodelist=h1,h2,h3,h4", "--ntasks=8", "--ntasks-per-node=2", "--no-kill"} <= words(made)
    assert made.launch_command.agent_hosts == (*hosts(made), "h4", "h4") and [
        number for number, ranks in made.placement.agents.items() if not ranks
    ] == [6, 7]
    placement = ("h1", "h1", "h4", "h4", "h3", "h3")
    again = make(allocation("h[1-4]", "2(x4)", SLURM_NTASKS="8"), placed=placement, processes=6)
    assert hosts(again) == list(placement) and "--no-kill" in words(again)
    assert {"--distribution=arbitrary", "--nodelist=h1,h1,h4,h4,h3,h3", "--nodes=3", "--ntasks=6"} <= words(again)
    assert not any(word.startswith("--ntasks-per-node") for word in words(again))
