"""Kubernetes' operators and clouds that number the hosts of a job: one entry each, and nothing but its variables.

They start one process on each host, and only --hosts auto and `jaxrun attach` ask for them. Some of their variables
have the same names, so that the order of the table counts; and none has code of its own. So they share a file.
"""

from __future__ import annotations

import json

from jaxrun.protocol.names import COORDINATOR_ADDRESS, NUM_PROCESSES, PROCESS_ID
from jaxrun.spec.engines.engine import Engine, RankVariables
from jaxrun.spec.engines.host_variables import HostVariables, source


def _xpk_index(job: str, processes_in_job: str, index: str) -> str:
    return str(int(job) * int(processes_in_job) + int(index))


KUBEFLOW_TORCH = Engine(
    key="kubeflow-torch",
    title="Kubeflow Trainer's torch runtime",
    hosts=HostVariables(
        markers=("PET_NODE_RANK", "PET_NNODES"),
        index=source("PET_NODE_RANK"),
        count=source("PET_NNODES"),
        head=source("PET_MASTER_ADDR"),
        port=source("PET_MASTER_PORT"),
        processes=source("PET_NPROC_PER_NODE"),
        is_sure=True,
    ),
)
XPK_CPU = Engine(
    key="xpk-cpu",
    title="XPK on CPUs",
    hosts=HostVariables(
        markers=("JAX_PROCESS_COUNT", "PROCESSES_IN_JOB"),
        index=source("JOB_INDEX", "PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX", make=_xpk_index),
        count=source("JAX_PROCESS_COUNT"),
        head=source(COORDINATOR_ADDRESS),
    ),
)
# Kubeflow's JAX runtime and AXLearn may also run one process in each pod. Processes started inside inherit the pod's
# variables.
KUBEFLOW = Engine(
    key="kubeflow",
    title="Kubeflow Trainer's JAX runtime",
    ranks=RankVariables(
        rank=PROCESS_ID,
        size=NUM_PROCESSES,
        markers=(NUM_PROCESSES, COORDINATOR_ADDRESS),
        job=(COORDINATOR_ADDRESS,),
        head=COORDINATOR_ADDRESS,
    ),
    hosts=HostVariables(
        markers=(PROCESS_ID, NUM_PROCESSES),
        index=source(PROCESS_ID),
        count=source(NUM_PROCESSES),
        head=source(COORDINATOR_ADDRESS),
        is_sure=True,
    ),
    starts_ranks_again=True,
)
AXLEARN = Engine(
    key="axlearn",
    title="AXLearn",
    ranks=RankVariables(
        rank="PROCESS_ID",
        size="NUM_PROCESSES",
        markers=("NUM_PROCESSES", "DISTRIBUTED_COORDINATOR"),
        job=("DISTRIBUTED_COORDINATOR",),
        head="DISTRIBUTED_COORDINATOR",
    ),
    hosts=HostVariables(
        markers=("DISTRIBUTED_COORDINATOR",),
        index=source("PROCESS_ID"),
        count=source("NUM_PROCESSES"),
        head=source("DISTRIBUTED_COORDINATOR"),
    ),
    starts_ranks_again=True,
)
LEADER_WORKER_SET = Engine(
    key="leader-worker-set",
    title="LeaderWorkerSet",
    hosts=HostVariables(
        markers=("LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"),
        index=source("LWS_WORKER_INDEX"),
        count=source("LWS_GROUP_SIZE"),
        head=source("LWS_LEADER_ADDRESS"),
        is_sure=True,
    ),
)
SKYPILOT = Engine(
    key="skypilot",
    title="SkyPilot",
    hosts=HostVariables(
        markers=("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
        index=source("SKYPILOT_NODE_RANK"),
        count=source("SKYPILOT_NUM_NODES"),
        head=source("SKYPILOT_NODE_IPS", make=lambda ips: ips.split()[0]),
        is_sure=True,
    ),
)
DSTACK = Engine(
    key="dstack",
    title="dstack",
    hosts=HostVariables(
        markers=("DSTACK_NODE_RANK", "DSTACK_NODES_NUM"),
        index=source("DSTACK_NODE_RANK"),
        count=source("DSTACK_NODES_NUM"),
        head=source("DSTACK_MASTER_NODE_IP"),
        is_sure=True,
    ),
)
LEPTON = Engine(
    key="lepton",
    title="Lepton",
    hosts=HostVariables(
        markers=("LEPTON_JOB_WORKER_INDEX", "LEPTON_JOB_TOTAL_WORKERS"),
        index=source("LEPTON_JOB_WORKER_INDEX"),
        count=source("LEPTON_JOB_TOTAL_WORKERS"),
        head=source(
            "LEPTON_JOB_SERVICE_PREFIX", "LEPTON_SUBDOMAIN", make=lambda prefix, domain: f"{prefix}-0.{domain}"
        ),
        is_sure=True,
    ),
)
SAGEMAKER = Engine(
    key="sagemaker",
    title="SageMaker",
    hosts=HostVariables(
        markers=("SM_HOSTS", "SM_CURRENT_HOST"),
        index=source("SM_HOSTS", "SM_CURRENT_HOST", make=lambda hosts, own: str(json.loads(hosts).index(own))),
        count=source("SM_HOSTS", make=lambda hosts: str(len(json.loads(hosts)))),
        head=source("SM_HOSTS", make=lambda hosts: str(json.loads(hosts)[0])),
    ),
)
RUNPOD = Engine(
    key="runpod",
    title="RunPod",
    hosts=HostVariables(
        markers=("PRIMARY_ADDR",),
        index=source("NODE_RANK"),
        count=source("NUM_NODES"),
        head=source("PRIMARY_ADDR"),
        port=source("PRIMARY_PORT"),
        processes=source("NUM_TRAINERS"),
    ),
)
XPK_GPU = Engine(
    key="xpk-gpu",
    title="XPK on GPUs",
    hosts=HostVariables(
        markers=("NODE_RANK", "NNODES"),
        index=source("NODE_RANK"),
        count=source("NNODES"),
        head=source(COORDINATOR_ADDRESS),
        port=source("JAX_COORDINATOR_PORT"),
    ),
)
PYTORCH = Engine(
    key="pytorch",
    title="Volcano's plugin pytorch, PAI or another platform with RANK for hosts",
    hosts=HostVariables(
        markers=("MASTER_ADDR",),
        index=source("RANK"),
        count=source("WORLD_SIZE"),
        head=source("MASTER_ADDR"),
        port=source("MASTER_PORT"),
        processes=source("NPROC_PER_NODE"),
        excluded=("LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    ),
)
VOLCANO = Engine(
    key="volcano",
    title="Volcano",
    hosts=HostVariables(
        markers=("VC_TASK_INDEX",),
        index=source("VC_TASK_INDEX"),
        count=source("VC_*_HOSTS", make=lambda hosts: str(len(hosts.split(",")))),
        head=source("VC_*_HOSTS", make=lambda hosts: str(hosts.split(",")[0])),
    ),
)
