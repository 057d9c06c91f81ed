"""The srun command of a job: its words and its environment, for allocations of every shape."""

import re
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.backends.slurm import plan
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.job.job import Job
from jaxrun.job.plan import AGENT_ARGV

ID = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def bin_folder(tmp_path):
    """A folder for PATH that holds nothing but an srun; it is never run."""
    (tmp_path / "srun").symlink_to(shutil.which("true"))
    return tmp_path


@pytest.fixture
def make(bin_folder):
    def make(allocation=None, **request):
        environ = {"PATH": str(bin_folder), **(allocation or {})}
        return plan(Job(program=("train.py",), backend="slurm", **request), environ, ID)

    return make


def allocation(nodes="h[1-2]", cpus="4(x2)", **more):
    return {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_CPUS_PER_NODE": cpus, **more}


def hosts(made):
    return [worker.host for worker in made.workers]


def words(made):
    return set(made.launch_command.argv)


def test_the_command_contains_everything_that_srun_would_otherwise_guess(make, bin_folder):
    made = make(allocation(SLURM_NTASKS="4"))
    assert made.launch_command.argv == (
        str(bin_folder / "srun"),
        "--nodes=2",
        "--ntasks=4",
        "--ntasks-per-node=2",
        "--cpus-per-task=2",
        "--distribution=block",
        "--nodelist=h1,h2",
        "--overlap",
        "--kill-on-bad-exit=1",
        "--wait=0",
        "--input=0",
        "--export=ALL",
        *AGENT_ARGV,
    )
    assert (made.launch_command.engine, made.launch_command.title) == ("slurm", "srun in Slurm job 7")
    assert made.launch_command.set_env == {"SRUN_CPUS_PER_TASK": "2"}


@pytest.mark.parametrize("given", ["0", "1", "all", "none"])
def test_srun_passes_the_input_on_to_the_ranks_that_are_to_read_it(make, given):
    made = make(allocation(SLURM_NTASKS="4"), stdin=given)
    assert f"--input={given}" in words(made)
    assert made.launch_command.passes_stdin


@pytest.mark.parametrize(
    ("found", "request_", "where"),
    [
        (allocation(SLURM_NTASKS="4"), {}, ["h1", "h1", "h2", "h2"]),
        (allocation(), {}, ["h1", "h2"]),
        (allocation(cpus="3,1", SLURM_NTASKS="4"), {}, ["h1", "h1", "h1", "h2"]),
        (allocation(cpus="3,1", SLURM_NTASKS="4"), {"hosts": 1}, ["h1", "h1", "h1"]),
        (allocation(SLURM_NTASKS="4"), {"hosts": 1}, ["h1", "h1"]),
        (allocation(SLURM_NTASKS="4"), {"processes": 3}, ["h1", "h1", "h2"]),
        (allocation(SLURM_NTASKS="4"), {"processes": 1}, ["h1"]),
        (allocation(), {"processes_per_host": 3}, ["h1", "h1", "h1", "h2", "h2", "h2"]),
        (allocation(), {"processes": 4, "processes_per_host": 4}, ["h1"] * 4),
        (allocation(cpus="64(x2)", SLURM_GPUS_PER_NODE="a100:8"), {}, ["h1"] * 8 + ["h2"] * 8),
        (allocation(SLURM_GPUS_ON_NODE="4"), {"devices_per_process": 2}, ["h1", "h1", "h2", "h2"]),
        (allocation(SLURM_GPUS_ON_NODE="4"), {"devices_per_process": 4}, ["h1", "h2"]),
        (allocation(SLURM_GPUS_ON_NODE="4"), {"platform": "cpu"}, ["h1", "h2"]),
        (allocation(), {"gpus_per_host": 2}, ["h1", "h1", "h2", "h2"]),
    ],
)
def test_ranks_are_expected_where_srun_puts_them(make, found, request_, where):
    made = make(found, **request_)
    assert hosts(made) == where
    assert {f"--ntasks={len(where)}", f"--nodes={len(set(where))}"} <= words(made)
    assert f"--nodelist={','.join(dict.fromkeys(where))}" in words(made)


def test_uneven_nodes_get_no_number_of_tasks_per_node(make):
    assert not any(
        word.startswith("--ntasks-per") for word in make(allocation(cpus="3,1", SLURM_NTASKS="4")).launch_command.argv
    )


@pytest.mark.parametrize(
    ("found", "request_", "each"),
    [
        (allocation(cpus="64(x2)"), {}, 64),
        (allocation(cpus="64(x2)"), {"processes": 16}, 8),
        (allocation(cpus="64,32"), {"processes": 3}, 32),
        (allocation(cpus="64(x2)"), {"cpus_per_process": 3}, 3),
        (allocation(cpus="64(x2)", SLURM_CPUS_PER_TASK="4", SLURM_NTASKS="2"), {}, 4),
        (allocation(cpus="64(x2)", SLURM_CPUS_PER_TASK="64", SLURM_NTASKS="2"), {"processes": 16}, 8),
    ],
)
def test_cpus_per_process_come_from_the_options_or_the_allocation(make, found, request_, each):
    assert f"--cpus-per-task={each}" in words(make(found, **request_))


@given(st.lists(st.integers(1, 16), min_size=1, max_size=6), st.data())
def test_whatever_is_started_fits_the_cpus_of_each_node(tmp_path_factory, cpus, data):
    folder = tmp_path_factory.getbasetemp()
    if not (folder / "srun").exists():
        (folder / "srun").symlink_to(shutil.which("true"))
    processes = data.draw(st.integers(1, sum(cpus)))
    found = allocation(",".join(f"n{i}" for i in range(len(cpus))), ",".join(map(str, cpus)))
    made = plan(Job(program=("p",), backend="slurm", processes=processes), {"PATH": str(folder), **found}, ID)
    each = int(made.launch_command.set_env["SRUN_CPUS_PER_TASK"])
    assert all(hosts(made).count(f"n{i}") * each <= limit for i, limit in enumerate(cpus))
    assert hosts(made) == sorted(hosts(made)) and len(made.workers) == processes


@pytest.mark.parametrize("mark", ["SLURM_GPUS_PER_TASK", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"])
def test_gpus_are_not_hidden_from_a_neighbour(make, mark):
    assert "--gpu-bind=none" in words(make(allocation(**{mark: "1"})))


def test_gpus_are_requested_per_node_only(make):
    made = make(allocation(SLURM_GPUS="16", SLURM_GPUS_PER_TASK="1"), gpus_per_host=2)
    assert {"--gpus-per-node=2", "--gpu-bind=none"} <= words(made)
    assert {"SLURM_GPUS", "SLURM_GPUS_PER_TASK"} <= set(made.launch_command.unset_env)


def test_a_binding_of_gpus_that_someone_chose_is_kept(make):
    made = make(allocation(SLURM_GPUS_ON_NODE="4", SLURM_GPU_BIND="closest"))
    assert not any(word.startswith("--gpu") for word in made.launch_command.argv)


def test_no_gpu_is_mentioned_where_there_is_none(make):
    assert not any(word.startswith("--gpu") for word in make(allocation()).launch_command.argv)


def test_variables_that_srun_would_read_are_taken_away(make):
    leaks = {"SLURM_NO_KILL": "1", "SLURM_LABELIO": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_EXCLUSIVE": "1"}
    kept = {"SLURM_MPI_TYPE": "pmix", "SLURM_CPU_BIND": "cores", "SLURM_CONF": "/c"}
    made = make(allocation(SLURM_TRES_PER_TASK="cpu=8", **leaks, **kept))
    assert set(made.launch_command.unset_env) == {*leaks, "SLURM_TRES_PER_TASK"}


def test_the_binding_of_a_step_is_not_handed_on(make):
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_NTASKS": "1"}
    made = make(allocation(SLURM_CPU_BIND="mask_cpu:0x1", SLURM_CPU_BIND_LIST="0x1", **step))
    assert {"SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST"} <= set(made.launch_command.unset_env)
    assert hosts(made) == ["h1", "h2"]


def test_resources_per_task_beyond_cpus_are_left_alone(make):
    assert make(allocation(SLURM_TRES_PER_TASK="cpu=8,gres/gpu=1")).launch_command.unset_env == ()


def test_further_arguments_come_last_and_win(make):
    argv = make(allocation(), slurm_args=("--mpi=pmix", "--wait=5")).launch_command.argv
    assert argv[-len(AGENT_ARGV) - 2 :] == ("--mpi=pmix", "--wait=5", *AGENT_ARGV)


def test_hosts_chosen_by_the_user_are_kept(make):
    made = make(allocation(nodes="h[1-3]", cpus="4(x3)"), hosts=2, slurm_args=("-w", "h3,h2"))
    assert hosts(made) == ["?", "?"] and not any(word.startswith("--nodelist=h1") for word in words(made))


def test_a_step_of_its_own_is_not_shared(make):
    assert "--overlap" not in words(make(allocation(), slurm_args=("--exclusive",)))


def test_no_value_of_a_variable_is_on_the_command_line(make):
    made = make(allocation(), env={"XLA_FLAGS": "--a=1,2 --b"})
    assert [word for word in made.launch_command.argv if "export" in word] == ["--export=ALL"]
    assert made.set_env["XLA_FLAGS"] == "--a=1,2 --b"


@pytest.mark.parametrize("more", [{"slurm_args": ("--overcommit",)}, {"slurm_args": ("-O",)}])
def test_cpus_may_be_shared_on_request(make, more):
    made = make(allocation(cpus="4,1"), processes=6, **more)
    assert hosts(made) == ["h1"] * 5 + ["h2"] and "--cpus-per-task=1" in words(made)


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
        (allocation(), {"hosts": 3}, "3 hosts are asked for, but Slurm job 7 has 2 nodes: h1, h2; give a smaller -N"),
        (allocation(cpus="4,1"), {"processes_per_host": 2}, "with 1 CPU a process, h1 4, h2 1 of them can run there"),
        (allocation(), {"slurm_args": ("-n3",)}, "--slurm-args -n3: jaxrun has to know it too; say it with -n"),
        (
            allocation(),
            {"slurm_args": ("--cpus-per-task=3",)},
            "--slurm-args --cpus-per-task=3: jaxrun has to know it too; say it with --cpus-per-process",
        ),
        (allocation(SLURM_HET_SIZE="2"), {}, "Slurm job 7 is heterogeneous"),
        (allocation(), {"only_ranks": (range(2, 3),)}, "names rank 2, but the ranks of this job are 0 to 1"),
    ],
)
def test_a_request_that_does_not_fit_is_refused_with_a_remedy(make, found, request_, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        make(found, **request_)


def test_outside_of_an_allocation_it_says_what_to_type(make):
    with pytest.raises(UsageError) as caught:
        make(hosts=2, gpus_per_host=8, partition="gpu", time_limit="2:00:00")
    message = str(caught.value)
    assert "SLURM_JOB_ID is not set" in message and "--submit" in message and "--sbatch job.sh" in message
    assert message.endswith(
        "salloc --nodes=2 --ntasks=16 --ntasks-per-node=8 --gpus-per-node=8 --partition=gpu --time=2:00:00"
    )


def test_without_srun_it_says_where_one_may_be(bin_folder, make):
    (bin_folder / "srun").unlink()
    with pytest.raises(UnavailableError, match=r"needs srun, which is not on PATH.*module load slurm") as caught:
        make(allocation())
    assert caught.value.exit_code == 69


def test_options_of_a_batch_job_inside_an_allocation_give_a_note(make):
    assert make(allocation(), partition="gpu", account="me").notes == (
        "--partition, --account cannot change Slurm job 7, which runs already",
    )
    assert make(allocation()).notes == ()


def test_spare_nodes_are_left_and_a_restart_names_the_node_of_each_rank(make):
    made = make(allocation("h[1-4]", "2(x4)", SLURM_NTASKS="8"), spares=1, max_restarts=1)
    assert (hosts(made), made.spare_hosts) == (["h1", "h1", "h2", "h2", "h3", "h3"], ("h4",))
    assert {"--nodelist=h1,h2,h3,h4", "--ntasks=8", "--ntasks-per-node=2", "--no-kill"} <= words(made)
    assert made.launch_command.agent_hosts == (*hosts(made), "h4", "h4") and made.agents.waiting == {6, 7}
    placement = ("h1", "h1", "h4", "h4", "h3", "h3")
    again = make(allocation("h[1-4]", "2(x4)", SLURM_NTASKS="8"), placement=placement, processes=6)
    assert hosts(again) == list(placement) and "--no-kill" in words(again)
    assert {"--distribution=arbitrary", "--nodelist=h1,h1,h4,h4,h3,h3", "--nodes=3", "--ntasks=6"} <= words(again)
    assert not any(word.startswith("--ntasks-per-node") for word in words(again))


def test_more_spares_than_nodes_are_refused(make):
    with pytest.raises(UsageError, match="-N 2 and --spares 1 take 3 hosts, and there are 2 hosts"):
        make(allocation(), hosts=2, spares=1, max_restarts=1)
