"""Hosts by a real sshd: those that fail, each in its own way, and a laptop that the hosts cannot reach."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import processes
import pytest
import sshd
from cluster_fixture import READY, RUNS, UNTIL_GO, Bed, Job, JobRunner
from harness import Result, make_environment, write_fake_runtime
from launch_modes import PYTHON, SSH, LaunchMode
from state import address

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
OPENSSH = {sshd.REAL: "1"}
# A worker by hand that waits in its first attempt, and ends well in the second.
AGAIN = f"""
if os.environ["JAXRUN_ATTEMPT"] == "2":
    run(); print("again", flush=True); done()
{RUNS}{READY}
"""
LAPTOP = "10.99.0.1"  # an address to which no host has a route


@pytest.fixture
def laptop(bed: Bed) -> Iterator[str]:
    """A host that others do not reach at this address."""
    bed.inside("ctl", "ip", "link", "add", "lap0", "type", "veth", "peer", "name", "lap1")
    bed.inside("ctl", "ip", "address", "add", f"{LAPTOP}/32", "dev", "lap0")
    for end in ("lap0", "lap1"):
        bed.inside("ctl", "ip", "link", "set", end, "up")
    yield "ctl"
    bed.inside("ctl", "ip", "link", "del", "lap0")


def test_doctor_names_all_hosts_that_ssh_does_not_reach_in_its_words(bed: Bed, tmp_path: Path) -> None:
    hosts = "h2,h3-unknown,h3-closed,h3-denied,nowhere"
    words = (PYTHON, "-m", "jaxrun", "doctor", "--backend", "ssh", "-H", hosts)
    with bed.typed("h1", *words, directory=tmp_path, env=OPENSSH) as job:
        result = job.result()
        job.gone()
    assert result.code == 69 and "4 of 5 hosts cannot be used by ssh" in result.out, result
    for said in (
        "h3-unknown: Host key verification failed.",
        "h3-closed: ssh: connect to host h3 port 9: Connection refused",
        "h3-denied: root@h3: Permission denied",
        "nowhere: ssh: Could not resolve hostname nowhere",
        "ssh-copy-id h3-denied",
    ):
        assert said in result.out, result
    assert "leads nowhere" not in result.out  # the names are ssh's


def test_a_job_goes_on_if_all_its_connections_by_ssh_break(
    make_runner: Callable[[LaunchMode], JobRunner], tmp_path: Path
) -> None:
    go = tmp_path / "go"
    with make_runner(SSH).by_hand(code=UNTIL_GO.format(str(go))) as job:
        job.wait_for_output("ready", count=3)
        for found in job.bed.job_processes():
            if found.command == "ssh":
                os.kill(found.pid, signal.SIGKILL)
        job.wait_until(lambda: not any("sshd" in one.command for one in job.bed.job_processes()), "end of the sessions")
        go.touch()
        result = job.result()
        job.gone()
    assert result.code == 0 and not result.events("AgentLost"), result


def test_a_laptop_that_slept_goes_on_with_the_same_hosts_through_a_login_node(
    bed: Bed, laptop: str, tmp_path: Path
) -> None:
    options = ("--backend", "ssh", "--interface", LAPTOP, "--max-restarts", "1", "-H", "h2,h3-through-h2")
    words = (PYTHON, "-m", "jaxrun", *options, "--run-dir", str(tmp_path / "run"), "by_hand.py", AGAIN, AGAIN)
    env = {**OPENSSH, **write_fake_runtime(tmp_path)}
    with bed.typed(laptop, *words, directory=tmp_path, env=env) as job:
        job.wait_for_output("ready", count=2)
        assert {event["head_address"] for event in job.events("AgentReport")} == {"127.0.0.1"}
        sleep_until_nothing_runs(bed, job)
        result = job.result()
        ended_at = time.time()
        job.gone()
    assert result.code == 0 and result.out.count("again") == 2, result
    # Once all is over, the forwarded connections do not keep ssh, and so jaxrun, from ending: that took 5 s more.
    assert ended_at - (job.run_dir / "verdict.json").stat().st_mtime < 4, result


HIDES = 'for path; do mount --bind /mnt "$path" || exit; done'
UNHIDES = 'for path; do umount "$path"; done'
SHOWS = "print('starts in', os.getcwd(), 'with', sys.prefix, flush=True)"


@pytest.fixture
def bare(bed: Bed, tmp_path: Path) -> Iterator[str]:
    """An environment, which h2 and h3 do not see; nor jaxrun, nor any package, nor a directory for a project."""
    python = make_environment(tmp_path / "env")
    (tmp_path / "project").mkdir()
    hidden = (sys.prefix, *(str(ROOT / name) for name in ("launcher", "runtime", "tests")), str(tmp_path))
    try:
        for host in ("h2", "h3"):
            bed.inside(host, "sh", "-ec", HIDES, "sh", *hidden)
        yield python
    finally:
        for host in ("h2", "h3"):
            bed.inside(host, "sh", "-c", UNHIDES, "sh", *hidden)


def test_hosts_begin_with_nothing_but_python(bed: Bed, bare: str, tmp_path: Path) -> None:
    """Without --stage, what lacks there is said; then all comes by ssh, and the next start finds it."""
    project = tmp_path / "project"
    env = {**OPENSSH, **write_fake_runtime(project)}
    worker = (ROOT / "tests" / "process" / "worker_by_hand.py").read_text()
    (project / "fake" / "jaxrun_runtime" / "worker_by_hand.py").write_text(worker)
    code = f"{RUNS}{SHOWS}; done()"

    def run(name: str, *words: str) -> Result:
        options = ("--backend", "ssh", "-H", "h2,h3", "--run-dir", str(tmp_path / name), *words)
        typed = ("sh", "-c", f'cd {project}; exec "$@"', "sh", bare, "-m", "jaxrun", *options, "by_hand.py", code, code)
        with bed.typed("h1", *typed, directory=tmp_path, env=env) as job:
            result = job.result()
            job.gone()
        return result

    lacks = run("lacks")
    assert lacks.code == 69 and f"h2, h3: sh: 1: exec: {bare}: not found\n    try: --remote-python PATH" in lacks.err
    assert "or --stage venv, which carries this one's packages to any Python" in lacks.err, lacks
    first = run("first", "--stage", "venv", "--stage", ".")
    assert first.code == 0 and " on 2 hosts" in first.err, first
    assert first.out.count("starts in ") == 2 and first.out.count("jaxrun-stage-") == 4, first
    assert f"ranks 0-1 (h2, h3) started in a copy of {project}" in first.err
    again = run("again", "--stage", "venv", "--stage", ".")
    assert again.code == 0 and sorted(again.out.split()) == sorted(first.out.split()), again
    assert "jaxrun: staged" not in again.err


@pytest.fixture
def walled_in(bed: Bed) -> Iterator[str]:
    """A host to which h3 has no way; h2 is the login node between them."""
    bed.inside("h3", "ip", "route", "add", "prohibit", address("ctl"))
    yield "ctl"
    bed.inside("h3", "ip", "route", "del", "prohibit", address("ctl"))


CELLS = (
    "%load_ext jaxrun",
    "%gang -H h3-through-h2:2 --backend ssh",
    "%%gang\nimport os, jax\nx = jax.process_index() + 10",
    "%%gang\nfrom jax.experimental import multihost_utils\n"
    "print(os.uname().nodename, int(multihost_utils.process_allgather(x).sum()))",
    "%gang stop",
)


def test_a_notebook_on_a_laptop_has_its_gang_on_a_host_behind_a_login_node(
    bed: Bed, walled_in: str, tmp_path: Path
) -> None:
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbformat.write(book, tmp_path / "book.ipynb")
    execute = str(Path(PYTHON).with_name("jupyter-execute"))
    with bed.typed(walled_in, execute, "--inplace", "book.ipynb", directory=tmp_path, env=OPENSSH) as job:
        result = job.result()
        job.gone()
    assert result.code == 0, result
    cells = nbformat.read(tmp_path / "book.ipynb", as_version=4).cells
    outputs = [output for cell in cells for output in cell.outputs]
    shown = "".join(output.get("text") or output["data"]["text/plain"] for output in outputs)
    assert "2 processes x 1 device (cpu) on h3" in shown and "[0-1] h3 21" in shown, shown


def sleep_until_nothing_runs(bed: Bed, job: Job) -> None:
    """Stop all that runs on the laptop until no rank is left on any host."""
    network = processes.inspect(job.launcher())
    assert network is not None
    own = [found.pid for found in bed.job_processes() if found.network == network.network]
    for pid in own:
        os.kill(pid, signal.SIGSTOP)
    try:
        job.wait_until(lambda: not job.workers(), "end of the ranks")
    finally:
        for pid in own:
            os.kill(pid, signal.SIGCONT)
