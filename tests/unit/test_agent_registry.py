"""Reports of agents on many hosts become assignments, or a refusal that shows how the hosts differ."""

import pytest
from msgspec.structs import replace
from simulation import HEAD_ADDRESS, make_registry, report

from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.spec.job.worker_assignment import reachable_address


def assign(hosts, /, *, changes=None, given=None, run_dir="/shared/run", gpus=None, **wanted):
    """The assignment for one rank on each of `hosts`; `gpus` and `changes` are given by rank."""
    registry = make_registry(len(hosts), given=given, run_dir=run_dir, **wanted)
    for rank, host in reversed(list(enumerate(hosts))):
        assert not registry.complete
        more = (changes or {}).get(rank, {})
        registry.add(report(rank, host, len(hosts), gpus=(gpus or {}).get(rank, ()), **more))
    assert registry.complete
    return registry.assign()


def local_ranks(assignment):
    return [(start.worker.host, start.worker.local_rank, start.worker.local_size) for start in assignment.starts]


def ordinals(assignment):
    return [start.worker.local_device_ids for start in assignment.starts]


def test_what_waits_on_a_spare_host_prepares_for_what_a_rank_there_would_be():
    registry = make_registry(2, agents=4, max_restarts=1, env={"SEED": "1"})
    for rank, host in enumerate(("h1", "h2")):
        registry.add(report(rank, host, 4))
    started = registry.assign().starts[0]
    waiting = registry.prepare([report(2, "h3", 4)])
    assert [start.worker.host for start in waiting] == ["h3"]
    assert (waiting[0].environment, waiting[0].program, waiting[0].fork) == (started.environment, started.program, True)
    with pytest.raises(NotUniformError, match="was started as one of 3, but the job has 2 processes"):
        make_registry(2, agents=4).add(report(0, "h1", 3))


def test_start_messages_are_sorted_by_rank_and_describe_the_job():
    assignment = assign(["h1", "h2", "h1"], env={"A": "b"}, program=("train.py", "--steps", "3"))
    assert [start.worker.rank for start in assignment.starts] == [0, 1, 2]
    assert {start.worker.size for start in assignment.starts} == {3}
    assert {start.program for start in assignment.starts} == {("train.py", "--steps", "3")}
    assert all(start.environment["A"] == "b" for start in assignment.starts)
    assert all(start.worker.init_timeout == 120.0 for start in assignment.starts)
    assert (assignment.platform, assignment.local_devices) == ("cpu", 1)
    assert assignment.notes == ()


LAYOUTS = {
    "one": (["h1"], {}, {}, [("h1", 0, 1)]),
    "uneven": (["h1", "h1", "h1", "h2"], {}, {}, [("h1", 0, 3), ("h1", 1, 3), ("h1", 2, 3), ("h2", 0, 1)]),
    "by turns": (["h1", "h2", "h1", "h2"], {}, {}, [("h1", 0, 2), ("h2", 0, 2), ("h1", 1, 2), ("h2", 1, 2)]),
    "not in the order of their names": (["h2", "h1"], {}, {}, [("h2", 0, 1), ("h1", 0, 1)]),
    "with the numbers of the whole job": (
        ["h1", "h1", "h2", "h2"],
        {},
        {"hosts": 2, "processes_per_host": 2},
        [("h1", 0, 2), ("h1", 1, 2), ("h2", 0, 2), ("h2", 1, 2)],
    ),
    "two hosts of one name": (
        ["h1", "h1", "h1"],
        {1: {"boot_id": "another"}},
        {},
        [("h1", 0, 2), ("h1", 0, 1), ("h1", 1, 2)],
    ),
    "two names of one machine, of containers": (
        ["h1", "h2"],
        {1: {"boot_id": "boot-h1"}},
        {},
        [("h1", 0, 1), ("h2", 0, 1)],
    ),
}


