"""The rank of a process by its environment. The environments are real ones, reduced to the relevant variables.

They were taken on two hosts with Open MPI 4.1.8 and 5.0.11, MPICH 5.0.2, Intel MPI 2021.18.1 and Slurm 22.05.8; those
of MVAPICH, PALS and Flux are made up from what they document.
"""

import re

import pytest

from jaxrun.errors import ProtocolError, UnavailableError, UsageError
from jaxrun.spec.engines.lookup import all_engines
from jaxrun.spec.engines.rank_info import (
    BY_OPTIONS,
    RankInfo,
    detect_rank_info,
    find_rank_info,
    read_rank_info,
    refuse_task_of_several,
)

ENGINES = [engine for engine in all_engines() if engine.ranks is not None]
EACH = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.key)


def env(text):
    return dict(word.split("=", 1) for word in text.split())


PROXY = "/usr/bin/hydra_pmi_proxy --control-port h1:46095 --rmk user --launcher ssh --demux poll --pgid 0 --proxy-id"
MPICH_ON_FIRST = (
    f"{PROXY} 0".split(),
    ["/usr/bin/mpiexec.hydra", "-hosts", "h1", "h2", "-n", "3", "jaxrun", "attach", "train.py"],
)
MPICH_ON_SECOND = (f"{PROXY} 1".split(), ["/bin/sh", "-c", f'"{PROXY}" 1'])
INTEL_PROXY = (["/usr/lib/impi/bin//hydra_pmi_proxy", "--usize", "-1", "--auto-cleanup", "1", "--abort-signal", "9"],)

