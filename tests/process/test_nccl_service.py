"""An agent asks NCCL's own service (RAS): over a real socket, from a stand-in, with answers of all kinds."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import TIME_LIMIT, read_events, started
from ras_answers import BEHIND, WELL, communicator, json_answer, rank
from ras_stand_in import RasStandIn

from jaxrun.analysis.diagnosis.nccl_ras import NCCL_TIMEOUT_S
from jaxrun.node.agent import nccl_service
from jaxrun.node.agent.nccl_service import NcclInquiry, loaded_version, own_address, service_addresses
from jaxrun.node.agent.spawn import with_own_variables

SAFE, OLD, NONE = "2.30.4", "2.27.6", "2.23.4"


def ranks(late=(), count=8):
    return [rank(number, 100 + number, AllReduce=11 if number in late else 12) for number in range(count)]


AS_JSON = json_answer(communicator(*ranks(late=[5])))


@pytest.fixture
def stand_in():
    """stand_in(answer, …) → a RasStandIn that gives this text, or what this function returns."""
    with contextlib.ExitStack() as stack:

        def start(answer=AS_JSON, **options):
            server = RasStandIn(answer if callable(answer) else lambda: answer, **options)
            stack.callback(server.close)
            return server

        yield start


@pytest.fixture
def process_with(tmp_path):
    """process_with(version) → the pid of a process that has loaded a file by the name of this NCCL."""
    code = (
        "import mmap, sys; f = open(sys.argv[1]); m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ); print(1); input()"
    )
    with contextlib.ExitStack() as stack:

        def start(version, path=None):
            library = tmp_path / (path or f"libnccl.so.{version}")
            library.parent.mkdir(parents=True, exist_ok=True)
            library.write_bytes(b" " * 4096)
            words = [sys.executable, "-c", code, library]
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.callback(process.wait)
            stack.callback(process.communicate, b"\n")
            assert process.stdout.readline() == b"1\n"
            return process.pid

        yield start


def ask(pid, address, **options):
    """The report, and after how many seconds of waits it was there. No step of an inquiry may take long."""
    environ = {"NCCL_RAS_ADDR": address, "HOME": "/nonexistent"}
    began, now = time.monotonic(), 0.0  # a pause of the machine does not advance this clock
    inquiry = NcclInquiry(pid, environ, now, **options)
    while not inquiry.has_ended(now):
        time.sleep(inquiry.due - now)
        now = inquiry.due
    assert time.monotonic() < began + NCCL_TIMEOUT_S + 15
    return inquiry.report(), now


def behind(report):
    ((*_, late),) = [one.counts for one in report.differing[0].operations[:1]]
    return [(one.node, one.pid) for one in late.ranks.named]


def test_a_safe_version_is_asked_for_json_twice(stand_in, process_with):
    server = stand_in()
    report, _ = ask(process_with(SAFE), server.address)
    assert report.version == SAFE and behind(report) == [("10.7.0.1", 105)]
    assert server.said == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "SET FORMAT json", "STATUS"] * 2


def test_a_version_that_may_crash_is_asked_only_at_the_end_and_for_text(stand_in, process_with):
    server, pid = stand_in(BEHIND, has_json=False), process_with(OLD)
    report, seconds = ask(pid, server.address)
    assert report is None and server.said == [] and seconds < 1
    report, _ = ask(pid, server.address, whatever_it_costs=True)
    assert behind(report) == [("10.7.0.2", 5205)]
    assert server.said == ["CLIENT PROTOCOL 2", "TIMEOUT 2", "VERBOSE STATUS"] * 2


@pytest.mark.parametrize("version", [NONE, "", None], ids=["2.23", "unknown", "no NCCL"])
def test_without_a_service_nccl_is_not_asked(stand_in, process_with, version):
    server = stand_in()
    pid = os.getpid() if version is None else process_with(version, None if version else "libnccl.so.2")
    assert ask(pid, server.address, whatever_it_costs=True)[0] is None and server.said == []


def test_counts_that_increase_are_not_a_difference(stand_in, process_with):
    counts = iter(range(100, 200))

    def answer():
        return json_answer(communicator(rank(0, 1, AllReduce=next(counts)), rank(1, 2, AllReduce=next(counts))))

    report, _ = ask(process_with(SAFE), stand_in(answer).address)
    assert report.communicators == 1 and report.differing == ()


ODD = {
    "silence": {"is_silent": True},
    "half an answer": {"cut_after": len(AS_JSON) // 2},
    "an empty answer": {"cut_after": 0},
    "no end": {"keeps_open": True},
    "an old server": {"has_json": False, "answer": lambda: WELL},
    "garbage": {"answer": lambda: "HTTP/1.1 400 Bad Request\r\n\r\n\0\x1b[2J"},
    "no newline": {"answer": lambda: AS_JSON.strip()},
    "slow pieces": {"pause_s": 0.1},
}
ANSWERED = ("no newline", "slow pieces")


@pytest.mark.parametrize("name", ODD)
def test_whatever_answers_there_it_is_over_in_time(stand_in, process_with, name):
    server = stand_in()
    for attribute, value in ODD[name].items():
        setattr(server, attribute, value)
    report, seconds = ask(process_with(SAFE), server.address)
    assert (report is not None) == (name in ANSWERED) and seconds < NCCL_TIMEOUT_S + 1


def test_nobody_listens(process_with):
    with socket.socket() as bound:  # so that nobody else gets the port
        bound.bind(("127.0.0.1", 0))
        report, seconds = ask(process_with(SAFE), f"127.0.0.1:{bound.getsockname()[1]}")
    assert report is None and seconds < 1


def test_localhost_may_mean_either_address(stand_in, process_with):
    pid = process_with(SAFE)
    for host in ("127.0.0.1", "::1"):
        server = stand_in(host=host)
        assert ask(pid, f"localhost:{server.port}")[0] is not None
        assert ask(pid, server.address)[0] is not None


def test_512_ranks_are_read_without_a_pause_of_the_agent(stand_in, process_with):
    answer = json_answer(*[communicator(*ranks([77], 512), name=f"{n:x}") for n in range(8)])
    environ = {"NCCL_RAS_ADDR": stand_in(answer).address}
    inquiry, now, longest = NcclInquiry(process_with(SAFE), environ, 0.0), 0.0, 0.0
    while True:
        began = time.thread_time()  # a machine that pauses is not the agent that does
        if inquiry.has_ended(now):
            break
        longest = max(longest, time.thread_time() - began)
        time.sleep(0.01)
        now += 0.01
    assert len(inquiry.report().differing) == 8 and behind(inquiry.report()) == [("10.7.0.1", 177)]
    assert longest < 1.0  # some 0.05 s


# ---- which NCCL, and where it listens


def test_the_version_is_that_of_the_file_or_of_the_wheel(process_with, tmp_path):
    assert loaded_version(process_with("2.30.4")) == (2, 30, 4)
    for name in ("nvidia_nccl_cu13-2.29.7.dist-info", "nvidia_cublas-13.0.1.dist-info"):
        (tmp_path / "site-packages" / name).mkdir(parents=True)
    assert loaded_version(process_with("", "site-packages/nvidia/nccl/lib/libnccl.so.2")) == (2, 29, 7)
    (tmp_path / "site-packages/nvidia_nccl_cu12-2.27.5.dist-info").mkdir()
    assert loaded_version(process_with("", "site-packages/nvidia/nccl/lib/libnccl.so.2")) == (2, 27, 5)
    assert loaded_version(process_with("", "elsewhere/libnccl.so.2")) is None
    assert loaded_version(os.getpid()) is None and loaded_version(2**22 + 1) is None


def test_ranks_on_gpus_get_a_port_of_their_own_unless_the_user_has_chosen(tmp_path):
    environ = {"HOME": str(tmp_path), "JAX_PLATFORMS": "cuda,cpu"}
    (name, address), *more = own_address(environ).items()
    assert name == "NCCL_RAS_ADDR" and address.startswith("127.0.0.1:") and not more
    assert with_own_variables(environ) == {**environ, name: address}  # the same for each attempt
    assert with_own_variables({"JAX_PLATFORMS": "cpu"}) == {"JAX_PLATFORMS": "cpu"}
    for chosen in ({"NCCL_RAS_ADDR": "localhost:5"}, {"NCCL_RAS_ENABLE": "0"}):
        assert own_address({**environ, **chosen}) == {}
    (tmp_path / ".nccl.conf").write_text("# mine\nNCCL_RAS_ADDR=127.0.0.1:777\n")
    assert own_address(environ) == {} and service_addresses(environ) == (("127.0.0.1", 777),)


@pytest.mark.parametrize(
    ("chosen", "addresses"),
    [
        ({}, (("127.0.0.1", 28028), ("::1", 28028))),
        ({"NCCL_RAS_ADDR": "localhost:5"}, (("127.0.0.1", 5), ("::1", 5))),
        ({"NCCL_RAS_ADDR": "[::1]:5"}, (("::1", 5),)),
        ({"NCCL_RAS_ADDR": "login.example.org:5"}, ()),  # to look the name up may take long
        ({"NCCL_RAS_ADDR": "localhost"}, ()),
        ({"NCCL_RAS_ADDR": "localhost:99999"}, ()),
        ({"NCCL_RAS_ENABLE": "0"}, ()),
    ],
)
def test_where_the_service_listens(chosen, addresses):
    assert service_addresses({"HOME": "/nonexistent", **chosen}) == addresses


# ---- a job


LEFT_OUT = """
import mmap, os, sys
sys.path.insert(0, sys.argv[1])
import jax
from jax.experimental import multihost_utils
import below

