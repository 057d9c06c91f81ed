"""The table of engines: every product that starts processes for jobs, and how jaxrun recognizes it.

A new engine is one file in this directory, which makes an Engine (engine.py), and one row here. A row has what must be
known before the file is imported, because a job on one machine, and an agent, imports none that it does not need.
lookup.py imports the files; rank_info.py and host_info.py read the rank and the host of a process by them. BACKENDS,
what --backend accepts, is a view of this table (spec/backends).
"""

from __future__ import annotations

from msgspec import Struct


class EngineRow(Struct, frozen=True):
    """A row of the table.

    where:    "module:NAME" of the Engine
    marks:    variables of which its processes have one; () if it is not recognized by variables
    says:     texts of which the output of its `mpirun --version` has one; () if it has no mpirun
    kept:     beginnings of variables that belong to one of its processes, and must not reach others on other hosts
    options:  groups of options (Option.needs) that --backend supports for it; None if it is no choice of --backend
    plan:     the module with its `plan(job, environ, job_id) -> Plan`, if that is not in the engine's own file, which
              agents import if it has `marks`. The `plan` of a backend with spare hosts also takes a Placement
    scheduler: "module:NAME" of the Scheduler that runs batch scripts (backends/batch_script.py); empty if it runs none
    """

    where: str
    marks: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    options: tuple[str, ...] | None = None
    plan: str = ""
    scheduler: str = ""

    @property
    def module(self) -> str:
        return self.where.partition(":")[0]


HOST_OPTIONS = ("hosts", "network")
HOST_LIST = "host list"  # -H and --hostfile
SPARES = "spares"  # its `plan` can start ranks on given hosts
_REQUESTS = ("GPUs", "submit")  # requests to a scheduler
_OF_BATCH = ("submit", "cores", "time limit", "account", "requeue")  # … that runs batch scripts
_HERE = "jaxrun.spec.engines"
_OF_HYDRA = ("PMI_", "HYDRA_", "MPI_LOCAL")

# By key. The first row whose engine has started a process counts: each stands before those whose variables its
# processes may inherit. Slurm stands after all MPIs: mpirun's daemons are tasks of a Slurm step of their own, and the
# processes that they start inherit that step's numbers. An indexed Job of Kubernetes, which any pod may be, is last.
ENGINES = {
    "ssh": EngineRow(f"{_HERE}.ssh:SSH", options=(*HOST_OPTIONS, HOST_LIST, SPARES, "fewer hosts", "ssh")),
    "by hand": EngineRow(f"{_HERE}.by_hand:BY_HAND"),
    "open-mpi": EngineRow(
        f"{_HERE}.open_mpi:OPEN_MPI",
        ("OMPI_COMM_WORLD_RANK",),
        says=("(Open MPI)", "(OpenRTE)"),
        kept=("OMPI_", "PMIX_", "PRTE_"),
    ),
    "intel-mpi": EngineRow(
        f"{_HERE}.intel_mpi:INTEL_MPI", ("PMI_RANK",), says=("Intel(R) MPI Library",), kept=_OF_HYDRA
    ),
    "mpich": EngineRow(f"{_HERE}.mpich:MPICH", ("PMI_RANK",), says=("HYDRA build details",), kept=_OF_HYDRA),
    "mvapich": EngineRow(f"{_HERE}.mvapich:MVAPICH", ("MV2_COMM_WORLD_RANK",)),
    "flux": EngineRow(f"{_HERE}.flux:FLUX", ("FLUX_TASK_RANK",)),
    "pals": EngineRow(f"{_HERE}.pals:PALS", ("PALS_RANKID",)),
    "slurm": EngineRow(
        f"{_HERE}.slurm:SLURM",
        ("SLURM_PROCID", "SLURM_JOB_ID"),
        kept=("SLURM_",),
        options=(*HOST_OPTIONS, SPARES, "fewer hosts", "slurm", "GPUs", *_OF_BATCH),
        plan="jaxrun.spec.backends.srun",
        scheduler="jaxrun.spec.backends.sbatch:SLURM",
    ),
    "pbs": EngineRow(
        f"{_HERE}.pbs:PBS",
        ("PBS_NODEFILE",),
        kept=("PBS_NODEFILE", "PBS_NODENUM", "PBS_TASKNUM", "PBS_VNODENUM"),
        options=(*HOST_OPTIONS, HOST_LIST, "mpirun", "GPUs", "queue", "qsub", *_OF_BATCH),
        plan="jaxrun.spec.backends.pbs_job",
        scheduler="jaxrun.spec.backends.pbs_job:PBS",
    ),
    "sge": EngineRow(
        f"{_HERE}.grid_engine:GRID_ENGINE",
        ("PE_HOSTFILE",),
        kept=("PE_HOSTFILE", "SGE_JOB_SPOOL_DIR", "SGE_STD", "JOB_SCRIPT"),
        options=(*HOST_OPTIONS, HOST_LIST, "queue", "qsub", "parallel environment", *_OF_BATCH),
        plan="jaxrun.spec.backends.grid_engine_job",
        scheduler="jaxrun.spec.backends.grid_engine_job:GRID_ENGINE",
    ),
    "lsf": EngineRow(f"{_HERE}.lsf:LSF", ("LSB_MCPU_HOSTS",)),
    "kubeflow-torch": EngineRow(f"{_HERE}.platforms:KUBEFLOW_TORCH", ("PET_NODE_RANK", "PET_NNODES")),
    "xpk-cpu": EngineRow(f"{_HERE}.platforms:XPK_CPU", ("JAX_PROCESS_COUNT", "PROCESSES_IN_JOB")),
    "kubeflow": EngineRow(f"{_HERE}.platforms:KUBEFLOW", ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES")),
    "axlearn": EngineRow(f"{_HERE}.platforms:AXLEARN", ("PROCESS_ID", "DISTRIBUTED_COORDINATOR")),
    "leader-worker-set": EngineRow(f"{_HERE}.platforms:LEADER_WORKER_SET", ("LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS")),
    "skypilot": EngineRow(f"{_HERE}.platforms:SKYPILOT", ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS")),
    "dstack": EngineRow(f"{_HERE}.platforms:DSTACK", ("DSTACK_NODE_RANK", "DSTACK_NODES_NUM")),
    "lepton": EngineRow(f"{_HERE}.platforms:LEPTON", ("LEPTON_JOB_WORKER_INDEX", "LEPTON_JOB_TOTAL_WORKERS")),
    "sagemaker": EngineRow(f"{_HERE}.platforms:SAGEMAKER", ("SM_HOSTS", "SM_CURRENT_HOST")),
    "runpod": EngineRow(f"{_HERE}.platforms:RUNPOD", ("PRIMARY_ADDR",)),
    "xpk-gpu": EngineRow(f"{_HERE}.platforms:XPK_GPU", ("NODE_RANK", "NNODES")),
    "pytorch": EngineRow(f"{_HERE}.platforms:PYTORCH", ("MASTER_ADDR",)),
    "volcano": EngineRow(f"{_HERE}.platforms:VOLCANO", ("VC_TASK_INDEX",)),
    "kubernetes": EngineRow(
        f"{_HERE}.kubernetes:KUBERNETES",
        ("JOB_COMPLETION_INDEX",),
        options=(*HOST_OPTIONS, "fewer hosts", "kubernetes", "queue", *_REQUESTS),
    ),
}