OPEN_MPI_5 = env(
    "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_NODE_RANK=0 OMPI_COMM_WORLD_RANK=2 "
    "OMPI_COMM_WORLD_SIZE=3 OMPI_VERSION=5.0.11 PMIX_HOSTNAME=h2 PMIX_NAMESPACE=prterun-h1-8271@1 PMIX_RANK=2 "
    "PMIX_VERSION=5.0.11rc1 PRTE_LAUNCHED=1"
)
OPEN_MPI_4 = env(
    "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_LOCAL_SIZE=1 OMPI_COMM_WORLD_NODE_RANK=0 OMPI_COMM_WORLD_RANK=2 "
    "OMPI_COMM_WORLD_SIZE=3 OMPI_UNIVERSE_SIZE=3 PMIX_HOSTNAME=h2 PMIX_ID=2828140545.2 PMIX_NAMESPACE=2828140545 "
    "PMIX_RANK=2 PMIX_VERSION=3.2.5a1"
)
MPICH = env("MPI_LOCALNRANKS=1 MPI_LOCALRANKID=0 PMI_FD=9 PMI_HOSTNAME=h2 PMI_RANK=2 PMI_SIZE=3")
INTEL = env(
    "HYDRA_LAUNCH_TYPE=2 I_MPI_HYDRA_UUID=cb280000-0070-d1cb-c060-0600856e1035 MPI_LOCALNRANKS=1 "
    "MPI_LOCALRANKID=0 PMI_FD=9 PMI_RANK=2 PMI_SIZE=3"
)
KUBEFLOW = env("JAX_PROCESS_ID=2 JAX_NUM_PROCESSES=3 JAX_COORDINATOR_ADDRESS=train-node-0-0.train:29500")
AXLEARN = env("PROCESS_ID=2 NUM_PROCESSES=3 DISTRIBUTED_COORDINATOR=train-job-0-0.train:8080")
# The step in which mpirun starts its daemons, inside of: salloc -N2 mpirun -n 4
DAEMONS_STEP = env(
    "SLURM_GTIDS=1 SLURM_JOB_ID=12 SLURM_JOB_NODELIST=h[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 "
    "SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_PROCID=1 SLURM_STEP_ID=0 "
    "SLURM_STEP_NODELIST=h[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2)"
)
TASK = env(
    "SLURM_GTIDS=2 SLURM_JOB_ID=7 SLURM_JOB_NODELIST=h[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 "
    "SLURM_NNODES=2 SLURM_NODEID=1 SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_PROCID=2 SLURM_STEP_ID=0 "
    "SLURM_STEP_NODELIST=h[1-2] SLURM_STEP_NUM_NODES=2 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1"
)
# srun -n1 -N1 in a job of three tasks on two hosts
SMALL_STEP = env(
    "SLURM_JOB_ID=17 SLURM_JOB_NODELIST=h[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 SLURM_NNODES=1 SLURM_NODEID=0 "
    "SLURM_NODELIST=h[1-2] SLURM_NPROCS=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=1 SLURM_STEP_NODELIST=h1 "
    "SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_TASKS_PER_NODE=1"
)
BATCH = env(
    "SLURM_GTIDS=0 SLURM_JOB_ID=17 SLURM_JOB_NODELIST=h[1-2] SLURM_JOB_NUM_NODES=2 SLURM_LOCALID=0 "
    "SLURM_NNODES=2 SLURM_NODEID=0 SLURM_NODELIST=h[1-2] SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_PROCID=0 "
    "SLURM_TASKS_PER_NODE=2,1"
)
# sbatch -n3 typed in: srun --pty bash
BATCH_FROM_STEP = BATCH | env(
    "SLURM_STEP_ID=0 SLURM_STEP_NODELIST=h3 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1"
)
ALLOCATION = env(
    "SLURM_JOB_ID=11 SLURM_JOB_NODELIST=h[1-2] SLURM_JOB_NUM_NODES=2 SLURM_NNODES=2 SLURM_NODELIST=h[1-2] "
    "SLURM_TASKS_PER_NODE=1(x2)"
)
# salloc of a cluster with LaunchParameters=use_interactive_step
INTERACTIVE_STEP = env(
    "SLURM_JOB_ID=89 SLURM_JOB_NODELIST=h[1,3] SLURM_JOB_NUM_NODES=2 SLURM_NNODES=1 SLURM_NPROCS=1 SLURM_NTASKS=1 "
    "SLURM_PROCID=0 SLURM_STEP_ID=4294967290 SLURM_STEP_NODELIST=h1 SLURM_STEP_NUM_NODES=1 SLURM_STEP_NUM_TASKS=1"
)
PMI2 = env("PMI_FD=11 PMI_JOBID=7.0 PMI_RANK=2 PMI_SIZE=3 SLURM_MPI_TYPE=pmi2")
PMIX = env("PMIX_HOSTNAME=h2 PMIX_NAMESPACE=slurm.pmix.7.0 PMIX_RANK=2 PMIX_VERSION=4.2.2rc2 SLURM_MPI_TYPE=pmix")
CRAY = env("PALS_APID=7.0 PALS_NODEID=1 PALS_RANKID=2 SLURM_MPI_TYPE=cray_shasta")
FLUX = env("FLUX_JOB_ID=f2zKcFRB FLUX_JOB_NNODES=2 FLUX_JOB_SIZE=3 FLUX_TASK_LOCAL_ID=0 FLUX_TASK_RANK=2")
FLUX_PMI = env("PMI_FD=20 PMI_RANK=2 PMI_SIZE=3")
PALS = env("PALS_APID=5d1b2c PALS_LOCAL_RANKID=0 PALS_NODEID=1 PALS_RANKID=2 PMI_LOCAL_RANK=0 PMI_RANK=2 PMI_SIZE=3")
PALS_FIRST = PALS | env("PALS_RANKID=0 PMI_RANK=0 PMI_SIZE=2")
MVAPICH = env("MPIRUN_HOST=h1 MPIRUN_ID=4711 MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_RANK=2 MV2_COMM_WORLD_SIZE=3")

