"""The checks of `jaxrun doctor`: what they say of the facts that hosts have told, and of the ways between them."""

import json
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.findings import Level
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.frontends.doctor import doctor_report
from jaxrun.frontends.doctor.network import blame
from jaxrun.frontends.doctor.observation import CollectiveTiming, Observation, read_run_dir
from jaxrun.frontends.doctor.start import fixed_fault_handler
from jaxrun.job_events.actions import RecordClock
from jaxrun.protocol.probe_messages import FabricFacts, GpuFacts, HostFacts, PeerResults
from jaxrun.protocol.worker_messages import DeviceReport
from jaxrun.records.event_log.event_log import LoggedEvent
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.backends.slurm_allocation import Allocation
from jaxrun.spec.job.rank_placement import agents_by_rank
from jaxrun.terminal import TerminalFormat

_SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "doctor.json"
GIB = 2**30
HOSTS = ("h1", "h2", "h3")
ON_CPU = DeviceReport(0, 0, 1, 1, 1, ("cpu",), "cpu", "", 0.0, 0.0)
ON_GPU = replace(ON_CPU, platform="gpu", device_kinds=("H100",))


def facts(rank, host, **changes):
    known = HostFacts(
        agent=rank,
        time=0.0,
        host=host,
        versions={"Python": "3.13.1", "jaxrun": "0.1.0", "jax": "0.12.0", "jaxlib": "0.12.0", "numpy": "2.5"},
        name_addresses=(f"10.0.0.{rank + 1}",),
        addresses={"127.0.0.1": "lo", f"10.0.0.{rank + 1}": "eth0"},
        limits={"nofile": 65536, "nproc": -1, "memlock": 65536, "nofile hard": 65536},
        memory={"total": 64 * GIB, "available": 60 * GIB, "limit": -1},
        shared_memory=32 * GIB,
        disks={"/tmp": 100 * GIB},
        cores=8,
        all_cores=8,
    )
    return replace(known, **changes)


def network(errors=()):
    """PeerResults of all hosts; `errors` are pairs of ranks."""
    peers = {}
    for rank in range(3):
        reached = {other: "eth0" for other in range(3) if other != rank and (rank, other) not in errors}
        peers[rank] = PeerResults(rank, reached, {other: "does not answer" for one, other in errors if one == rank})
    return peers


def seen(*changed, **more):
    """Three hosts with which all is well, but for the facts that `changed` replaces by their rank."""
    known = {rank: facts(rank, host) for rank, host in enumerate(HOSTS)} | {one.agent: one for one in changed}
    content = {
        "started_by": "Open MPI 5",
        "expected_hosts": HOSTS,
        "agents": agents_by_rank(len(known)),
        "facts": known,
        "peers": network(),
        "devices": dict.fromkeys(known, ON_CPU),
        "clocks": {rank: RecordClock(rank, 0.0001, 0.0001) for rank in known},
        "verdict": Verdict("ok", 0, dict(enumerate(HOSTS)), startup=2.0, run=1.0),
    }
    return Observation(**{**content, **more})


def bad(observation):
    """What is not as it should be: the check, the level, the text and the advice."""
    return [
        (name, finding.level, f"{finding.text} | {finding.advice}")
        for name, finding in doctor_report.judge(observation)
        if finding.level is not Level.OK
    ]


FAILURE, WARNING = Level.FAILURE, Level.WARNING
BOTH_WAYS_OF_H3 = {(0, 2), (2, 0), (1, 2), (2, 1)}
WITH_PLUGIN = {"jaxlib": "0.12.0", "jax-cuda13-plugin": "0.12.0"}


def on_h2(**changes):
    return seen(facts(1, "h2", **changes))


def h100(count=1, driver="580.159.04", used=0, total=80 * GIB):
    """Facts of GPUs."""
    return {"gpus": (GpuFacts("NVIDIA H100", used, total),) * count, "nvidia_driver": driver}


