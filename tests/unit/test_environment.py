"""What workers are given: variables that jaxrun sets, keeps from them or tells a fork server to change; their cores."""

import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace
from simulation import make_registry, report

from jaxrun.errors import ProtocolError
from jaxrun.node.forkserver.client import ForkServer
from jaxrun.protocol.codec import encode
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import (
    ConfigureForkServer,
    ForkDeclined,
    ForkServerMessageDecoder,
    WorkerForked,
)
from jaxrun.protocol.probe_messages import Gpus, Machine
from jaxrun.spec.backends.local import plan
from jaxrun.spec.job.binding import RankCores, choose_cores
from jaxrun.spec.job.environment import inherited_job_variables
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.render import render_plan
from jaxrun.spec.job.worker_variables import common_variables
from jaxrun.text import format_ranges

POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
ENV = WorkerEnv(
    job_id="ab" * 16,
    rank=3,
    size=4,
    local_rank=1,
    local_size=2,
    host="h2",
    channel_fd=7,
    stacks_fd=8,
    flight_fd=9,
    init_timeout=120.0,
)


def test_variables_of_an_earlier_job_are_stale_and_others_are_not():
    stale = ("JAXRUN_RANK", "JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS", "JAX_PROCESS_ID")
    others = ("JAX_PLATFORMS", "SLURM_PROCID", "JAX_SLICE_INDEX", "JAX_PARTITION_INDEX")
    assert inherited_job_variables(dict.fromkeys((*others, *stale), "x")) == stale


@pytest.mark.parametrize(("cores", "workers", "threads"), [(16, 4, "4"), (16, 5, "3"), (2, 8, "1"), (1, 1, "1")])
def test_thread_pools_share_the_cores(cores, workers, threads):
    values = common_variables({}, cores=cores, workers=workers)
    assert {values[name] for name in POOLS} == {threads}


LOCAL = "127.0.0.1,localhost,::1"


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"OMP_NUM_THREADS": "7"}, "OMP_NUM_THREADS", None),
        ({"OMP_NUM_THREADS": "7"}, "MKL_NUM_THREADS", "2"),
        ({}, "PYTHONHASHSEED", "0"),
        ({"PYTHONHASHSEED": "random"}, "PYTHONHASHSEED", "0"),
        ({"PYTHONHASHSEED": "42"}, "PYTHONHASHSEED", None),
        ({"no_proxy": "a.org"}, "no_grpc_proxy", None),
        ({"http_proxy": ""}, "no_grpc_proxy", None),
        ({"http_proxy": "http://p:1"}, "no_grpc_proxy", LOCAL),
        ({"HTTPS_PROXY": "http://p:1", "NO_PROXY": "a.org"}, "no_grpc_proxy", f"a.org,{LOCAL}"),
        ({"grpc_proxy": "http://p:1", "no_proxy": "b", "no_grpc_proxy": "c"}, "no_grpc_proxy", f"c,{LOCAL}"),
    ],
)
def test_what_the_user_has_set_counts_and_a_proxy_is_kept_away_from_the_coordinator(given, name, expected):
    assert common_variables(given, cores=4, workers=2).get(name) == expected


# ---- a worker's own


def environments():
    by_type = {
        str: st.text(max_size=20),
        int: st.integers(0, 10**6),
        float: st.floats(0, 1e9),
        bool: st.booleans(),
        tuple[int, ...]: st.lists(st.integers(0, 999), max_size=4).map(tuple),
    }
    return st.builds(WorkerEnv, **{field.name: by_type[field.type] for field in fields(WorkerEnv)})


@given(environments())
def test_a_workers_environment_reads_back_the_same(env):
    assert WorkerEnv.from_env(env.to_env()) == replace(env, rank_token="")  # which is no variable


def test_a_workers_environment_is_spelled_as_documented():
    env = replace(ENV, local_device_ids=(2, 3), cpus=(5,)).to_env()
    assert env["JAXRUN_RANK"] == "3" and env["JAXRUN_LOCAL_DEVICE_IDS"] == "2,3" and env["JAXRUN_CPUS"] == "5"
    assert (env["JAX_PROCESS_ID"], env["JAX_NUM_PROCESSES"]) == ("3", "4")


