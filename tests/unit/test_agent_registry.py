"""Reports of agents on many hosts become assignments, or a refusal that shows how the hosts differ."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.head.agent_registry import AgentRegistry, JobSpec, coordinator_interface
from jaxrun.head.consistency import Expected
from jaxrun.job.job import Job
from jaxrun.protocol.agent_messages import AgentReport

A100 = "NVIDIA A100"
HEAD = "10.0.0.9"


def job(**wanted):
    return Job(**{"program": ("train.py",), "backend": "mpirun", "platform": "cpu", **wanted})


def terms(size, *, given=None, run_dir="/shared/run", **wanted):
    return JobSpec(
        job=job(processes=size, **wanted),
        job_id="ab" * 16,
        size=size,
        version="0.1.0",
        directory="/shared",
        program=("train.py", "--steps", "3"),
        user_env=given or {},
        run_dir=run_dir,
        listen_addresses="eth0 10.0.0.9:40",
    )


def report(rank, host, size, *, gpus=(), **changes):
    """`gpus`: the ids of those that it sees."""
    values = {
        "boot_id": f"boot-{host}",
        "pid": 1000 + rank,
        "time": 1.0,
        "jaxrun_version": "0.1.0",
        "address": f"10.0.0.{int(host[1:])}",
        "head_address": HEAD,
        "directory": "/shared",
        "cpus": tuple(range(8)),
        "gpu_platform": "cuda" if gpus else "",
        "gpu_names": (A100,) * len(gpus),
        "gpu_ids": tuple(map(str, gpus)),
        "gpu_limit": "",
        "tpu": False,
        "cuda_plugin": True,
        "can_write_run_dir": True,
    }
    return AgentReport(rank=rank, size=size, host=host, **{**values, **changes})


def decide(hosts, *, changes=None, given=None, run_dir="/shared/run", gpus=None, **wanted):
    """The decision for one rank on each of `hosts`; `gpus` and `changes` by rank."""
    muster = AgentRegistry(terms(len(hosts), given=given, run_dir=run_dir, **wanted))
    for rank, host in reversed(list(enumerate(hosts))):
        assert not muster.complete
        more = (changes or {}).get(rank, {})
        muster.add(report(rank, host, len(hosts), gpus=(gpus or {}).get(rank, ()), **more))
    assert muster.complete
    return muster.assign()


def places(decision):
    return [(order.host, order.local_rank, order.local_size) for order in decision.starts]


def ordinals(decision):
    return [order.local_device_ids for order in decision.starts]


def test_orders_come_by_rank_and_say_what_the_job_is():
    decision = decide(["h1", "h2", "h1"], env={"A": "b"})
    assert [order.rank for order in decision.starts] == [0, 1, 2]
    assert {order.size for order in decision.starts} == {3}
    assert {order.program for order in decision.starts} == {("train.py", "--steps", "3")}
    assert all(order.environment["A"] == "b" for order in decision.starts)
    assert all(order.init_timeout == 120.0 for order in decision.starts)
    assert decision.expected == Expected(3, "ab" * 16, "cpu", 1)
    assert decision.notes == ()


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["h1"], [("h1", 0, 1)]),
        (["h1", "h1", "h1", "h2"], [("h1", 0, 3), ("h1", 1, 3), ("h1", 2, 3), ("h2", 0, 1)]),
        (["h1", "h2", "h1", "h2"], [("h1", 0, 2), ("h2", 0, 2), ("h1", 1, 2), ("h2", 1, 2)]),
        (["h2", "h1"], [("h2", 0, 1), ("h1", 0, 1)]),
    ],
    ids=["one", "uneven", "by turns", "not in the order of their names"],
)
def test_local_ranks_count_on_each_host(hosts, expected):
    assert places(decide(hosts)) == expected


def test_two_hosts_of_one_name_are_two_hosts():
    decision = decide(["h1", "h1", "h1"], changes={1: {"boot_id": "another"}})
    assert places(decision) == [("h1", 0, 2), ("h1", 0, 1), ("h1", 1, 2)]


def test_two_names_of_one_machine_are_two_hosts():
    """Containers on one machine share its boot id."""
    decision = decide(["h1", "h2"], changes={1: {"boot_id": "boot-h1"}})
    assert places(decision) == [("h1", 0, 1), ("h2", 0, 1)]


@given(st.lists(st.sampled_from(["h1", "h2", "h3"]), min_size=1, max_size=9))
def test_every_rank_has_a_place_of_its_own_on_its_host(hosts):
    found = places(decide(hosts))
    counts = Counter(hosts)
    assert [host for host, _, _ in found] == hosts
    assert {(host, local) for host, local, _ in found} == {(h, i) for h, count in counts.items() for i in range(count)}
    assert all(size == counts[host] for host, _, size in found)


def threads(decision):
    return [order.environment["OMP_NUM_THREADS"] for order in decision.starts]


def test_ranks_that_share_their_cores_share_the_threads():
    assert threads(decide(["h1", "h1", "h1", "h2"])) == ["2", "2", "2", "8"]


def test_ranks_with_cores_of_their_own_use_all_of_them():
    changes = {0: {"cpus": (0, 1, 2)}, 1: {"cpus": (3, 4, 5)}}
    assert threads(decide(["h1", "h1"], changes=changes)) == ["3", "3"]


def test_more_ranks_than_cores_have_a_thread_each():
    assert threads(decide(["h1"] * 3, changes={rank: {"cpus": (0,)} for rank in range(3)})) == ["1", "1", "1"]


def test_simulated_devices_are_asked_for_on_every_host():
    decision = decide(["h1", "h2"], devices_per_process=4)
    assert [order.environment["JAX_NUM_CPU_DEVICES"] for order in decision.starts] == ["4", "4"]
    assert decision.expected.local_devices == 4 and ordinals(decision) == [(), ()]


FOUR = ("0", "1", "2", "3")


def test_gpus_that_all_local_ranks_see_are_shared_out_by_local_rank():
    decision = decide(["h1", "h2", "h1", "h2"], gpus=dict.fromkeys(range(4), FOUR), platform="auto")
    assert ordinals(decision) == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert decision.expected.platform == "cuda" and decision.expected.local_devices == 2
    assert all(order.environment["JAX_PLATFORMS"] == "cuda,cpu" for order in decision.starts)


def test_one_process_for_each_host_has_all_of_its_gpus():
    assert ordinals(decide(["h1", "h2"], gpus=dict.fromkeys(range(2), FOUR), platform="auto")) == [(0, 1, 2, 3)] * 2


def test_a_gpu_that_only_its_rank_sees_has_the_first_ordinal():
    gpus = {rank: (f"gpu-{rank}",) for rank in range(4)}
    decision = decide(["h1"] * 4, gpus=gpus, platform="auto")
    assert ordinals(decision) == [(0,)] * 4 and decision.expected.local_devices == 1


def test_gpus_that_some_local_ranks_see_are_shared_out_among_those():
    """As `srun --gpu-bind=closest` gives them: two sockets with two GPUs and two ranks each."""
    gpus = {0: "ab", 1: "ab", 2: "cd", 3: "cd"}
    assert ordinals(decide(["h1"] * 4, gpus=gpus, platform="auto")) == [(0,), (1,), (0,), (1,)]


def test_fewer_devices_can_be_asked_for():
    decision = decide(["h1", "h1"], gpus=dict.fromkeys(range(2), FOUR), platform="cuda", devices_per_process=1)
    assert ordinals(decision) == [(0,), (1,)]
    assert decision.notes == ("2 of 4 visible GPUs stay idle; -n and -d say how many to use",)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_no_gpu_is_given_to_two_ranks_of_a_host(ranks, hosts, each):
    names = [f"h{host}" for host in range(hosts) for _ in range(ranks)]
    gpus = dict.fromkeys(range(len(names)), tuple(map(str, range(ranks * each))))
    decision = decide(names, gpus=gpus, platform="auto")
    taken = [(order.host, ordinal) for order in decision.starts for ordinal in order.local_device_ids]
    assert len(taken) == len(set(taken)) == hosts * ranks * each


def refusal(*args, **more):
    with pytest.raises(NotUniformError) as refused:
        decide(*args, **more)
    return str(refused.value)


def test_hosts_that_differ_in_their_gpus_are_refused_with_a_table():
    gpus = {0: FOUR, 1: FOUR, 2: FOUR, 3: FOUR, 4: ("0", "1"), 5: ("0", "1")}
    text = refusal(["h1", "h1", "h2", "h2", "h3", "h3"], gpus=gpus, platform="auto")
    assert text == (
        "the hosts differ in their devices\n"
        "  ranks 0-3 (h1, h2)   cuda, 2 devices\n"
        "  ranks 4-5 (h3)       cuda, 1 device\n"
        "every process must see the same number of devices; leave the odd host out, or ask for fewer with -d"
    )


def test_a_host_without_gpus_among_others_is_refused_with_a_table():
    text = refusal(["h1", "h2"], gpus={0: FOUR}, platform="auto")
    assert "rank 0 (h1)   cuda, 4 devices\n" in text and "rank 1 (h2)   cpu, 1 device\n" in text


def test_a_host_that_has_not_what_was_asked_for_is_named():
    assert refusal(["h1", "h2"], gpus={0: FOUR}, platform="cuda").startswith("h2: --platform cuda asks for GPUs")
    text = refusal(["h1", "h2"], gpus={0: FOUR, 1: ("0",)}, platform="cuda", devices_per_process=2)
    assert text.startswith("h2: ") and "takes 2 GPUs, but 1 is visible (counted by the agent on h2)" in text


def test_more_ranks_than_gpus_on_a_host_are_refused():
    text = refusal(["h1"] * 3, gpus=dict.fromkeys(range(3), ("0", "1")), platform="auto")
    assert text.startswith("h1: ") and "takes 3 GPUs, but 2 are visible" in text


def test_gpus_without_jaxs_plugin_leave_the_job_on_cpu_with_a_note():
    changes = {rank: {"cuda_plugin": False} for rank in range(2)}
    decision = decide(["h1", "h2"], gpus=dict.fromkeys(range(2), FOUR), changes=changes, platform="auto")
    assert decision.expected.platform == "cpu" and ordinals(decision) == [(), ()]
    assert len(decision.notes) == 1 and "plugin for CUDA is not installed" in decision.notes[0]


REFUSED = {
    "a second agent of one rank": (
        {"rank": 1, "host": "h3", "pid": 7},
        NotUniformError,
        "two agents say that they are rank 1: process 1001 on h2 and process 7 on h3\n",
    ),
    "a job of another size": (
        {"rank": 0, "size": 3},
        NotUniformError,
        "rank 0 (h1) was started as one of 3, but the job has 2 processes\nstart as many processes as -n says",
    ),
    "another version": (
        {"rank": 0, "jaxrun_version": "9.9"},
        UnavailableError,
        "h1 has jaxrun 9.9, but the launcher is jaxrun 0.1.0\n",
    ),
    "another directory": (
        {"rank": 0, "directory": "/root"},
        UnavailableError,
        "/shared is not there on h1: the agent was started in /root\n",
    ),
}


@pytest.mark.parametrize(("changes", "kind", "text"), REFUSED.values(), ids=REFUSED)
def test_an_agent_is_refused_for(changes, kind, text):
    muster = AgentRegistry(terms(2))
    muster.add(report(1, "h2", 2))
    with pytest.raises(kind) as refused:
        muster.add(replace(report(0, "h1", 2), **changes))
    assert type(refused.value) is kind and str(refused.value).startswith(text)


def test_agents_may_be_anywhere_where_the_job_says_no_directory():
    muster = AgentRegistry(replace(terms(1), directory=""))
    muster.add(report(0, "h1", 1, directory="/elsewhere"))
    assert muster.complete


def test_who_does_not_see_the_run_directory_sends_its_logs_and_is_named():
    decision = decide(["h1", "h1", "h2"], changes={2: {"can_write_run_dir": False}})
    assert [order.run_dir for order in decision.starts] == ["/shared/run", "/shared/run", ""]
    assert [order.log_dir for order in decision.starts] == ["/shared/run", "/shared/run", ""]
    assert decision.notes == ("rank 2 (h2) cannot write to the run directory /shared/run; their logs come by network",)


def test_without_a_run_directory_there_is_nothing_to_tell():
    decision = decide(["h1", "h2"], run_dir="", changes={rank: {"can_write_run_dir": False} for rank in range(2)})
    assert decision.notes == () and {order.log_dir for order in decision.starts} == {""}


def test_an_agent_is_told_whether_its_rank_is_shown():
    decision = decide(["h1", "h2", "h3"], quiet_ranks=(range(1, 2),))
    assert [order.show_output for order in decision.starts] == [True, False, True]


def met(*reports):
    return coordinator_interface(dict(enumerate(reports)))


def test_on_one_host_the_ranks_meet_at_the_loopback():
    assert met(report(0, "h1", 2), report(1, "h1", 2)) == "127.0.0.1"
    assert decide(["h1", "h1"]).interface == "127.0.0.1"


def test_where_the_head_is_elsewhere_they_meet_where_rank_0_came_from():
    assert met(report(0, "h1", 3), report(1, "h1", 3), report(2, "h2", 3)) == "10.0.0.1"
    assert decide(["h2", "h1"]).interface == "10.0.0.2"


def test_on_the_heads_own_host_they_meet_where_another_host_has_reached_the_head():
    lead = report(0, "h9", 3, address=HEAD, head_address=HEAD)
    local = report(1, "h9", 3, address="127.0.0.1", head_address="127.0.0.1")
    assert met(lead, local, report(2, "h2", 3, head_address="10.7.0.9")) == "10.7.0.9"
    by_loopback = replace(lead, address="127.0.0.1", head_address="127.0.0.1")
    assert met(by_loopback, local, report(2, "h2", 3)) == HEAD


def test_where_only_another_rank_is_on_the_heads_host_they_meet_at_rank_0():
    local = report(1, "h9", 2, address=HEAD, head_address=HEAD)
    assert met(report(0, "h1", 2), local) == "10.0.0.1"


def test_two_hosts_of_one_name_do_not_meet_at_the_loopback():
    assert met(report(0, "h1", 2), report(1, "h1", 2, boot_id="another")) == "10.0.0.1"


def test_they_meet_by_ipv6_where_that_is_how_they_came():
    lead = report(0, "h1", 2, address="fd00::1", head_address="fd00::9")
    assert met(lead, report(1, "h2", 2)) == "fd00::1"


@pytest.mark.parametrize("given", [{}, {"no_proxy": ".example"}], ids=["no list", "a list"])
def test_the_meeting_point_is_not_looked_for_behind_a_proxy(given):
    decision = decide(["h1", "h2"], given={"https_proxy": "http://proxy:3128", **given})
    for order in decision.starts:
        names = order.environment["no_grpc_proxy"].split(",")
        assert names[-1] == decision.interface == "10.0.0.1" and "127.0.0.1" in names
        assert (".example" in names) == bool(given)


def test_without_a_proxy_nothing_is_said_of_one():
    assert all("no_grpc_proxy" not in order.environment for order in decide(["h1", "h2"]).starts)


def test_a_large_job_is_decided_in_a_time_that_grows_with_its_size():
    """Four times the ranks, at most some eight times the calls: counted, not timed."""
    import cProfile
    import pstats

    def calls(size):
        profile = cProfile.Profile()
        hosts = [f"h{rank // 8}" for rank in range(size)]
        profile.runcall(decide, hosts)
        return pstats.Stats(profile).total_calls

    assert calls(512) < 8 * calls(128)