def box(devices=None, **facts_of_box):
    """A single host."""
    found = {0: facts(0, "box", **facts_of_box)}
    devices = {0: devices or ON_GPU}
    return Observation(agents={0: (0,)}, facts=found, devices=devices, verdict=Verdict("ok", 0, {0: "box"}))


def with_drivers(*drivers):
    hosts = [facts(rank, HOSTS[rank], **h100(driver=driver)) for rank, driver in enumerate(drivers)]
    return seen(*hosts, devices=dict.fromkeys(range(3), ON_GPU))


# What is seen, and the first that is not as it should be: the check, the level, the begin of the text.
CASES = {
    "another version": (on_h2(versions={"Python": "3.13.1", "jaxrun": "0.1.0", "jax": "0.12.0",
        "jaxlib": "0.10.1", "numpy": "2.5"}), "versions", FAILURE,
        "jaxlib differs: 0.12.0 on h1, h3; 0.10.1 on h2 | pip install jaxlib==0.12.0"),
    "a Python whose fault handler crashes": (box(versions={"Python": "3.13.0"}), "versions", WARNING,
        "Python 3.13.0: its fault handler, which writes the stacks of a rank whose C code holds the GIL, can crash "
        "that rank (gh-123967) | use Python 3.13.1 or later"),
    "no address": (on_h2(name_addresses=()), "names", WARNING,
        "h2: its own name has no address | add to /etc/hosts there: 10.0.0.2 h2"),
    "Debian's address": (on_h2(name_addresses=("127.0.1.1",)), "names", WARNING,
        "h2: its own name resolves to 127.0.1.1"),
    "a proxy": (on_h2(proxies={"http_proxy": "proxy:3128"}), "proxies", WARNING,
        "proxies differ: none on h1, h3; http_proxy=proxy:3128 on h2"),
    "few files": (on_h2(limits={"nofile": 64, "nofile hard": 20000}), "limits", FAILURE,
        "h2: a process may open 64 files | ulimit -n 20000 there"),
    "rather few files": (on_h2(limits={"nofile": 512, "nofile hard": 512}), "limits", WARNING,
        "h2: a process may open 512 files | nofile in /etc/security/limits.conf"),
    "few processes": (on_h2(limits={"nofile": -1, "nproc": 200}), "limits", WARNING,
        "h2: the user may have 200 processes"),
    "no locked memory": (on_h2(fabric=FabricFacts(nics={"mlx5_0": "infiniband"})), "limits", WARNING,
        "h2: a process may lock 64 KiB"),
    "a small cgroup": (on_h2(memory={"available": 60 * GIB, "limit": 2**29}), "limits", WARNING,
        "h2: 512 MiB of memory for 1 process (the limit of its cgroup is 512 MiB)"),
    "one core": (on_h2(cores=1), "cores", WARNING, "h2: each process may use one core of 8"),
    "a full disk": (on_h2(disk_errors={"/tmp": "No space left on device"}), "storage", FAILURE,
        "h2: nothing can be written to /tmp: No space left on device | df -h /tmp there; TMPDIR=DIR"),
    "little room": (on_h2(disks={"/tmp": 2**20}), "storage", WARNING, "h2: only 1 MiB are free in /tmp"),
    "Docker's memory": (on_h2(shared_memory=2**26), "storage", WARNING, "h2: /dev/shm has 64 MiB"),
    "no shared directory": (on_h2(sees_run_dir=False), "storage", WARNING, "h2: the files of a job in"),
    "an unknown name": (seen(peers=network() | {2: replace(network()[2], unknown_names=("h1",))}), "names", WARNING,
        "h3 does not know the name h1"),
    "a host that is cut off": (seen(peers=network(BOTH_WAYS_OF_H3)), "network", FAILURE,
        "h3 cannot be connected with the others (does not answer)"),
    "one way that is closed": (seen(peers=network({(0, 2)})), "network", FAILURE,
        "h1 cannot connect to h3 (does not answer)"),
    "a clock that is ahead": (seen(clocks={1: RecordClock(1, -90.0, 0.001)}), "clocks", WARNING,
        "the clock of h2 is 90.0 s ahead of"),
    "a clock that is behind": (seen(clocks={2: RecordClock(2, 3.2, 0.001)}), "clocks", WARNING,
        "the clock of h3 is 3.2 s behind"),
    "idle nodes": (seen(allocation=Allocation("7", (*HOSTS, "h4"), (8, 8, 8, 8))), "Slurm", WARNING,
        "Slurm job 7: 4 nodes, 8 CPUs each; h4 would stay idle"),
    "idle GPUs": (box(**h100(2)), "devices", WARNING, "box: NVIDIA's driver shows 2 GPUs, but JAX uses 1"),
    "no plugin": (box(ON_CPU, **h100()), "devices", WARNING,
        "box: NVIDIA's driver shows 1 GPU, but JAX uses none | pip install"),
    "a GPU that is taken": (box(**h100(used=60 * GIB)), "devices", WARNING,
        "box: 60 GiB of 80 GiB of GPU 0 are used by another process"),
    "an old driver": (box(**h100(driver="535.1"), versions=WITH_PLUGIN), "devices", FAILURE,
        "box: jax-cuda13-plugin needs NVIDIA's driver 580 or newer, but 535.1 is installed"),
    "a driver in trouble": (box(nvidia_trouble="NVML does not answer: version mismatch"), "devices", WARNING,
        "box: there is an NVIDIA driver, but NVML does not answer: version mismatch"),
    "an old plugin": (box(**h100(), versions={**WITH_PLUGIN, "jax-cuda13-plugin": "0.11.2"}), "versions", WARNING,
        "box: jax-cuda13-plugin 0.11.2 does not fit jaxlib 0.12.0"),
    "drivers that differ": (with_drivers("580.159.04", "570.1", "580.159.04"), "devices", WARNING,
        "NVIDIA's drivers differ: 580.159.04 on h1, h3; 570.1 on h2"),
    "no verdict": (Observation(output="jaxrun: out of paper\n"), "start", FAILURE, "jaxrun: out of paper"),
}  # fmt: skip