PLACED = {
    "Open MPI 5": (OPEN_MPI_5, (), "open-mpi", "prterun-h1-8271@1"),
    "Open MPI 4": (OPEN_MPI_4, (), "open-mpi", "2828140545"),
    "MPICH": (MPICH, MPICH_ON_SECOND, "mpich", "h1:46095"),
    "MPICH behind a script": (MPICH, (["/bin/sh", "run.sh"], *MPICH_ON_SECOND), "mpich", "h1:46095"),
    "MPICH, parent unknown": (MPICH, (), "mpich", ""),
    "Intel MPI": (INTEL, INTEL_PROXY, "intel-mpi", "cb280000-0070-d1cb-c060-0600856e1035"),
    "MVAPICH": (MVAPICH, (), "mvapich", "h1.4711"),
    "PALS": (PALS, (), "pals", "5d1b2c"),
    "Flux": (FLUX | FLUX_PMI, (), "flux", "f2zKcFRB"),
    "Flux inside of PALS": (PALS_FIRST | FLUX | FLUX_PMI, (), "flux", "f2zKcFRB"),
    "Flux inside of Slurm": (DAEMONS_STEP | FLUX | FLUX_PMI, (), "flux", "f2zKcFRB"),
    "srun": (TASK, (["slurmstepd: [7.0]"],), "slurm", "7.0.0"),
    "srun of a job that was requeued": (TASK | env("SLURM_RESTART_COUNT=2"), (), "slurm", "7.0.2"),
    "srun --mpi=pmi2": (TASK | PMI2, (), "slurm", "7.0.0"),
    "srun --mpi=pmix": (TASK | PMIX, (), "slurm", "7.0.0"),
    "srun --mpi=cray_shasta": (TASK | CRAY, (), "slurm", "7.0.0"),
    "Open MPI 5 inside of Slurm": (DAEMONS_STEP | OPEN_MPI_5, (), "open-mpi", "prterun-h1-8271@1"),
    "Open MPI 4 inside of Slurm": (DAEMONS_STEP | OPEN_MPI_4, (), "open-mpi", "2828140545"),
    "MPICH inside of Slurm": (DAEMONS_STEP | MPICH, MPICH_ON_SECOND, "mpich", "h1:46095"),
    "Intel MPI inside of Slurm": (DAEMONS_STEP | INTEL, (), "intel-mpi", "cb280000-0070-d1cb-c060-0600856e1035"),
}
NOWHERE = {
    "nothing at all": {},
    "a batch script": BATCH,
    "a batch script submitted inside of a step": BATCH_FROM_STEP,
    "the shell of salloc": ALLOCATION,
    "the shell of salloc as a step": INTERACTIVE_STEP,
    "a rank without the sign of Hydra": env("PMI_RANK=0 PMI_SIZE=4"),
}


@pytest.mark.parametrize("case", PLACED)
def test_every_engine_is_distinguished_from_the_others_and_read_without_looking_at_them(case):
    environ, ancestors, engine, job = PLACED[case]
    assert detect_rank_info(environ, ancestors) == RankInfo(engine, 2, 3, job)
    place = read_rank_info(engine, environ | env("JAXRUN_RANK=0 JAXRUN_SIZE=1"))
    assert (place.engine, place.rank, place.size) == (engine, 2, 3)


def test_a_job_of_mpich_is_named_alike_on_all_hosts_and_steps_of_slurm_are_jobs_of_their_own():
    first = detect_rank_info(MPICH | env("PMI_HOSTNAME=h1 PMI_RANK=0"), MPICH_ON_FIRST)
    assert first.job_key == detect_rank_info(MPICH, MPICH_ON_SECOND).job_key == "h1:46095"
    assert detect_rank_info(SMALL_STEP) == RankInfo("slurm", 0, 1, "17.1.0")
    assert detect_rank_info(SMALL_STEP | env("SLURM_STEP_ID=2")).job_key == "17.2.0"


@pytest.mark.parametrize("case", NOWHERE)
def test_variables_that_name_no_rank_are_not_taken_for_one(case):
    assert find_rank_info(NOWHERE[case]) is None
    with pytest.raises(UsageError) as refused:
        detect_rank_info(NOWHERE[case])
    lines = str(refused.value).splitlines()
    for engine in ENGINES:
        listed = [line for line in lines if line.startswith(f"  {engine.title}  ")]
        assert len(listed) == 1 and engine.ranks.rank in listed[0]
    hint = r"This is Slurm job (\d+), .* prepend srun: srun jaxrun attach PROGRAM"
    assert re.findall(hint, str(refused.value)) == [*filter(None, [NOWHERE[case].get("SLURM_JOB_ID")])]
    assert lines[-1] == "or give its rank: jaxrun attach --rank 3 --size 8 --head host:port PROGRAM"


@pytest.mark.parametrize("outer", [{}, OPEN_MPI_5, TASK])
def test_a_worker_cannot_attach_to_another_job(outer):
    with pytest.raises(UsageError, match=r"already rank 3 of 8 of a jaxrun job \(JAXRUN_RANK is set\)"):
        find_rank_info(outer | env("JAXRUN_RANK=3 JAXRUN_SIZE=8"))