@pytest.mark.parametrize("name", sorted(set(ENV.to_env()) - {"JAX_PROCESS_ID", "JAX_NUM_PROCESSES"}))
def test_a_missing_variable_is_named(name):
    env = ENV.to_env()
    del env[name]
    with pytest.raises(ProtocolError, match=f"{name} is not set.*jaxrun -n"):
        WorkerEnv.from_env(env)


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("JAXRUN_RANK", "x", "int"),
        ("JAXRUN_SIZE", "", "int"),
        ("JAXRUN_INIT_TIMEOUT", "soon", "float"),
        ("JAXRUN_CPUS", "1,,2", ""),
        ("JAXRUN_TORCH_ENV", "yes", "bool"),
    ],
)
def test_a_malformed_variable_is_named_with_its_value(name, value, kind):
    with pytest.raises(ProtocolError, match=re.escape(f"{name}={value!r} is not a valid {kind}")):
        WorkerEnv.from_env({**ENV.to_env(), name: value})


def test_torchruns_variables_are_set_only_on_request():
    names = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "JAXRUN_TORCH_ENV": "True"}
    plain, more = ENV.to_env(), replace(ENV, torch_env=True).to_env()
    assert {name: value for name, value in more.items() if plain.get(name) != value} == names
    assert WorkerEnv.from_env(more).torch_env and not WorkerEnv.from_env(plain).torch_env


# ---- the job description sent to a fork server, and the jobs that a running one cannot accept

OWN = {"PATH": "/bin", "GONE": "1", "JAX_PLATFORMS": "cuda"}


@pytest.fixture
def make_server():
    """make_server(directory) → a ForkServer, and the server's end of its channel."""
    channels = []

    def make(directory=""):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channels.extend((ours, theirs))
        return ForkServer(1, ours, OWN, directory), theirs

    yield make
    for channel in channels:
        channel.close()


def test_a_server_gets_the_program_and_the_difference_of_the_environment(make_server):
    server, channel = make_server("/work")
    assert server.configure(("train.py", "a b"), {"PATH": "/bin", "MINE": "x", "JAX_PLATFORMS": "cpu"})
    (order,) = ForkServerMessageDecoder().feed(channel.recv(65536))
    environment = {"MINE": "x", "JAX_PLATFORMS": "cpu"}
    assert order == ConfigureForkServer(("train.py", "a b"), environment, ("GONE",), "/work")


READ_AT_START = ({"PYTHONHASHSEED": "3"}, {"PYTHONPATH": "/x"}, {"LD_PRELOAD": ""}, {"LC_ALL": "C"}, {"TZ": "UTC"})
READ_AT_IMPORT = ({"JAX_ENABLE_X64": "1"}, {"NPY_PROMOTION_STATE": "weak"})
SET_AFTER_IMPORT = ({"JAX_PLATFORMS": "cpu"}, {"JAX_NUM_CPU_DEVICES": "2"})


@pytest.mark.parametrize("changed", READ_AT_START + READ_AT_IMPORT + SET_AFTER_IMPORT)
def test_variables_that_interpreter_and_jax_have_read_already_cannot_be_changed(make_server, changed):
    for directory in ("", "/with/jax/imported"):
        server, channel = make_server(directory)
        possible = changed in SET_AFTER_IMPORT or (changed in READ_AT_IMPORT and not directory)
        assert server.configure((), {**OWN, **changed}) is possible
        server.close()
        assert bool(channel.recv(65536)) is possible


def test_the_answers_end_with_none_when_the_server_has_gone(make_server):
    server, channel = make_server()
    assert server.receive() == []
    answers = [WorkerForked(0, 7), ForkDeclined("a thread", "")]
    for answer in answers:
        channel.send(encode(answer))
    channel.close()
    assert server.receive() == [*answers, None]


# ---- which cores each rank of a host stays on: next to its GPUs, a share of its own, or all

