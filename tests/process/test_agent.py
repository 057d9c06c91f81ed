"""The agent and its group of workers, forked or not, in jobs of processes that speak the protocol without jax."""

import math
import mmap
import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from harness import extended, is_alive, jaxrun, wait_until, write_fake_runtime

from jaxrun.files import procfs
from jaxrun.node.agent import mpi_memory
from jaxrun.protocol.codec import encode
from jaxrun.protocol.worker_messages import Done

CLEAN = "run(); done()"
SLEEPS = "run(); time.sleep(600)"
LOOKS = """
run()
print('hello from', rank)
print(os.getsid(0) == os.getpid())
for fd in os.listdir('/proc/self/fd'):
    name = f'/proc/self/fd/{fd}'
    if os.path.lexists(name): print(os.readlink(name))
done()
"""


@pytest.fixture
def run_job(tmp_path):
    """run_job(CODE, …) → the Result of a job with one worker by hand per CODE; `fork` is of write_fake_runtime."""

    def run(*codes, options=(), fork=None):
        env = write_fake_runtime(tmp_path, fork)
        return jaxrun(tmp_path, "-n", str(len(codes)), "--grace", "0.3", *options, "by_hand.py", *codes, env=env)

    return run


def statuses(result):
    ends = {event["rank"]: event["status"] for event in result.events("WorkerExited")}
    return [ends[rank] for rank in sorted(ends)]


def logs(result):
    return [path.read_text() for path in sorted(result.run_dir.glob("rank-*.out"))]


def test_a_clean_run_in_which_each_worker_has_a_session_and_no_descriptor_of_anothers(run_job):
    result = run_job(LOOKS, LOOKS, LOOKS)
    assert (result.code, statuses(result)) == (0, [0, 0, 0])
    names = [event["type"] for event in result.events("") if event.get("rank") == 2]
    whole_life = ["WorkerSpawned", "Hello", "DeviceReport", "Done", "WorkerExited"]
    assert [name for name in names if name in whole_life] == whole_life and names.count("FirstOutput") == 1
    seen = [log.splitlines() for log in logs(result)]
    assert sorted(result.out.splitlines()) == sorted(f"[{rank}] {line}" for rank in range(3) for line in seen[rank])
    assert [lines[:2] for lines in seen] == [[f"hello from {rank}", "True"] for rank in range(3)]
    each = ["memfd", "pipe", "pipe", "rank-", "socket"]
    own = [{name for name in lines[2:] if not name.startswith("/dev/")} for lines in seen]
    for names, others in ((own[0], own[1] | own[2]), (own[1], own[0] | own[2]), (own[2], own[0] | own[1])):
        assert not names & others
        assert sorted(re.sub(r"[:\d].*", "", Path(name).name) for name in names) == each


@pytest.mark.extended
@pytest.mark.parametrize(
    ("code", "status", "exit_code"),
    [("hello(); os._exit(0)", 0, 1), ("run(); link.close(); time.sleep(0.05); os._exit(5)", 5, 5)],
    ids=["while joining", "without its channel"],
)
def test_a_worker_ends_without_a_report(run_job, code, status, exit_code):
    result = run_job(SLEEPS, code)
    assert (result.code, statuses(result), result.verdict()["culprits"]) == (exit_code, [-9, status], [1])


@pytest.mark.extended
@pytest.mark.parametrize(
    "led", ["", "import faulthandler; faulthandler.enable(2); "], ids=["jaxrun's", "to stderr, by absl"]
)
def test_a_crash_leaves_its_stack_and_the_last_lines_of_stderr(run_job, led):
    crash = "print('so far', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    result = run_job(f"run(); {led}{crash}")
    assert result.code == 139
    assert re.search(r'was here when it ended:\n.*File "<string>", line 1, in <module>', result.err, re.DOTALL)
    written = (result.run_dir / "rank-0000.err").read_text()
    assert written.startswith("so far\n") and (written == "so far\n") == (not led)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("sent", "why"),
    [(b"GET / HTTP/1.0\r\n\r\n", "a frame announces"), (encode(Done(0, 1.0)), "a Done for another rank than 1")],
    ids=["a request", "another rank's end"],
)
def test_what_a_worker_cannot_mean_is_its_own_fault(run_job, sent, why):
    result = run_job(SLEEPS, f"run(); link.sendall({sent!r}); time.sleep(600)")
    assert (result.verdict()["culprits"], statuses(result)) == ([1], [-9, -9])
    (failed,) = result.events("Failed")
    assert (failed["rank"], failed["error"]) == (1, "ProtocolError")
    assert "wrote to jaxrun's channel" in failed["message"] and why in failed["message"]


@pytest.mark.extended
def test_daemons_that_workers_left_behind_hold_up_nothing_and_are_gone_at_the_end(run_job, tmp_path):
    """Those with streams of their own, those that hold the worker's pipes open, and those that write for ever."""
    result = run_job(
        f"grandchild({str(tmp_path / 'pid0')!r}); run(); done()",
        f"grandchild({str(tmp_path / 'pid1')!r}, True); run(); print('last'); done()",
        "os.system('yes &'); run(); done()",
    )
    assert result.code == 0
    assert logs(result)[1] == "last\n" and set(logs(result)[2]) <= set("y\n")
    assert not any(is_alive(int((tmp_path / name).read_text())) for name in ("pid0", "pid1"))


