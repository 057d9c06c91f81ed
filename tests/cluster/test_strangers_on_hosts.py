"""Other users and hosts, which do not know a job's token: nothing of theirs runs, and no job loses its verdict."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import pytest
from cluster_fixture import Bed, Job
from launch_modes import OPEN_MPI_5

STRANGERS = str(Path(__file__).with_name("strangers.py"))
SLOW_LINK = str(Path(__file__).with_name("slow_link.py"))
OURS = "jaxruns-test"  # the name of what the tests themselves run on the hosts
PORT = "7777"
TOKEN = {"JAXRUN_TOKEN": "5" * 64, "NO_COLOR": "1"}
GANG = """
import os, sys, jaxrun
hosts, mpirun = sys.argv[1:]
with jaxrun.Gang(2, backend="mpirun", platform="cpu", options=["--mpirun", mpirun, "-H", hosts]) as gang:
    print(gang.run(os.uname).main.nodename, [len(data) for data in gang.run(bytes, 100_000)])
"""
# Rank 1 ends with status 7 as soon as there is a file `go`.
PROGRAM = """
import os, sys, time, jax
jax.devices()
print("ready", flush=True)
while not os.path.exists("../go"):
    time.sleep(0.01)
sys.exit(7 * (jax.process_index() == 1))
"""


@contextmanager
def attached(
    bed: Bed, tmp_path: Path, *ways: tuple[str, ...], files: int = 1024, more: tuple[str, ...] = ()
) -> Iterator[list[Job]]:
    """A job of a rank on h1 and one on h2; `ways`: for each, the options by which it finds the head."""
    with ExitStack() as stack:
        jobs = []
        for rank, way in enumerate(ways):
            folder = tmp_path / f"h{rank + 1}"
            folder.mkdir()
            (folder / "program.py").write_text(PROGRAM)
            words = [sys.executable, "-m", "jaxrun", "attach", "--rank", str(rank), "--size", "2", *way]
            words += ["--run-dir", str(folder / "run"), *more, "program.py"]
            limited = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *words]
            jobs.append(stack.enter_context(bed.typed(f"h{rank + 1}", *limited, directory=folder, env=TOKEN)))
        yield jobs


def stranger(bed: Bed, host: str, *words: str) -> AbstractContextManager[subprocess.Popen[str]]:
    """A program of another user on this host; see strangers.py."""
    return running(bed, host, STRANGERS, *words)


@contextmanager
def running(bed: Bed, host: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A Python program on this host, until the test ends."""
    renamed = ("bash", "-c", 'exec -a "$0" "$@"', OURS, sys.executable, *words)
    started = bed.start("exec", host, "--", *renamed, stderr=subprocess.STDOUT)
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


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
    assert "rank 1 of 2 on h2 ended with status 7" in results[0].err, results
    assert "went away" not in results[0].err + results[1].err


@pytest.mark.parametrize("files", [1024, pytest.param(100, marks=pytest.mark.extended)])
def test_a_flood_of_strangers_at_the_start_and_in_the_run_costs_no_verdict(
    bed: Bed, tmp_path: Path, files: int
) -> None:
    way = ("--head", f"h1:{PORT}")
    with stranger(bed, "h3", "flood", "h1", PORT, "2") as early, attached(bed, tmp_path, way, way, files=files) as jobs:
        assert first_line(early).startswith("connected ")
        jobs[0].wait_until(lambda: "ready" in jobs[0].log(0), "start")
        with stranger(bed, "h3", "flood", "h1", PORT, "2") as late:
            print(first_line(late))
        check_ended_with_its_verdict(jobs, tmp_path)


@pytest.fixture
def slow_paths(bed: Bed) -> Iterator[None]:
    """Besides the one at once, two ways from h2 to h1 and back, that take 200 and 370 ms."""
    if not Path("/dev/net/tun").exists():
        pytest.skip("a slow way is made of /dev/net/tun, which is not there")
    with ExitStack() as stack:
        for number, peer in ((1, "h2"), (2, "h1")):
            links = (f"slow0:10.78.0.{number}:0.1:7800", f"slow1:10.79.0.{number}:0.185:7900")
            started = stack.enter_context(running(bed, f"h{number}", SLOW_LINK, peer, *links))
            assert first_line(started) == "up"
        yield


@pytest.mark.extended
@pytest.mark.usefixtures("slow_paths")
def test_over_two_slow_paths_no_agent_goes_away(bed: Bed, tmp_path: Path) -> None:
    """The second, begun 0.2 s later, answers first; by then the head has let the agent in on both."""
    both = ("--head", f"10.79.0.1:{PORT},10.78.0.1:{PORT}")
    with attached(bed, tmp_path, ("--head", f"h1:{PORT}"), both) as jobs:
        check_ended_with_its_verdict(jobs, tmp_path)


def test_of_two_paths_the_first_of_which_is_late_one_is_used(bed: Bed, tmp_path: Path) -> None:
    """Its Welcome comes after another path was tried, too."""
    with stranger(bed, "h2", "relay", PORT, "h1", "--delay-welcome", "0.5") as late:
        assert first_line(late) == "listening"
        both = ("--head", f"127.0.0.1:{PORT},h1:{PORT}")
        with attached(bed, tmp_path, ("--head", f"h1:{PORT}"), both) as jobs:
            check_ended_with_its_verdict(jobs, tmp_path)
        late.kill()
        assert late.stdout is not None and "somebody came" in late.stdout.read()


@pytest.mark.usefixtures("mended")
def test_no_other_host_is_sent_to_its_own_loopback_address(bed: Bed, tmp_path: Path) -> None:
    """A local user of h2 listens there, while the way to the head is cut."""
    shared = ("--rendezvous", str(tmp_path))
    with stranger(bed, "h2", "relay", PORT, "h1") as relay:
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
    with stranger(bed, "h2", "relay", PORT, "h1", "--inject", str(written)) as relay:
        assert first_line(relay) == "listening"
        ways = ("--head", f"h1:{PORT}"), ("--head", f"127.0.0.1:{PORT}")
        with attached(bed, tmp_path, *ways, more=("--init-timeout", "2")) as jobs:
            results = [job.result() for job in jobs]
            jobs[0].gone(but_for=(OURS,))
    assert [result.code for result in results] == [69, 70], results
    assert not written.exists()
    assert "a message was changed, repeated or left out on its way" in results[1].err, results


def test_a_gang_over_hosts_starts_and_works_in_a_flood_of_strangers(bed: Bed, tmp_path: Path) -> None:
    """A local user sees at which port it listens, as soon as it does."""
    if reason := OPEN_MPI_5.missing():
        pytest.skip(reason)
    limited = ["sh", "-c", 'ulimit -n 256; exec "$@"', "sh", sys.executable, "-c", GANG, "h2:1,h3:1", OPEN_MPI_5.mpirun]
    with stranger(bed, "h1", "flood-new", "127.0.0.1", "2") as flood:
        assert first_line(flood) == "watching"
        with bed.typed("h1", *limited, directory=tmp_path) as job:
            result = job.result()
            assert first_line(flood).startswith("connected ")
            job.gone(but_for=(OURS,))
    assert (result.code, result.out) == (0, "h2 [100000, 100000]\n"), result