# Two NUMA nodes of eight cores with two hardware threads each, a GPU near each; the threads of a core side by side.
LEFT, RIGHT = "0-7,16-23", "8-15,24-31"
ALL = tuple(core for first in range(16) for core in (first, first + 16))
ON_LEFT, ON_RIGHT, UNKNOWN = RankCores(ALL, (LEFT,)), RankCores(ALL, (RIGHT,)), RankCores(ALL, ("",))
CPU_RANKS = (RankCores((0, 1)),) * 3


@pytest.mark.parametrize(
    ("mode", "ranks", "expected"),
    [
        ("auto", (ON_LEFT, ON_LEFT, ON_RIGHT), [LEFT, LEFT, RIGHT]),
        ("gpu", (ON_LEFT, ON_RIGHT), [LEFT, RIGHT]),
        ("cores", (ON_LEFT, ON_RIGHT), [LEFT, RIGHT]),
        ("cores", (ON_LEFT, ON_LEFT, ON_RIGHT), ["0-3,16-19", "4-7,20-23", RIGHT]),
        ("none", (ON_LEFT, ON_RIGHT), ["", ""]),
        ("auto", (RankCores(ALL, (LEFT, RIGHT)),), [""]),  # its GPUs are on both nodes
        ("auto", (RankCores(ALL, ("0-31",)), UNKNOWN), ["", ""]),  # one node, or a kernel that does not say
        ("auto", (RankCores(ALL[:8], (LEFT,)), RankCores(ALL[8:], (LEFT,))), ["", ""]),  # Slurm has bound them
        ("gpu", (RankCores(ALL[8:], (LEFT,)),), ["4-7,20-23"]),
        ("gpu", (RankCores((0, 16), (RIGHT,)),), [""]),  # which may use none of those
        ("cores", (RankCores(ALL),) * 2, ["0-7,16-23", "8-15,24-31"]),
        ("cores", (RankCores((0, 1, 2)),) * 2, ["0", "1-2"]),
        ("cores", (RankCores((4, 5)),) * 3, ["4", "5", "4"]),
        ("cores", (RankCores((0, 1)), RankCores((2, 3))), ["", ""]),
        # On CPUs, each rank gets one core where they outnumber those that they share.
        ("auto", CPU_RANKS, ["0", "1", "0"]),
        ("auto", CPU_RANKS[:2], ["", ""]),
        ("none", CPU_RANKS, [""] * 3),
        ("auto", (RankCores((0,)), RankCores((1,))), ["", ""]),
    ],
)
def test_a_rank_gets_the_cores_of_the_mode(mode, ranks, expected):
    on_cpu = not ranks[0].near_gpus
    assert [format_ranges(cores, ",") for cores in choose_cores(mode, ranks, on_cpu=on_cpu, all_cores=32)] == expected


def test_the_plan_of_one_machine_shows_the_cores_of_each_rank():
    machine = Machine("box", ALL, {"cuda": Gpus(("H",) * 2, "NVML", cores=(LEFT, RIGHT))}, all_cores=32)
    made = plan(Job(program=("a.py",)), {}, "0" * 32, machine)
    rows = [line.split()[-1] for line in render_plan(made, {}).splitlines() if line.startswith(("0  ", "1  "))]
    assert rows == [LEFT, RIGHT]
    (unbound,) = plan(Job(program=("a.py",), bind="none", processes=1), {}, "0" * 32, machine).workers
    assert unbound.cpus == ()


def test_agents_get_the_cores_on_which_their_ranks_stay():
    def cores(bind, **changes):
        registry = make_registry(4, bind=bind, platform="auto")
        more = {"cores": ALL, "all_cores": 32, "gpu_cores": (LEFT, RIGHT), **changes}
        for rank, host in enumerate(("h1", "h1", "h2", "h2")):
            registry.add(report(rank, host, 4, gpus=(0, 1), **more))
        return [format_ranges(start.worker.cpus, ",") for start in registry.assign().starts]

    assert cores("auto") == [LEFT, RIGHT, LEFT, RIGHT]
    assert cores("none") == [""] * 4
    assert cores("auto", all_cores=64) == [""] * 4
    assert cores("gpu", all_cores=64) == [LEFT, RIGHT, LEFT, RIGHT]
    assert cores("auto", gpu_cores=()) == [""] * 4