@pytest.mark.extended
def test_attempts_leave_no_descriptor_open_in_the_launcher(run_job):
    ends = "done() if attempt == '4' else os._exit(2 + int(attempt))"
    # The least of many looks: for a moment the launcher may have a file open that it reads.
    looks = "(time.sleep(0.01) or len(os.listdir(f'/proc/{os.getppid()}/fd')) for _ in range(20))"
    shows = f"print(min({looks}), flush=True)"
    code = f"run(); attempt = os.environ['JAXRUN_ATTEMPT']; {shows}; {ends}"
    result = run_job(code, CLEAN, options=("--max-restarts", "3"))
    assert result.code == 0, result
    open_then = [path.read_text() for path in sorted(result.run_dir.rglob("rank-0000.out"))]
    assert len(open_then) == 4 and len(set(open_then[1:])) == 1, open_then


# ---- workers that one process forks, and what happens when it does not


@pytest.mark.extended
def test_forked_workers_run_as_any_other(run_job):
    size = 20
    result = run_job(*["run(); print(rank, os.getsid(0) == os.getpid()); done()"] * size, fork="fork")
    assert (result.code, statuses(result)) == (0, [0] * size)
    assert logs(result) == [f"{rank} True\n" for rank in range(size)]
    assert not result.events("FreshInterpreters")


@pytest.mark.extended
@pytest.mark.parametrize(
    ("how", "reason"),
    [("decline", "a thread was started"), ("die", "the process that imports jax for all workers has ended")],
)
def test_where_nothing_is_forked_the_workers_start_in_fresh_interpreters(run_job, how, reason):
    result = run_job(*["run(); print('here'); done()"] * 2, fork=how)
    assert (result.code, statuses(result)) == (0, [0, 0])
    assert [event["reason"] for event in result.events("FreshInterpreters")] == [reason]
    assert logs(result) == ["here\n"] * 2


@pytest.mark.extended
def test_a_limit_that_is_reached_after_the_first_fork_is_reported(run_job):
    result = run_job(SLEEPS, CLEAN, CLEAN, fork="limit")
    assert result.code == 69
    text = "rank 1 could not be started: no process can be forked: Resource temporarily unavailable"
    assert text in " ".join(result.err.split())


@pytest.mark.extended
def test_a_forked_worker_that_dies_at_once_ends_the_job(run_job):
    result = run_job("os._exit(4)", SLEEPS, fork="fork")
    assert (result.code, result.verdict()["culprits"]) == (4, [0])


MAPS = """
import mmap
from jaxrun.protocol.worker_messages import MpiImported
run()
path = {path!r}
with open(path, "wb") as file: file.write(bytes(4096))
file = open(path, "r+b")
mapped = mmap.mmap(file.fileno(), 4096)
{then}
os.kill(os.getpid(), 9)
"""
IMPORTS = """send(MpiImported(rank))
while '"type":"MpiImported"' not in open("run/events.jsonl").read():  # its agent has looked at its memory by then
    time.sleep(0.01)"""
WITHOUT_MPI4PY = "time.sleep(3)"


@pytest.mark.parametrize("then", [pytest.param(IMPORTS, id="mpi4py"), extended(WITHOUT_MPI4PY, id="another MPI")])
def test_what_a_rank_of_mpich_had_mapped_is_removed_once_it_is_killed(run_job, then):
    path = Path(f"/dev/shm/mpich_shm_{os.urandom(4).hex()}_0")
    try:
        result = run_job(MAPS.format(path=str(path), then=then))
        assert result.code == 137 and bool(result.events("MpiImported")) == (then == IMPORTS) and not path.exists()
    finally:
        path.unlink(missing_ok=True)


def test_what_mpich_has_left_is_removed_unless_a_process_may_need_it(tmp_path, monkeypatch):
    for name in ("_MEMORY", "_TOPOLOGIES"):
        monkeypatch.setattr(mpi_memory, name, str(tmp_path))
    monkeypatch.setattr(mpi_memory, "_MAPPED", re.compile(rb"\s(/\S+/mpich_shm_[0-9a-f]+_[0-9]+)$", re.MULTILINE))
    proxy = tmp_path / "hydra_pmi_proxy"
    proxy.symlink_to(shutil.which("sleep") or "")
    ages = {"mpich_shm_1_0": 100, "mpich_shm_2_0": 100, "mpich_shm_3_0": 0, "mpich_shm_of_another": 100}
    ages |= {"hydra_hwloc_xmlfile_aZ012_": 300, "hydra_hwloc_xmlfile_bZ012_": 100}
    for name, age in ages.items():
        (tmp_path / name).write_bytes(bytes(4096))
        os.utime(tmp_path / name, (0, time.time() - age))

    def left():
        return ages.keys() & set(os.listdir(tmp_path))

    kept = {"mpich_shm_1_0", "mpich_shm_3_0", "mpich_shm_of_another", "hydra_hwloc_xmlfile_bZ012_"}
    with subprocess.Popen([proxy, "600"]) as process:
        wait_until(lambda: mpi_memory._is_proxy(process.pid))
        monkeypatch.setattr(procfs, "started_at", lambda pid: time.time() - 200)
        with (tmp_path / "mpich_shm_1_0").open("r+b") as file, mmap.mmap(file.fileno(), 4096):
            mpi_memory.remove_abandoned()
            assert left() == kept
        process.kill()
    monkeypatch.setattr(mpi_memory, "_is_proxy", lambda pid: False)
    mpi_memory.remove_abandoned()
    assert left() == {"mpich_shm_3_0", "mpich_shm_of_another"}


def test_the_start_of_a_process_is_known_and_no_other_process_is_a_proxy():
    assert time.time() - 3600 * 24 * 7 < procfs.started_at(os.getpid()) < time.time()
    assert procfs.started_at(2**22) == math.inf and not mpi_memory._is_proxy(os.getpid())