with open(os.environ["NCCL_STAND_IN"], "rb") as file:  # so that the rank seems to have loaded NCCL
    library = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
multihost_utils.sync_global_devices("start")
print("ready", flush=True)
below.barrier(f"of rank {jax.process_index()}")
"""
# A library's barrier that never ends, although all ranks have come to it.
BELOW = """
from jax._src.distributed import global_state


def barrier(name):
    global_state.client.wait_at_barrier(name, 3_600_000)
"""


@pytest.mark.jax_version
def test_a_job_whose_ranks_all_wait_in_one_call_says_which_one_nccl_misses(stand_in, tmp_path):
    """The ranks are on CPUs and have mapped a file by NCCL's name: all else is as on GPUs."""

    def answer():
        pids = {event["rank"]: event["pid"] for event in read_events(tmp_path / "run", "WorkerSpawned")}
        counted = [rank(number, pids[number], "127.0.0.1", AllReduce=12 - number) for number in sorted(pids)]
        return json_answer(communicator(*counted))

    server = stand_in(answer)
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/below.py").write_text(BELOW)
    (tmp_path / "left_out.py").write_text(LEFT_OUT)
    library = tmp_path / f"libnccl.so.{SAFE}"
    library.write_bytes(b" " * 4096)
    given = [word for name, value in (("NCCL_RAS_ADDR", server.address), ("NCCL_STAND_IN", library))
             for word in ("--env", f"{name}={value}")]  # fmt: skip
    options = ("-n", "2", "--simulate-hosts", "2", "--stall-notice", "2", "--stall-timeout", "8")
    said = "in NCCL's communicator 9f3c0d5511aa70e2 (2 ranks), rank 1 (h2) has launched 11 AllReduces, and rank 0"
    with (tmp_path / "screen").open("wb") as screen:
        words = (*options, *given, str(tmp_path / "left_out.py"), str(tmp_path / "site-packages"))
        with started(tmp_path, *words, stderr=screen) as job:
            job.wait_for_output("ready", 2)
            stacks = subprocess.run(
                [sys.executable, "-m", "jaxrun", "stacks", job.run_dir], capture_output=True, text=True, timeout=60
            )
            assert said in " ".join(stacks.stdout.split())
            assert job.process.wait(TIME_LIMIT) == 124
    shown = " ".join((tmp_path / "screen").read_text().split())
    notices = [line for line in (tmp_path / "screen").read_text().splitlines() if "no progress for" in line]
    parts = ("in JAX's barrier 'of rank 0' (below.barrier", f"; {said}", "they wait for rank 1 (h2) · more")
    assert any(all(part in notice for part in parts) for notice in notices), notices
    assert shown.rpartition("as long as --stall-timeout allows")[2].count(said) == 1
    assert Path(job.run_dir / "verdict.json").exists() and server.asked >= 6


def test_the_agent_of_a_job_without_nccl_asks_nobody(stand_in, monkeypatch):
    """Rather than an empty answer at the usual port."""
    monkeypatch.setattr(nccl_service, "_DEFAULT_ADDR", stand_in().address)
    assert NcclInquiry(os.getpid(), {"HOME": "/nonexistent"}, 0.0).has_ended(0.0)