def test_a_heterogeneous_job_is_refused_unless_an_mpirun_in_it_has_started_the_ranks():
    environ = TASK | env("SLURM_HET_SIZE=2")
    for read in (detect_rank_info, lambda environ: read_rank_info("slurm", environ)):
        with pytest.raises(UsageError, match=r"job 7 is heterogeneous \(SLURM_HET_SIZE=2\)"):
            read(environ)
    assert detect_rank_info(DAEMONS_STEP | OPEN_MPI_5 | env("SLURM_HET_SIZE=2")).engine == "open-mpi"
    assert detect_rank_info(TASK | env("SLURM_HET_SIZE=1")).engine == "slurm"


STARTED_BY = {
    "open-mpi": "mpirun",
    "intel-mpi": "mpirun",
    "mpich": "mpirun",
    "mvapich": "mpirun",
    "flux": "flux run",
    "pals": "mpiexec",
    "slurm": "srun",
}


@pytest.mark.parametrize("case", PLACED)
def test_a_job_is_not_started_in_one_of_several_tasks_where_attach_was_forgotten(case):
    environ, ancestors, engine, _ = PLACED[case]
    with pytest.raises(UsageError, match=r"as number 2 of 3 .*, and each would run a job of its own") as refused:
        refuse_task_of_several(environ, lambda: ancestors, ["--tag", "a b", "x.py"])
    command = f"{STARTED_BY[engine]} -n 3 jaxrun"
    assert f"For one job of all, type: {command} attach --tag 'a b' x.py. " in str(refused.value)
    assert str(refused.value).endswith(f"give its number of processes: {command} -n 1 --tag 'a b' x.py")


# sbatch -n3 typed in: srun -n3 --pty bash
BATCH_FROM_EQUAL_STEP = BATCH_FROM_STEP | env("SLURM_STEP_NUM_TASKS=3")
BELOW_BATCH = (["bash", "run.sh"], ["/bin/bash", "/var/spool/slurmd/job00017/slurm_script"], ["slurmstepd: [17.batch]"])
ALONE = {
    **{case: (environ, ()) for case, environ in NOWHERE.items()},
    "mpirun -n 1": (OPEN_MPI_5 | env("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1"), ()),
    "mpiexec -n 1": (MPICH | env("PMI_RANK=0 PMI_SIZE=1"), MPICH_ON_FIRST),
    "srun -n 1": (SMALL_STEP, ()),
    "started by a rank": (OPEN_MPI_5 | env("JAXRUN_RANK=2 JAXRUN_SIZE=3"), ()),
    "a batch script submitted inside of a step of as many tasks": (BATCH_FROM_EQUAL_STEP, BELOW_BATCH),
    "a heterogeneous job": (TASK | env("SLURM_HET_SIZE=2"), ()),
    "numbers that make no sense": (OPEN_MPI_5 | env("OMPI_COMM_WORLD_SIZE=many"), ()),
}


@pytest.mark.parametrize("case", ALONE)
def test_a_job_may_be_started_in_a_process_that_is_alone(case):
    environ, ancestors = ALONE[case]
    refuse_task_of_several(environ, lambda: ancestors, ["x.py"])


def test_a_batch_script_is_no_task_of_the_step_in_which_it_was_submitted():
    assert find_rank_info(BATCH_FROM_EQUAL_STEP, BELOW_BATCH) is None
    assert find_rank_info(TASK, (["bash", "run.sh"], ["slurmstepd: [7.0]"])) == RankInfo("slurm", 2, 3, "7.0.0")
    assert find_rank_info(DAEMONS_STEP | OPEN_MPI_5, BELOW_BATCH) == RankInfo("open-mpi", 2, 3, "prterun-h1-8271@1")


ENGINE_AND_ENV = {
    "open-mpi": OPEN_MPI_5,
    "intel-mpi": INTEL,
    "mpich": MPICH,
    "mvapich": MVAPICH,
    "flux": FLUX,
    "pals": PALS,
    "slurm": TASK,
    "kubeflow": KUBEFLOW,
    "axlearn": AXLEARN,
}