@pytest.mark.parametrize(("hosts", "changes", "wanted", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_local_ranks_count_on_each_host(hosts, changes, wanted, expected):
    assert local_ranks(assign(hosts, changes=changes, **wanted)) == expected


@pytest.mark.parametrize(
    ("hosts", "cpus", "threads"),
    [
        (["h1", "h1", "h1", "h2"], {}, ["2", "2", "2", "8"]),
        (["h1", "h1"], {0: (0, 1, 2), 1: (3, 4, 5)}, ["3", "3"]),
        (["h1"] * 3, dict.fromkeys(range(3), (0,)), ["1", "1", "1"]),
    ],
    ids=["shared", "of their own", "more ranks than cores"],
)
def test_ranks_share_the_threads_of_the_cores_that_they_share(hosts, cpus, threads):
    assignment = assign(hosts, changes={rank: {"cores": numbers} for rank, numbers in cpus.items()})
    assert [start.environment["OMP_NUM_THREADS"] for start in assignment.starts] == threads


def test_simulated_devices_are_requested_on_every_host():
    assignment = assign(["h1", "h2"], devices_per_process=4)
    assert [start.environment["JAX_NUM_CPU_DEVICES"] for start in assignment.starts] == ["4", "4"]
    assert assignment.local_devices == 4 and ordinals(assignment) == [(), ()]


FOUR = ("0", "1", "2", "3")


# The hosts, the GPUs that each rank sees, what the job wants, the ordinals of each rank, and notes.
GPUS = {
    "all local ranks see all": (["h1", "h2", "h1", "h2"], [FOUR] * 4, {}, [(0, 1), (0, 1), (2, 3), (2, 3)], ()),
    "one process for each host": (["h1", "h2"], [FOUR] * 2, {}, [(0, 1, 2, 3)] * 2, ()),
    "each rank sees its own": (["h1"] * 4, [("a",), ("b",), ("c",), ("d",)], {}, [(0,)] * 4, ()),
    # As `srun --gpu-bind=closest` gives them: two sockets with two GPUs and two ranks each.
    "some local ranks see some": (["h1"] * 4, ["ab", "ab", "cd", "cd"], {}, [(0,), (1,), (0,), (1,)], ()),
    "fewer are asked for": (
        ["h1", "h1"],
        [FOUR] * 2,
        {"platform": "cuda", "devices_per_process": 1},
        [(0,), (1,)],
        ("2 of 4 visible GPUs stay idle; -n and -d choose how many to use",),
    ),
}


@pytest.mark.parametrize(("hosts", "gpus", "wanted", "expected", "notes"), GPUS.values(), ids=GPUS)
def test_gpus_are_divided_among_the_local_ranks_that_see_them(hosts, gpus, wanted, expected, notes):
    assignment = assign(hosts, gpus=dict(enumerate(gpus)), **{"platform": "auto", **wanted})
    assert ordinals(assignment) == expected and assignment.notes == notes
    assert assignment.platform == "cuda" and assignment.local_devices == len(expected[0])
    assert all(start.environment["JAX_PLATFORMS"] == "cuda,cpu" for start in assignment.starts)


def refusal(*args, **more):
    with pytest.raises(NotUniformError) as refused:
        assign(*args, **more)
    return str(refused.value)


def test_hosts_that_differ_in_their_gpus_are_refused_with_a_table():
    gpus = {0: FOUR, 1: FOUR, 2: FOUR, 3: FOUR, 4: ("0", "1"), 5: ("0", "1")}
    text = refusal(["h1", "h1", "h2", "h2", "h3", "h3"], gpus=gpus, platform="auto")
    assert text == (
        "the hosts differ in their devices\n"
        "  ranks 0-3   cuda, 2 devices   (h1, h2)\n"
        "  ranks 4-5   cuda, 1 device    (h3)\n"
        "every process must see the same number of devices; leave the odd host out, or ask for fewer with -d"
    )


def test_a_host_without_gpus_among_others_is_refused_with_a_table():
    text = refusal(["h1", "h2"], gpus={0: FOUR}, platform="auto")
    assert "rank 0   cuda, 4 devices   (h1)\n" in text and "rank 1   cpu, 1 device     (h2)\n" in text


def test_a_host_without_the_requested_devices_is_named():
    assert refusal(["h1", "h2"], gpus={0: FOUR}, platform="cuda").startswith("h2: --platform cuda asks for GPUs")
    stuck = {1: {"gpu_trouble": "NVML does not answer"}}
    text = refusal(["h1", "h2"], gpus={0: FOUR}, changes=stuck, platform="cuda")
    assert text.startswith("h2: --platform cuda asks for GPUs, but none is visible (NVML does not answer)")
    text = refusal(["h1", "h2"], gpus={0: FOUR, 1: ("0",)}, platform="cuda", devices_per_process=2)
    assert text.startswith("h2: ") and "takes 2 GPUs, but 1 is visible (counted by NVML)" in text


def test_gpus_without_jaxs_plugin_leave_the_job_on_cpu_with_a_note():
    changes = {rank: {"cuda_plugin": False} for rank in range(2)}
    assignment = assign(["h1", "h2"], gpus=dict.fromkeys(range(2), FOUR), changes=changes, platform="auto")
    assert assignment.platform == "cpu" and ordinals(assignment) == [(), ()]
    assert len(assignment.notes) == 1 and "plugin for CUDA is not installed" in assignment.notes[0]


REFUSED = {
    "a second agent of one rank": (
        {"agent": 1, "host": "h3", "pid": 7},
        NotUniformError,
        "two agents say that they are rank 1: process 1001 on h2 and process 7 on h3\n",
    ),
    "a job of another size": (
        {"agent": 0, "size": 3},
        NotUniformError,
        "rank 0 (h1) was started as one of 3, but the job has 2 processes\nstart as many processes as -n says",
    ),
    "another version": (
        {"agent": 0, "jaxrun_version": "9.9"},
        UnavailableError,
        "h1 has jaxrun 9.9, but the launcher has jaxrun 0.1.0\n",
    ),
    "another directory": (
        {"agent": 0, "directory": "/root"},
        UnavailableError,
        "/shared does not exist on h1; the agent was started in /root\n",
    ),
}


@pytest.mark.parametrize(("changes", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_an_agent_is_refused_for(changes, kind, text):
    registry = make_registry(2)
    registry.add(report(1, "h2", 2))
    with pytest.raises(kind) as refused:
        registry.add(replace(report(0, "h1", 2), **changes))
    assert type(refused.value) is kind and str(refused.value).startswith(text)


BY_HAND = {
    "another size": (
        {"size": 6},
        "h2 was started for 6 processes in all, host 0 for 4\n-n, --hosts, --processes-per-host and -d must be alike",
    ),
    "a rank beyond the end": ({"agent": 4}, "a process says that it is rank 4, but the job has ranks 0 to 3"),
    "another program": (
        {"command": ("train.py", "--lr", "1 2")},
        "h2 was started with another program than rank 0\n"
        "  rank 0   train.py\n  rank 2   train.py --lr '1 2'\ntype the same on every host",
    ),
    "a host rank that is taken": (
        {"agent": 3},
        "--host-rank 1 was given on h3 and h2\neach host needs a number of its own, from 0 to one less than --hosts",
    ),
}


@pytest.mark.parametrize(("changes", "text"), BY_HAND.values(), ids=BY_HAND)
def test_a_command_of_one_host_is_refused_for(changes, text):
    registry = make_registry(4, hosts=2, host_rank=0, backend="hosts")
    registry.add(report(3, "h3", 4, command=("train.py",)))
    with pytest.raises(NotUniformError) as refused:
        registry.add(replace(report(2, "h2", 4, command=("train.py",)), **changes))
    assert str(refused.value).startswith(text)


def test_agents_may_start_in_any_directory_if_the_job_names_none():
    registry = make_registry(1, directory="")
    registry.add(report(0, "h1", 1, directory="/elsewhere"))
    assert registry.complete


def test_a_rank_that_cannot_write_the_run_directory_sends_its_logs_and_is_named():
    assignment = assign(["h1", "h1", "h2"], changes={2: {"can_write_run_dir": False}})
    assert [start.worker.run_dir for start in assignment.starts] == ["/shared/run", "/shared/run", ""]
    assert [start.log_dir for start in assignment.starts] == ["/shared/run", "/shared/run", ""]
    assert assignment.notes == (
        "rank 2 (h2) cannot write to the run directory /shared/run; their logs come by network",
    )


def test_without_a_run_directory_there_is_no_note():
    assignment = assign(["h1", "h2"], run_dir="", changes={rank: {"can_write_run_dir": False} for rank in range(2)})
    assert assignment.notes == () and {start.log_dir for start in assignment.starts} == {""}


def test_the_start_message_says_whether_the_ranks_output_is_shown():
    assignment = assign(["h1", "h2", "h3"], quiet_ranks=(range(1, 2),))
    assert [start.show_output for start in assignment.starts] == [True, False, True]


LOCAL = {"address": "127.0.0.1", "head_address": "127.0.0.1"}
AT_HEAD = {"address": HEAD_ADDRESS, "head_address": HEAD_ADDRESS}
# The hosts, what differs by rank, and where the coordinator listens.
INTERFACES = {
    "on one host": (["h1", "h1"], {}, "127.0.0.1"),
    "with the head elsewhere": (["h1", "h1", "h2"], {}, "10.0.0.1"),
    "with the head elsewhere, of rank 0": (["h2", "h1"], {}, "10.0.0.2"),
    "on the head's host, where another has reached it": (
        ["h9", "h9", "h2"],
        {0: AT_HEAD, 1: LOCAL, 2: {"head_address": "10.7.0.9"}},
        "10.7.0.9",
    ),
    "on the head's host, by the loopback": (["h9", "h9", "h2"], {0: LOCAL, 1: LOCAL}, HEAD_ADDRESS),
    "with another rank on the head's host": (["h1", "h9"], {1: AT_HEAD}, "10.0.0.1"),
    "on two hosts of one name": (["h1", "h1"], {1: {"boot_id": "another"}}, "10.0.0.1"),
    "by IPv6": (["h1", "h2"], {0: {"address": "fd00::1", "head_address": "fd00::9"}}, "fd00::1"),
}


@pytest.mark.parametrize(("hosts", "changes", "address"), INTERFACES.values(), ids=INTERFACES)
def test_the_coordinator_is_where_all_reach_it(hosts, changes, address):
    reports = {rank: report(rank, host, len(hosts), **changes.get(rank, {})) for rank, host in enumerate(hosts)}
    assert reachable_address(reports[0], reports.values()) == assign(hosts, changes=changes).interface == address


@pytest.mark.parametrize("given", [{}, {"no_proxy": ".example"}], ids=["no list", "a list"])
def test_the_coordinator_is_reached_without_a_proxy(given):
    assignment = assign(["h1", "h2"], given={"https_proxy": "http://proxy:3128", **given})
    for start in assignment.starts:
        names = start.environment["no_grpc_proxy"].split(",")
        assert names[-1] == assignment.interface == "10.0.0.1" and "127.0.0.1" in names
        assert (".example" in names) == bool(given)


def test_without_a_proxy_no_exception_is_set():
    assert all("no_grpc_proxy" not in start.environment for start in assign(["h1", "h2"]).starts)


def test_a_large_job_is_assigned_in_a_time_that_grows_with_its_size():
    """Four times the ranks, at most some eight times the calls: counted, not timed."""
    import cProfile
    import pstats

    def calls(size):
        profile = cProfile.Profile()
        hosts = [f"h{rank // 8}" for rank in range(size)]
        profile.runcall(assign, hosts)
        return pstats.Stats(profile).total_calls

    assert calls(512) < 8 * calls(128)
