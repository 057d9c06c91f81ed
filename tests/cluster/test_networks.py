"""How hosts find each other: one command on each, IPv6, and strangers in between.

Strangers are other users and hosts, which do not know a job's token: nothing of theirs runs, and no job loses its
verdict.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import harness
import pytest
from cluster_fixture import HOSTS, READY, RUNS, Bed, Job, JobRunner
from harness import extended, write_fake_runtime
from launch_modes import ATTACHED, LAUNCHED, MPICH, OPEN_MPI_5, SLURM, LaunchMode

STRANGERS = str(Path(__file__).with_name("strangers.py"))
COORDINATOR_STRANGER = str(Path(harness.__file__).with_name("coordinator_stranger.py"))
WAITS = """
import os, time, jax, jax.numpy as jnp
from jax.experimental import multihost_utils
if jax.process_index() == 0:
    print(os.environ["JAX_COORDINATOR_ADDRESS"], flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print(multihost_utils.process_allgather(jnp.array([jax.process_index() + 1.0])).sum())
"""
OURS = "jaxruns-test"  # the name of what the tests themselves run on the hosts
PORT = "7777"
TOKEN = {"JAXRUN_TOKEN": "5" * 64, "NO_COLOR": "1"}
NETWORK = "fd77::/64"
# Of a worker by hand: it ends with status 7 as soon as there is a file `go`.
UNTIL_GO = RUNS + "any(iter(lambda: time.sleep(0.01) or os.path.exists('../go'), True)); os._exit(7)"


@contextmanager
def typed_on_hosts(
    bed: Bed, tmp_path: Path, options: Sequence[tuple[str, ...]], program: tuple[str, ...], *, files: int = 1024
) -> Iterator[list[Job]]:
    """`jaxrun OPTIONS PROGRAM` on each host, with its own options, in a directory of its own; by_hand.py is there."""
    with ExitStack() as stack:
        jobs = []
        for host, own in zip(HOSTS, options, strict=False):
            folder = tmp_path / host
            folder.mkdir()
            env = write_fake_runtime(folder) if "by_hand.py" in program else {}
            words = [sys.executable, "-m", "jaxrun", *own, "--run-dir", str(folder / "run"), *program]
            limited = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *words]
            jobs.append(stack.enter_context(bed.typed(host, *limited, directory=folder, env=TOKEN | env)))
        yield jobs


# ---- one command on each host


def host_ranks(*ranks: int) -> list[tuple[str, ...]]:
    return [("--hosts", "3", "--host-rank", str(rank), "--head", f"h1:{PORT}") for rank in ranks]


@pytest.mark.extended
def test_three_commands_are_one_job_over_three_hosts(bed: Bed, tmp_path: Path) -> None:
    with typed_on_hosts(bed, tmp_path, host_ranks(0, 1, 2), ("-m", "jaxrun_runtime.programs.selfcheck")) as jobs:
        results = [job.result() for job in jobs]
        jobs[0].gone()
    assert [result.code for result in results] == [0, 0, 0], results
    assert "3 processes on 3 hosts, with a command on each" in results[0].err.replace(" (cpu)", "")
    assert results[0].verdict()["hosts"] == {"0": "h1", "1": "h2", "2": "h3"}
    assert all(result.err.endswith("jaxrun: done\n") and not result.out for result in results[1:])


# ---- IPv6


@pytest.fixture
def addresses(bed: Bed) -> Iterator[dict[str, str]]:
    """Each host has one of the network."""
    given = {host: f"fd77::{number}" for number, host in enumerate(HOSTS, start=1)}
    for host, address in given.items():
        bed.inside(host, "ip", "-6", "address", "add", f"{address}/64", "dev", "eth0", "nodad")
    yield given
    for host, address in given.items():
        bed.inside(host, "ip", "-6", "address", "delete", f"{address}/64", "dev", "eth0")


@pytest.mark.extended
def test_hosts_may_meet_over_ipv6(make_runner: Callable[[LaunchMode], JobRunner], addresses: dict[str, str]) -> None:
    """The control channel, JAX's coordinator and Gloo."""
    words = ("--interface", NETWORK, "-m", "jaxrun_runtime.programs.selfcheck")
    result = make_runner(LaunchMode(MPICH, LAUNCHED)).jaxrun(*words)
    assert result.code == 0, result
    assert {event["host"]: event["address"] for event in result.events("AgentReport")} == addresses
    assert str(result.events("AttemptStarted")[0]["listening"]).startswith(f"eth0 [{addresses['h1']}]:")


# ---- strangers at JAX's coordinator


@pytest.mark.extended
@pytest.mark.parametrize(
    "mode",
    [
        LaunchMode(OPEN_MPI_5, LAUNCHED),
        LaunchMode(SLURM, LAUNCHED),
        extended(LaunchMode(OPEN_MPI_5, ATTACHED)),
        extended(LaunchMode(SLURM, ATTACHED)),
    ],
    ids=str,
)
def test_a_stranger_on_another_host_gets_nothing_from_the_coordinator(
    make_runner: Callable[[LaunchMode], JobRunner], tmp_path: Path, mode: LaunchMode
) -> None:
    """Without TLS, nor by TLS without a certificate. The job then computes something over all hosts."""
    (tmp_path / "waits.py").write_text(WAITS)
    with make_runner(mode).started("waits.py") as job:
        job.wait_for_output(":", count=1)
        answers = job.bed.inside("ctl", sys.executable, COORDINATOR_STRANGER, job.log(0).strip())
        (tmp_path / "go").touch()
        result = job.result()
        job.gone()
    assert (result.code, answers) == (0, "b'' b''\n"), result
    assert [line.split()[1] for line in result.out.splitlines() if ":" not in line] == ["6.0"] * 3, result


@pytest.mark.extended
def test_a_stranger_is_let_in_where_the_coordinator_is_to_be_open(
    make_runner: Callable[[LaunchMode], JobRunner], tmp_path: Path
) -> None:
    """By which the test above could fail."""
    (tmp_path / "waits.py").write_text(WAITS)
    with make_runner(LaunchMode(SLURM, LAUNCHED)).started("--coordinator-tls", "off", "waits.py") as job:
        job.wait_for_output(":", count=1)
        answers = job.bed.inside("ctl", sys.executable, COORDINATOR_STRANGER, job.log(0).strip())
        (tmp_path / "go").touch()
        assert job.result().code == 0 and answers.startswith("b'\\x00") and answers.endswith(" b''\n")


# ---- strangers at the head


def attached(
    bed: Bed, tmp_path: Path, *ways: tuple[str, ...], files: int = 1024, program: tuple[str, ...] = ()
) -> AbstractContextManager[list[Job]]:
    """A job of a rank on h1 and one on h2; `ways`: for each, the options by which it finds the head."""
    options = [("attach", "--rank", str(rank), "--size", "2", *way) for rank, way in enumerate(ways)]
    return typed_on_hosts(bed, tmp_path, options, program or ("by_hand.py", RUNS + READY, UNTIL_GO), files=files)


def stranger(bed: Bed, host: str, *words: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A program of another user on this host, until the test ends; see strangers.py."""

    @contextmanager
    def running() -> Iterator[subprocess.Popen[str]]:
        renamed = ("bash", "-c", 'exec -a "$0" "$@"', OURS, sys.executable, STRANGERS, *words)
        started = bed.start("exec", host, "--", *renamed, stderr=subprocess.STDOUT)
        try:
            yield started
        finally:
            started.kill()
            started.communicate()

    return running()


def first_line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    line = started.stdout.readline().strip()
    return line if "Traceback" not in line else line + started.stdout.read()


def check_ended_with_its_verdict(jobs: list[Job], tmp_path: Path) -> None:
    """Let rank 1 end with status 7, which is the job's."""
    (tmp_path / "go").touch()
    results = [job.result() for job in jobs]
    jobs[0].gone(but_for=(OURS,))
    assert [result.code for result in results] == [7, 7], results
    assert "rank 1 of 2 on h2 exited with status 7" in results[0].err, results
    assert "went away" not in results[0].err + results[1].err


@pytest.mark.extended
@pytest.mark.parametrize("files", [1024, extended(100)])
def test_a_flood_of_strangers_at_the_start_and_in_the_run_costs_no_verdict(
    bed: Bed, tmp_path: Path, files: int
) -> None:
    way = ("--head", f"h1:{PORT}")
    with stranger(bed, "h3", "flood", "h1", PORT, "1") as early, attached(bed, tmp_path, way, way, files=files) as jobs:
        assert first_line(early).startswith("connected ")
        jobs[0].wait_until(lambda: "ready" in jobs[0].log(0), "start")
        with stranger(bed, "h3", "flood", "h1", PORT, "1") as late:
            assert first_line(late).startswith("connected ")
        check_ended_with_its_verdict(jobs, tmp_path)


@pytest.mark.extended
def test_of_two_paths_that_both_lead_to_the_head_one_is_used(bed: Bed, tmp_path: Path) -> None:
    """The second, begun 0.2 s later, answers first; by then the head has let the agent in on both."""
    with ExitStack() as stack:
        for port, delay in (("7778", "0.6"), ("7779", "0.2")):
            relay = stranger(bed, "h2", "relay", port, "h1", PORT, "--delay-welcome", delay)
            assert first_line(stack.enter_context(relay)) == "listening"
        both = ("--head", "127.0.0.1:7778,127.0.0.1:7779")
        with attached(bed, tmp_path, ("--head", f"h1:{PORT}"), both) as jobs:
            check_ended_with_its_verdict(jobs, tmp_path)


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
def test_no_other_host_is_sent_to_its_own_loopback_address(bed: Bed, tmp_path: Path) -> None:
    """A local user of h2 listens there, while the way to the head is cut."""
    shared = ("--rendezvous", str(tmp_path))
    with stranger(bed, "h2", "relay", PORT, "h1", PORT) as relay:
        assert first_line(relay) == "listening"
        bed.run("cut", "h2")
        # Only rank 0 is told the port: rank 1 finds what rank 0 offers in its file.
        with attached(bed, tmp_path, ("--head", f"h1:{PORT}", *shared), shared) as jobs:
            jobs[0].wait_until(lambda: list(tmp_path.glob(".jaxrun-attach-*")) != [], "rendezvous file")
            time.sleep(1.0)  # for rank 1 to try all addresses in it
            bed.run("mend", "h2")
            check_ended_with_its_verdict(jobs, tmp_path)
        relay.kill()
        assert relay.stdout is not None and relay.stdout.read() == ""


def test_who_relays_the_handshake_can_order_nothing(bed: Bed, tmp_path: Path) -> None:
    """An agent that was led to a relay proves itself to the head, and believes nothing that the relay adds."""
    written = tmp_path / "open" / "written"
    written.parent.mkdir()
    written.parent.chmod(0o777)
    program = ("--init-timeout", "6", "-m", "jaxrun_runtime.programs.selfcheck")
    with stranger(bed, "h2", "relay", PORT, "h1", PORT, "--inject", str(written)) as relay:
        assert first_line(relay) == "listening"
        ways = ("--head", f"h1:{PORT}"), ("--head", f"127.0.0.1:{PORT}")
        with attached(bed, tmp_path, *ways, program=program) as jobs:
            results = [job.result() for job in jobs]
            jobs[0].gone(but_for=(OURS,))
    assert [result.code for result in results] == [69, 70], results
    assert not written.exists()
    assert "a message was changed, repeated or left out on its way" in results[1].err, results