@pytest.mark.parametrize(("observation", "check", "level", "text"), CASES.values(), ids=CASES)
def test_what_is_wrong_is_named_with_its_host(observation, check, level, text):
    ((found_check, found_level, found_text),) = bad(observation)
    assert (found_check, found_level) == (check, level) and found_text.startswith(text)


@pytest.mark.parametrize(
    ("version", "fixed"),
    [
        ("3.11.15", "3.12.8"),
        ("3.12.7", "3.12.8"),
        ("3.12.8", ""),
        ("3.13.0rc2", "3.13.1"),
        ("3.13.1", ""),
        ("3.14.0", ""),
        ("missing", ""),
    ],
)
def test_the_first_python_without_the_crash_of_the_fault_handler(version, fixed):
    assert fixed_fault_handler(version) == fixed


def test_nothing_is_reported_if_all_is_right():
    assert bad(seen()) == []
    assert doctor_report.exit_code(seen(), doctor_report.judge(seen())) == 0
    assert bad(seen(allocation=Allocation("7", HOSTS, (8, 8, 8)))) == []
    assert bad(box(**h100(used=-1, total=-1))) == []  # a GPU that has no memory of its own


def test_the_interfaces_by_which_hosts_reach_each_other_are_listed():
    mixed = network() | {1: replace(network()[1], interfaces={0: "ib0", 2: "eth0"})}
    for peers, by in ((network(), "eth0"), (mixed, "eth0 on h1, h3; eth0 and ib0 on h2")):
        texts = [finding.text for name, finding in doctor_report.judge(seen(peers=peers)) if name == "network"]
        assert texts == [f"each host reaches each other, by {by}"]