@pytest.mark.parametrize("value", [None, "", "x", "-1", "1.0", " 1", "0x1", "\u0661", "9" * 30])
@EACH
def test_a_missing_variable_and_an_invalid_number_are_named(engine, value):
    for name in (engine.ranks.rank, engine.ranks.size):
        environ = ENGINE_AND_ENV[engine.key] | {name: value}
        with pytest.raises(UnavailableError) as refused:
            read_rank_info(engine.key, {key: text for key, text in environ.items() if text is not None})
        missing = f"{name} is not set, but {engine.title.partition(' (')[0]}"
        assert str(refused.value).startswith(missing if value is None else f"{name}={value!r} is not a whole number")


@EACH
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (19, 20), (1, 1), (0, 0), (5, 4)])
def test_a_rank_is_less_than_the_size(engine, rank, size):
    environ = ENGINE_AND_ENV[engine.key] | {engine.ranks.rank: str(rank), engine.ranks.size: str(size)}
    if rank < size:
        place = read_rank_info(engine.key, environ)
        assert (place.rank, place.size) == (rank, size)
    else:
        with pytest.raises(UnavailableError, match=f"{engine.ranks.rank}={rank}, .* {engine.ranks.size}={size}"):
            read_rank_info(engine.key, environ)


@pytest.mark.parametrize(
    ("environ", "head"), [(KUBEFLOW, "train-node-0-0.train:29500"), (AXLEARN, "train-job-0-0.train:8080")]
)
def test_a_pod_that_is_one_process_has_its_rank_and_the_head_in_three_variables(environ, head):
    info = detect_rank_info(environ)
    assert (info.rank, info.size, info.job_key, info.head) == (2, 3, head, head)
    assert all(find_rank_info({key: text for key, text in environ.items() if key != name}) is None for name in environ)
    with pytest.raises(UsageError, match=r"type: jaxrun attach x\.py\. For a job in each, .*: jaxrun -n 1 x\.py$"):
        refuse_task_of_several(environ, tuple, ["x.py"])
    inside = detect_rank_info(environ | OPEN_MPI_5)
    assert (inside.engine, inside.head) == ("open-mpi", "")


def test_of_a_pod_whose_variables_are_half_set_the_missing_ones_are_named():
    with pytest.raises(
        UsageError, match="sets JAX_PROCESS_ID and JAX_NUM_PROCESSES, but JAX_COORDINATOR_ADDRESS is not"
    ):
        detect_rank_info({"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"}, (), None, None)
    with pytest.raises(
        UsageError, match="AXLearn sets PROCESS_ID, but NUM_PROCESSES and DISTRIBUTED_COORDINATOR are not"
    ):
        detect_rank_info({"PROCESS_ID": "1"}, (), None, None)


def test_an_unknown_engine_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="there is no engine 'lam'; known are ssh, by hand, open-mpi, "):
        read_rank_info("lam", {})


def test_given_numbers_must_agree_with_the_environment():
    place = detect_rank_info(OPEN_MPI_5)
    for rank, size in ((None, None), (2, None), (None, 3), (2, 3)):
        assert detect_rank_info(OPEN_MPI_5, (), rank, size) == place
    with pytest.raises(UsageError) as refused:
        detect_rank_info(OPEN_MPI_5, (), 1, 3)
    assert str(refused.value).startswith("--rank 1 contradicts OMPI_COMM_WORLD_RANK=2, with which Open MPI started")
    with pytest.raises(UsageError, match=r"--size 4 contradicts OMPI_COMM_WORLD_SIZE=3, .* -u OMPI_COMM_WORLD_RANK"):
        detect_rank_info(OPEN_MPI_5, (), 2, 4)


def test_without_an_engine_both_numbers_are_needed():
    assert detect_rank_info({}, (), 3, 8) == RankInfo(BY_OPTIONS, 3, 8, "")
    for rank, size, given_ in ((3, None, "--rank 3"), (None, 8, "--size 8")):
        with pytest.raises(UsageError, match=f"needs --rank and --size; only {given_} is given"):
            detect_rank_info({}, (), rank, size)
    for rank, size in ((8, 8), (-1, 8), (0, 0)):
        with pytest.raises(UsageError, match=f"--rank {rank} is not a rank of a job of --size {size}"):
            detect_rank_info({}, (), rank, size)


@EACH
def test_hiding_the_variable_of_the_rank_hides_the_engine(engine):
    """The remedy that a contradiction names."""
    environ = dict(ENGINE_AND_ENV[engine.key])
    assert detect_rank_info(environ).engine == engine.key
    del environ[engine.ranks.rank]
    assert find_rank_info(environ) is None
