"""Which host of a job this is, from the variables of pods and clouds (--hosts auto)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxrun.cli.make_job import make_job, without_effect
from jaxrun.errors import UsageError
from jaxrun.spec.backends import HOSTS
from jaxrun.spec.engines.host_info import HostInfo, find_host_info, find_platform, platforms
from jaxrun.spec.engines.lookup import all_engines


def env(text):
    return dict(word.split("=", 1) for word in text.split())


JOB = env("JOB_COMPLETION_INDEX=2 HOSTNAME=train-2 KUBERNETES_SERVICE_HOST=10.0.0.1")
FROM_MANIFEST = env("JAXRUN_HOSTS=4 JAXRUN_HEAD=train-0.train:7777")
PLATFORMS = {
    "Kubeflow Trainer's torch runtime": (
        JOB
        | env("PET_NNODES=4 PET_NODE_RANK=2 PET_NPROC_PER_NODE=8 PET_MASTER_ADDR=t-node-0-0.t PET_MASTER_PORT=29400"),
        HostInfo(2, 4, "t-node-0-0.t:29400", 8),
    ),
    "XPK on CPUs": (
        env(
            "JOB_INDEX=1 JOB_COMPLETION_INDEX=0 PROCESSES_IN_JOB=2 JAX_PROCESS_COUNT=4 JAX_COORDINATOR_ADDRESS=x-0-0.x"
        ),
        HostInfo(2, 4, "x-0-0.x:7777"),
    ),
    "Kubeflow Trainer's JAX runtime": (
        JOB | env("JAX_NUM_PROCESSES=4 JAX_PROCESS_ID=2 JAX_COORDINATOR_ADDRESS=t-node-0-0.t:29500"),
        HostInfo(2, 4, "t-node-0-0.t:29500"),
    ),
    "AXLearn": (
        JOB | env("DISTRIBUTED_COORDINATOR=a-job-0-0.a:8080 NUM_PROCESSES=4 PROCESS_ID=2"),
        HostInfo(2, 4, "a-job-0-0.a:8080"),
    ),
    "LeaderWorkerSet": (
        env("LWS_LEADER_ADDRESS=l-0.l.default LWS_GROUP_SIZE=4 LWS_WORKER_INDEX=2"),
        HostInfo(2, 4, "l-0.l.default:7777"),
    ),
    "SkyPilot": (
        env("SKYPILOT_NODE_RANK=1 SKYPILOT_NUM_NODES=2 SKYPILOT_NUM_GPUS_PER_NODE=8")
        | {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"},
        HostInfo(1, 2, "10.0.0.4:7777"),
    ),
    "dstack": (
        env("DSTACK_NODE_RANK=1 DSTACK_NODES_NUM=2 DSTACK_MASTER_NODE_IP=fd00::4 DSTACK_GPUS_PER_NODE=8"),
        HostInfo(1, 2, "[fd00::4]:7777"),
    ),
    "Lepton": (
        env("LEPTON_JOB_TOTAL_WORKERS=2 LEPTON_JOB_WORKER_INDEX=1 LEPTON_JOB_SERVICE_PREFIX=l LEPTON_SUBDOMAIN=l.svc"),
        HostInfo(1, 2, "l-0.l.svc:7777"),
    ),
    "SageMaker": (
        {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"},
        HostInfo(1, 2, "algo-1:7777"),
    ),
    "RunPod": (
        env("PRIMARY_ADDR=10.65.0.2 MASTER_ADDR=10.65.0.2 PRIMARY_PORT=29400 NODE_RANK=1 NUM_NODES=2 NUM_TRAINERS=8"),
        HostInfo(1, 2, "10.65.0.2:29400", 8),
    ),
    "XPK on GPUs": (
        JOB
        | env("NODE_RANK=2 NNODES=4 GPUS_PER_NODE=8 JAX_COORDINATOR_PORT=6002 JAX_COORDINATOR_ADDRESS=x-slice-0-0.x"),
        HostInfo(2, 4, "x-slice-0-0.x:6002"),
    ),
    "Volcano's plugin pytorch, PAI or another platform with RANK for hosts": (
        env("MASTER_ADDR=p-master-0 MASTER_PORT=23456 WORLD_SIZE=4 RANK=2 VC_TASK_INDEX=1 VC_A_HOSTS=a VC_B_HOSTS=b"),
        HostInfo(2, 4, "p-master-0:23456"),
    ),
    "Volcano": (
        env("VC_TASK_INDEX=1 VK_TASK_INDEX=1 VC_WORKER_HOSTS=v-worker-0.v,v-worker-1.v VC_WORKER_NUM=2"),
        HostInfo(1, 2, "v-worker-0.v:7777"),
    ),
    "an indexed Job of Kubernetes": (JOB | FROM_MANIFEST, HostInfo(2, 4, "train-0.train:7777")),
}


@pytest.mark.parametrize("title", PLATFORMS)
def test_each_platform_says_which_host_this_is(title):
    environ, expected = PLATFORMS[title]
    platform = find_platform(environ)
    assert platform is not None and platform.title == title
    assert find_host_info(environ) == expected


def test_every_platform_of_the_table_has_an_example():
    assert {each.title for each in platforms(all_engines())} == {*PLATFORMS}


@pytest.mark.parametrize("title", PLATFORMS)
def test_a_variable_that_is_missing_is_named_with_the_one_that_replaces_it(title):
    environ, expected = PLATFORMS[title]
    platform = find_platform(environ)
    for attribute, own in (("index", "JAXRUN_HOST_RANK"), ("count", "JAXRUN_HOSTS")):
        source = getattr(platform.variables, attribute)
        left = {name: text for name, text in environ.items() if source is None or name != source.names[0]}
        if left == environ or title == "SageMaker" or find_platform(left) != platform:
            continue  # another platform's, or several values in one variable
        with pytest.raises(UsageError, match=f"is not set .*{source.names[0]}.*; set {own} on all hosts, as in {own}="):
            find_host_info(left)
        assert find_host_info(left | {own: str(getattr(expected, attribute))}) == expected
    assert find_host_info(environ | {"JAXRUN_HEAD": "own:1"}).head == "own:1"
    assert find_host_info(environ | {"JAXRUN_HOSTS": "auto"} if "JAXRUN_HOSTS" not in environ else environ) == expected


WRONG = {
    "nothing": ({}, r"nothing says which host this is; .*\n(.*\n)*  SkyPilot +SKYPILOT_NODE_RANK"),
    "no size": (
        JOB,
        "this is host 2 by the variables of an indexed Job of Kubernetes; how many hosts there are is not",
    ),
    "no head": (JOB | env("JAXRUN_HOSTS=4"), "the address of host 0 is not set; set JAXRUN_HEAD on all hosts"),
    "index beyond": (JOB | env("JAXRUN_HOSTS=2 JAXRUN_HEAD=a:1"), "this is host 2 .*, but there are 2 hosts"),
    "index of a platform beyond": (
        env("PET_NODE_RANK=5 PET_NNODES=2 PET_MASTER_ADDR=m"),
        "there are 2 hosts, .* check PET_NODE_RANK and PET_NNODES",
    ),
    "no port": (
        env("PET_NODE_RANK=1 PET_NNODES=2 PET_MASTER_ADDR=m PET_MASTER_PORT=x"),
        "PET_MASTER_PORT must be the number of a port, not 'x'",
    ),
    "two platforms": (
        env("LWS_WORKER_INDEX=1 LWS_GROUP_SIZE=2 LWS_LEADER_ADDRESS=l JAX_PROCESS_ID=0 JAX_NUM_PROCESSES=2"),
        "0 of 2 by JAX_PROCESS_ID and JAX_NUM_PROCESSES .*, but host 1 of 2 by LWS_WORKER_INDEX and LWS_GROUP_SIZE",
    ),
    "no number": (JOB | env("JAXRUN_HOSTS=four"), "JAXRUN_HOSTS must be a whole number, not 'four'"),
    "a range": (env("PET_NODE_RANK=0 PET_NNODES=1:4"), "PET_NNODES must be a whole number, not '1:4'"),
    "a torchrun process": (
        env("MASTER_ADDR=h RANK=1 WORLD_SIZE=8 LOCAL_RANK=1"),
        "LOCAL_RANK is set, so RANK numbers",
    ),
    "several groups": (
        env("VC_TASK_INDEX=0 VC_A_HOSTS=a VC_B_HOSTS=b"),
        "several groups of hosts .VC_A_HOSTS, VC_B_HOSTS",
    ),
    "no JSON": (
        env("SM_HOSTS=algo-1 SM_CURRENT_HOST=algo-1"),
        "SM_HOSTS='algo-1', SM_CURRENT_HOST='algo-1', as SageMaker",
    ),
    "a stranger": ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, "as SageMaker has set it, makes no sense"),
    "half set": (env("NODE_RANK=0"), "how many hosts there are is not set .NNODES of XPK on GPUs."),
    "unreplaced": (env("NODE_RANK=0 NNODES=2 JAX_COORDINATOR_ADDRESS=$(JOBSET_NAME)-0"), "was not replaced"),
    "no processes": (
        env("PET_NODE_RANK=0 PET_NNODES=1 PET_NPROC_PER_NODE=0"),
        "PET_NPROC_PER_NODE must be a number of processes, not '0'",
    ),
    "a rank": (JOB | FROM_MANIFEST | env("JAXRUN_RANK=1"), "is rank 1 of a jaxrun job already"),
}


@pytest.mark.parametrize("case", WRONG)
def test_variables_that_say_too_little_or_make_no_sense_are_named(case):
    environ, text = WRONG[case]
    with pytest.raises(UsageError, match=text):
        find_host_info(environ)


def test_one_host_needs_no_address_and_torchruns_words_for_a_count_leave_it_to_jaxrun():
    assert find_host_info(env("JOB_COMPLETION_INDEX=0 JAXRUN_HOSTS=1")) == HostInfo(0, 1)
    for word in ("auto", "gpu", "cpu"):
        assert find_host_info(env(f"PET_NODE_RANK=0 PET_NNODES=1 PET_NPROC_PER_NODE={word}")) == HostInfo(0, 1)
    assert find_host_info(env("JAXRUN_HOST_RANK=1 JAXRUN_HOSTS=2 JAXRUN_HEAD=h:1")) == HostInfo(1, 2, "h:1")


def test_two_platforms_may_say_the_same_and_jaxruns_own_variables_decide_where_they_do_not():
    both = env("LWS_WORKER_INDEX=1 LWS_GROUP_SIZE=2 LWS_LEADER_ADDRESS=l PET_NODE_RANK=1 PET_NNODES=2")
    assert find_host_info(both | env("PET_MASTER_ADDR=p")).head == "p:7777"
    told = env("JAXRUN_HOST_RANK=0 JAXRUN_HOSTS=3 JAXRUN_HEAD=h:1")
    assert find_host_info(both | env("PET_NODE_RANK=0") | told) == HostInfo(0, 3, "h:1")


def test_hosts_auto_stands_for_the_options_of_one_command_on_each_host():
    given = {"program": ("x.py",), "hosts": "auto"}
    environ = PLATFORMS["Kubeflow Trainer's torch runtime"][0]
    job = make_job(given, environ)
    assert (job.backend, job.hosts, job.host_rank, job.head) == (HOSTS, 4, 2, "t-node-0-0.t:29400")
    assert (job.processes_per_host, job.init_timeout) == (8, 600.0)  # in a pod
    assert make_job({**given, "processes_per_host": 2}, environ).processes_per_host == 2
    assert make_job({**given, "head": "h:1"}, environ).head == "h:1"
    with pytest.raises(UsageError, match="--host-rank 0, but by its variables this is host 2"):
        make_job({**given, "host_rank": 0}, environ)
    with pytest.raises(UsageError, match="--hosts auto and --backend slurm contradict"):
        make_job({**given, "backend": "slurm"}, environ)
    values, defaults = {**given, "simulated_hosts": 2, "min_hosts": 1}, {"simulated_hosts", "min_hosts"}
    assert without_effect(values, defaults, environ) == {"simulated_hosts"}


def test_the_table_of_the_docs_is_the_table_of_the_code():
    text = (Path(__file__).parents[2] / "docs" / "clusters" / "pods.md").read_text()
    lines = text.partition("| platform | this host |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    known = list(platforms(all_engines()))
    assert [row[0] for row in rows] == [each.title for each in known]
    for (title, *cells), each in zip(rows, [platform.variables for platform in known], strict=True):
        heads = (*(each.head.names if each.head else ()), *(each.port.names if each.port else ()))
        wanted = (each.index.names, each.count.names if each.count else ("JAXRUN_HOSTS",), heads or ("JAXRUN_HEAD",))
        assert [set(re.findall(r"`(\S+)`", cell)) for cell in cells] == [*map(set, wanted)], title