def test_several_hosts_are_blamed_one_after_the_other_and_neither_of_two_that_cannot_meet():
    assert blame({("h1", "h2"), ("h2", "h1")}, {"h1", "h2"}).hosts == ()
    assert blame({("h1", "h2"), ("h2", "h1")}, {"h1", "h2", "h3"}).hosts == ()
    hosts = {f"h{number}" for number in range(1, 7)}
    broken = {(one, other) for one in hosts for other in hosts if one != other and {one, other} & {"h2", "h5"}}
    found = blame(broken | {("h1", "h3")}, hosts)
    assert (found.hosts, found.pairs) == (("h2", "h5"), (("h1", "h3"),))


def test_doctor_reports_a_job_that_did_not_start_with_its_output_and_the_host_that_does_not_answer():
    verdict = Verdict("unavailable", 69, {}, headline="mpirun ended with status 255\n  on node h2", advice="ssh h2")
    texts = [text for _, _, text in bad(Observation(verdict=verdict, unreachable={"h2": "no answer"}))]
    assert texts[0].startswith("h2 cannot be reached from here: no answer")
    assert texts[1] == "mpirun ended with status 255\n  on node h2 | ssh h2"


def test_a_host_that_says_nothing_while_others_do_is_named_before_the_verdict():
    verdict = Verdict("unavailable", 69, {}, headline="2 of 3 agents reported")
    present = {rank: facts(rank, HOSTS[rank]) for rank in (0, 2)}
    texts = [text for _, _, text in bad(seen(verdict=verdict, peers={}, devices={}, clocks={}, facts=present))]
    assert texts[0].startswith("nothing has started on h2") and texts[1].startswith("2 of 3 agents reported")
    by_ssh = replace(
        verdict, headline="1 of 3 hosts cannot be used by ssh\nh2: Connection refused\n    try: sshd there"
    )
    (only,) = bad(seen(verdict=by_ssh, peers={}, devices={}, clocks={}, facts=present))
    assert "h2: Connection refused" in only[2]
    of_another = replace(verdict, headline="1 of 3 hosts cannot be used by ssh\nh3: no route to h2 is known")
    silent, _ = bad(seen(verdict=of_another, peers={}, devices={}, clocks={}, facts=present))
    assert silent[2].startswith("nothing has started on h2")


def test_the_report_fits_the_terminal_and_says_how_many_there_are():
    timings = (CollectiveTiming("psum", 4096, 0.0003, 1e7), CollectiveTiming("psum", 2**20, 0.001, 9e8))
    shown = seen(facts(1, "h2", name_addresses=(), disk_errors={"/tmp": "No space left on device"}), timings=timings)
    text = doctor_report.format_report(shown, doctor_report.judge(shown), TerminalFormat(60))
    assert max(map(len, text.splitlines())) <= 60
    assert text.splitlines()[-1] == "jaxrun doctor: 1 failure and 1 warning"
    assert "psum            0.30 ms     900 MB/s" in text
    assert doctor_report.exit_code(shown, doctor_report.judge(shown)) == 69


def test_the_json_holds_all_that_was_found_and_seen():
    shown = seen(facts(1, "h2", name_addresses=()))
    content = json.loads(doctor_report.to_json(shown, doctor_report.judge(shown)))
    jsonschema.validate(content, json.loads(_SCHEMA.read_text()))
    assert content["exit_code"] == 0 and list(content["hosts"]) == list(HOSTS)
    (warning,) = (found for found in content["findings"] if found["level"] == "warning")
    assert warning["check"] == "names" and warning["text"].startswith("h2")
    assert {"from": "h3", "to": "h1", "interface": "eth0", "error": None} in content["connections"]


def test_what_the_agents_tell_is_read_back_from_the_event_log(tmp_path):
    told, results = facts(1, "h2", port=7, **h100(2)), network()[1]
    log = RunDir(tmp_path)
    for message in (told, results, RecordClock(1, 0.5, 0.1), RecordClock(2, 0.25)):
        log.record(LoggedEvent(1.0, message))
    log.close()
    found = read_run_dir(tmp_path)
    assert found["facts"] == {1: told} and found["peers"] == {1: results}
    assert found["clocks"] == {1: RecordClock(1, 0.5, 0.1), 2: RecordClock(2, 0.25, 0.1)}
