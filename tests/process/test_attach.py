"""Processes that somebody else starts on each host: `jaxrun attach` for each rank, or one command for all of a host.

One machine plays all hosts. Either way there is one job, one verdict, one exit code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import pytest
from harness import TIME_LIMIT, extended, read_events, wait_until, wait_until_gone, write_fake_runtime

from jaxrun.analysis.verdict.verdict import Verdict, to_json
from jaxrun.protocol.auth import job_fingerprint
from jaxrun.records.rundir.rundir import create

Commands = list[subprocess.Popen[str]]
TOKEN = {"JAXRUN_TOKEN": "5" * 64}
MUST_NOT_RUN = "raise SystemExit('this program must not run')\n"
SLEEPS = "run(); print('ready', flush=True); time.sleep(600)"  # a worker by hand


def start_command(words: Sequence[str], directory: Path, env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    """Start `jaxrun WORDS` in a session of its own, with a pipe for each of its streams."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrun", *words],
        cwd=directory,
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(processes: Sequence[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each command."""
    outputs = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    return [(process.returncode, *words) for process, words in zip(processes, outputs, strict=True)]


def end_commands(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kill what is left of them."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def head() -> Iterator[str]:
    """Where a head can listen: its port is bound here, so that nobody else gets it, as long as the test runs."""
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture
def attach(tmp_path: Path, head: str) -> Iterator[Callable[..., Commands]]:
    """attach(SIZE, WORDS…): starts as many processes; ends them at the end."""
    started: Commands = []

    def start(size: int, *words: str, env: dict[str, str] | None = None) -> Commands:
        for rank in range(size):
            place = ["attach", "--rank", str(rank), "--size", str(size), "--head", head, "--platform", "cpu"]
            started.append(start_command([*place, *words], tmp_path, env))
        return started

    yield start
    end_commands(started)


@pytest.fixture
def hosts(tmp_path: Path, head: str) -> Iterator[Callable[..., Commands]]:
    """hosts(WORDS of host 0, WORDS of host 1…): starts a command for each; ends them at the end."""
    started: Commands = []

    def start(*words: list[str], env: dict[str, str] | None = None) -> Commands:
        for host, own in enumerate(words):
            place = ["--hosts", "2", "--head", head, "--platform", "cpu"]
            rank = [] if "--host-rank" in own else ["--host-rank", str(host)]
            started.append(start_command([*place, *rank, *own], tmp_path, env))
        return started

    yield start
    end_commands(started)


def wait_for_run(tmp_path: Path, rank: int) -> str:
    """Wait until this rank has written something; returns the job's id."""
    pattern = f"jaxrun-runs/*/rank-{rank:04d}.out"
    wait_until(lambda: any(log.read_text() for log in tmp_path.glob(pattern)))
    text = next(tmp_path.glob("jaxrun-runs/*/job.json")).read_text()
    return str(json.loads(text)["job_id"])


# ---- jaxrun attach

TORCH = """
import os, socket, time
at = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
if os.environ["RANK"] == "0":
    print(socket.create_server(("", at[1])).accept()[0].makefile().read())
connection = None
while os.environ["RANK"] == "1" and not connection:
    try:
        connection = socket.create_connection(at)
        connection.sendall(" ".join(os.environ[name] for name in names).encode())
    except ConnectionRefusedError:
        time.sleep(0.02)
"""


def test_processes_that_somebody_started_are_one_job_and_torchruns_variables_lead_to_rank_0(attach, tmp_path) -> None:
    (tmp_path / "program.py").write_text(TORCH)
    ends = ended(attach(2, "--torch-env", "program.py"))
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert "attached to processes started by hand" in ends[0][2] and "done in" in ends[0][2]
    assert ends[0][1] == "[0] 1 2 1 2\n"
    assert ends[1][1:] == ("", "")
    assert not list(tmp_path.glob(".jaxrun-attach*"))


# ---- one command per host

RESTARTED = """
import os, signal, time
from pathlib import Path
import jaxrun_runtime as jr

attempt = os.environ["JAXRUN_ATTEMPT"]
print("attempt", attempt, flush=True)
Path(f"began-{attempt}-{jr.rank}").touch()
while len(list(Path().glob(f"began-{attempt}-*"))) < jr.size or attempt == "1" and jr.rank == 0:
    time.sleep(0.02)
if attempt == "1":
    os.kill(os.getpid(), signal.SIGKILL)
print("end", flush=True)
"""


@pytest.mark.extended
def test_the_processes_of_two_commands_are_one_job_that_is_started_again_by_the_same_agents(hosts, tmp_path) -> None:
    """They find each other by the file in the directory that they share."""
    (tmp_path / "program.py").write_text(RESTARTED)
    words = ["--nproc-per-node", "1", "--max-restarts", "1", "program.py"]
    first, second = ended(hosts(words, words))
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "2 processes (cpu) on 2 hosts, with a command on each" in first[2] and "done in" in first[2]
    assert "attempt 1 of 2 failed: rank 1 of 2 was killed by SIGKILL (9)" in first[2]
    assert second[1] == ""
    assert "host 1 of 2: rank 1 of 2 join the head" in second[2] and second[2].endswith("jaxrun: done\n")
    assert not list(tmp_path.glob(".jaxrun-attach*"))
    (run_dir,) = {path.resolve().parent for path in tmp_path.glob("jaxrun-runs/*/job.json")}
    for folder, attempt in (("", 1), ("attempt-2", 2)):
        for rank in range(2):
            log = (run_dir / folder / f"rank-{rank:04d}.out").read_text()
            assert f"attempt {attempt}\n" in log and ("end" in log) == (attempt == 2)
    agents = [(event["agent"], event["pid"]) for event in read_events(run_dir, "AgentReport")]
    assert len(agents) == 4 and len(set(agents)) == 2
    wait_until_gone(str(json.loads((run_dir / "job.json").read_text())["job_id"]))


@pytest.mark.extended
def test_the_first_failure_is_the_exit_code_on_every_host(hosts, tmp_path) -> None:
    """Beside that, a secret in the environment needs no shared directory; each host keeps the verdict."""
    words = ["-n", "2", "by_hand.py", SLEEPS, "run(); os._exit(7)"]
    logs = [tmp_path / "of-host-0", tmp_path / "of-host-1"]
    commands = [["--termination-log", str(log), *words] for log in logs]
    first, second = ended(hosts(*commands, env=TOKEN | write_fake_runtime(tmp_path)))
    assert all(log.read_text().startswith("rank 1 of 2 exited with status 7") for log in logs)
    assert (first[0], second[0]) == (7, 7), (first, second)
    assert "rank 1 of 2 exited with status 7" in first[2]
    assert "the job ended with exit 7; host 0 shows why" in second[2]


@pytest.mark.extended
def test_a_host_that_does_not_come_is_named_with_what_to_try(hosts, tmp_path) -> None:
    (tmp_path / "p.py").write_text(MUST_NOT_RUN)
    ((code, _, err),) = ended(hosts(["-n", "2", "--init-timeout", "1.5", "p.py"]))
    assert code == 69 and "missing: " in err and "--host-rank 1)" in err
    assert "is jaxrun started there, with the same --hosts, --head and JAXRUN_TOKEN" in err


@pytest.mark.extended
def test_a_host_that_finds_no_head_says_once_where_it_looked(hosts, tmp_path) -> None:
    (tmp_path / "p.py").write_text(MUST_NOT_RUN)
    log = tmp_path / "termination-log"
    words = ["--host-rank", "1", "--init-timeout", "0.5", "--termination-log", str(log), "-n", "4", "p.py"]
    ((code, _, err),) = ended(hosts(words))
    assert "host 0 has not left its address in" in log.read_text()
    assert code == 69 and err.count("found no head") == 1
    assert "ranks 2-3 on " in err and "host 0 has not left its address in" in err and "export JAXRUN_TOKEN" in err
    with_token = hosts(words, env=TOKEN)[1:]
    ((code, _, err),) = ended(with_token)
    assert code == 69 and "refuses connections" in err and "why stands" not in err


@pytest.mark.extended
def test_ctrl_c_on_another_host_ends_the_job_on_all(hosts, tmp_path) -> None:
    words = ["-n", "2", "--grace", "1", "by_hand.py", SLEEPS, SLEEPS]
    processes = hosts(words, words, env=TOKEN | write_fake_runtime(tmp_path))
    job_id = wait_for_run(tmp_path, 1)
    assert job_id != hashlib.sha256(f"jaxrun job {TOKEN['JAXRUN_TOKEN']}".encode()).hexdigest()[:32]
    processes[1].send_signal(signal.SIGINT)
    first, second = ended(processes)
    assert (first[0], second[0]) == (130, 130), f"{first[2]}\n{second[2]}"
    wait_until_gone(job_id)


@pytest.mark.extended
@pytest.mark.parametrize("victim", [0, extended(1)])
def test_a_command_that_is_killed_leaves_nothing_on_either_host(hosts, tmp_path, victim: int) -> None:
    words = ["-n", "4", "by_hand.py", *[SLEEPS] * 4]
    processes = hosts(words, words, env=TOKEN | write_fake_runtime(tmp_path))
    job_id = wait_for_run(tmp_path, 3)
    processes[victim].kill()
    ends = ended(processes)
    assert (ends[victim][0], ends[1 - victim][0]) == (-9, 69), ends
    expected = ("ranks 2-3 of 4", "the head at 127.0.0.1 was lost: its host is gone, or jaxrun there was killed")
    assert expected[1 - victim] in ends[1 - victim][2]
    wait_until_gone(job_id)


@pytest.mark.extended
def test_hosts_wait_for_the_name_of_host_0_to_resolve(tmp_path, head: str) -> None:
    names = tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n")
    (tmp_path / "run.sh").write_text(f'mount --bind {names} /etc/hosts && exec "$@"\n')
    wrap = ["unshare", *([] if os.getuid() == 0 else ["--map-root-user"]), "--mount", "sh", str(tmp_path / "run.sh")]
    if subprocess.run([*wrap, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no namespaces")
    where = ["--hosts", "2", "--head", f"pod-0.jobs:{head.partition(':')[2]}", "--platform", "cpu", "-n", "2"]
    env, hosts = {**os.environ, **TOKEN, **write_fake_runtime(tmp_path)}, []
    try:
        for host in (0, 1):
            words = [*where, "--host-rank", str(host), "by_hand.py", *["run(); done()"] * 2]
            command = [*wrap, sys.executable, "-m", "jaxrun", *words]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            hosts.append(subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, **pipes))
        said = next(line for line in hosts[0].stderr if "resolve" in line)
        assert "does not resolve yet (" in said and "this host listens, and all hosts look it up again" in said
        names.write_text("127.0.0.1 localhost pod-0.jobs\n")
        first, second = ended(hosts)
        assert (first[0], second[0]) == (0, 0), (first, second)
        assert "no address of" not in first[2] and second[2].endswith("jaxrun: done\n")
    finally:
        end_commands(hosts)


@pytest.mark.extended
def test_agents_that_jaxrun_did_not_start_cannot_be_replaced(hosts, tmp_path) -> None:
    words = ["-n", "2", "--max-restarts", "2", "by_hand.py", SLEEPS, "run(); os.kill(os.getppid(), 9); time.sleep(600)"]
    first, _ = ended(hosts(words, words, env=write_fake_runtime(tmp_path)))
    assert first[0] == 69 and "not restarted: agents are gone that jaxrun did not start." in first[2], first


GROWS = """
import time
import jaxrun_runtime as jr
print("attempt", jr.attempt().number, "of", jr.attempt().size, "ranks", flush=True)
while jr.attempt().number < 3 and not jr.should_stop():
    time.sleep(0.01)
"""


@pytest.mark.extended
def test_a_host_that_is_gone_is_done_without_until_its_command_is_typed_again(hosts, tmp_path) -> None:
    (tmp_path / "program.py").write_text(GROWS)
    words = ["-n", "2", "--min-hosts", "1", "--max-restarts", "1", "--grow", "0.5s", "program.py"]
    processes = hosts(words, words, env=TOKEN)
    wait_for_run(tmp_path, 1)
    processes[1].kill()
    log = "jaxrun-runs/*/attempt-2/rank-0000.out"
    wait_until(lambda: any("of 1 ranks" in path.read_text() for path in tmp_path.glob(log)))
    hosts(["--host-rank", "1", *words], env=TOKEN)  # the third of the commands
    (code, out, err), _, (code_again, _, err_again) = ended(processes)
    assert (code, code_again) == (0, 0), (err, err_again)
    assert sorted(line for line in out.splitlines() if "attempt 3" in line) == [
        f"[{r}] attempt 3 of 2 ranks" for r in (0, 1)
    ]
    assert "is left out: 1 rank on 1 host; the same command, typed there again, takes it back" in err
    assert "is back: asked rank 0 to stop" in err and "is taken back: 2 ranks on 2 hosts" in err
    verdict = json.loads(next(tmp_path.glob("jaxrun-runs/*/verdict.json")).read_text())
    assert [earlier["outcome"] for earlier in verdict["earlier"]] == ["lost", "grown"]


# ---- host 0 is lost, and its command is typed again (--wait-hosts)

# In its last attempt the program ends; before, it waits.
LASTS = "run(); print('attempt', os.environ['JAXRUN_ATTEMPT'], flush=True); "
LASTS += "os.environ['JAXRUN_ATTEMPT'] == '{}' or time.sleep(600); done()"


def wait_for_attempt(tmp_path: Path, number: int) -> None:
    """Wait until both ranks run in this attempt."""
    log = "rank-*.out" if number == 1 else f"attempt-{number}/rank-*.out"
    pattern, text = f"jaxrun-runs/[0-9]*/{log}", f"attempt {number}\n"
    wait_until(lambda: sum(text in path.read_text() for path in tmp_path.glob(pattern)) == 2, f"attempt {number}")


def test_the_command_of_host_0_that_is_typed_again_continues_the_job_and_its_count_of_restarts(hosts, tmp_path) -> None:
    words = ["-n", "2", "--max-restarts", "2", "--wait-hosts", "60", "by_hand.py", *[LASTS.format(3)] * 2]
    env = TOKEN | write_fake_runtime(tmp_path)
    processes = hosts(words, words, env=env)
    job_id = wait_for_run(tmp_path, 1)
    for attempt in (1, 2):
        wait_for_attempt(tmp_path, attempt)
        processes[-1 if attempt == 2 else 0].kill()
        hosts(["--host-rank", "0", *words], env=env)
    first, other, second, third = ended(processes)
    assert (first[0], second[0], third[0], other[0]) == (-9, -9, 0, 0), (other, third)
    assert "attempt 2 begins" in second[2] and "attempt 3 begins" in third[2] and "2 restarts" in third[2], third
    assert other[2].count("the head at 127.0.0.1 was lost; rank 1 here ended") == 2, other
    assert other[2].count("the head is back") == 2
    (run_dir,) = tmp_path.glob("jaxrun-runs/[0-9]*")
    assert json.loads((run_dir / "job.json").read_text())["job_id"] == job_id
    verdict = json.loads((run_dir / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["attempt"]) == ("ok", 3)
    assert [(one["outcome"], one["attempt"]) for one in verdict["earlier"]] == [("lost", 1), ("lost", 2)]
    explained = subprocess.run(
        [sys.executable, "-m", "jaxrun", "explain", str(run_dir)], capture_output=True, text=True, check=True
    )
    assert "attempt 2" in explained.stdout, explained.stdout
    wait_until_gone(job_id)


def test_with_all_restarts_used_up_the_new_head_ends_the_job_on_all_hosts(hosts, tmp_path) -> None:
    words = ["-n", "2", "--max-restarts", "1", "--wait-hosts", "60", "by_hand.py", *[LASTS.format(9)] * 2]
    env = TOKEN | write_fake_runtime(tmp_path)
    processes = hosts(words, words, env=env)
    for attempt in (1, 2):
        wait_for_attempt(tmp_path, attempt)
        processes[-1 if attempt == 2 else 0].kill()
        hosts(["--host-rank", "0", *words], env=env)
    _, other, _, third = ended(processes)
    why = "host 0 (" + os.uname().nodename + ") was lost in attempt 2, and the head of the job with it"
    assert third[0] == other[0] == 69 and f"{why}; the one restart is used up" in third[2], (other, third)


def test_new_pods_continue_the_job_in_the_run_directory_that_outlives_them_until_it_has_ended_well(
    hosts, tmp_path
) -> None:
    words = ["-n", "2", "--run-dir", "jaxrun-runs/1", "by_hand.py", *[LASTS.format(2)] * 2]
    env = TOKEN | write_fake_runtime(tmp_path) | {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JAXRUN_TERMINATION_LOG": "t"}
    pods = hosts(words, words, env=env)
    wait_for_attempt(tmp_path, 1)
    for pod in pods:
        pod.kill()
    hosts(words, words, env=env)
    first, *_ = ended(pods)[2:]
    assert first[0] == 0 and "continues with attempt 2: its launcher was killed" in first[2], first
    verdict = json.loads((tmp_path / "jaxrun-runs/1/verdict.json").read_text())
    assert (verdict["outcome"], verdict["attempt"]) == ("ok", 2)
    hosts(words, env=env)
    assert ended(pods[4:])[0][0] == 2


def test_a_new_pod_that_waits_for_the_run_directory_of_a_job_that_ends_well_leaves_it_as_it_is(hosts, tmp_path) -> None:
    run_dir = tmp_path / "run"
    earlier = create(run_dir, base=tmp_path, name="train", now=datetime.now())
    earlier.claim()
    requeue_id = f"token {job_fingerprint(TOKEN['JAXRUN_TOKEN'])}"
    earlier.write_text("job.json", json.dumps({"requeue_id": requeue_id}))
    env = TOKEN | write_fake_runtime(tmp_path) | {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JAXRUN_TERMINATION_LOG": "t"}
    (pod,) = hosts(
        ["-n", "2", "--init-timeout", "20", "--run-dir", str(run_dir), "by_hand.py", SLEEPS, SLEEPS], env=env
    )
    assert pod.stderr is not None
    next(line for line in pod.stderr if "waiting until it has ended" in line)
    verdict = to_json(Verdict("ok", 0, {}, headline="", startup=0.0, run=0.0))
    earlier.write_text("verdict.json", verdict)
    earlier.close()
    ((code, _, err),) = ended([pod])
    assert code == 2 and "has ended well meanwhile" in err, err
    assert (run_dir / "verdict.json").read_text() == verdict


@pytest.mark.parametrize("ends_by", ["signal", extended("time")])
def test_an_agent_without_a_head_ends_at_a_signal_or_when_the_time_is_over(hosts, tmp_path, ends_by: str) -> None:
    limit = "60" if ends_by == "signal" else "1"
    words = ["-n", "2", "--max-restarts", "2", "--wait-hosts", limit, "by_hand.py", *[LASTS.format(9)] * 2]
    processes = hosts(words, words, env=TOKEN | write_fake_runtime(tmp_path))
    job_id = wait_for_run(tmp_path, 1)
    processes[0].kill()
    assert processes[1].stderr is not None
    said = next(line for line in processes[1].stderr if "Looking for the head again" in line)
    assert "rank 1 here ended" in said
    if ends_by == "signal":
        processes[1].send_signal(signal.SIGTERM)
    err = processes[1].stderr.read()  # first, as `ended` would not see what was read together with that line
    code = ended(processes)[1][0]
    assert code == (143 if ends_by == "signal" else 69), err
    assert ends_by == "signal" or ("rank 1 on" in err and "found no head of the job within 1 s" in err), err
    wait_until_gone(job_id)


def test_a_pod_that_was_told_to_end_does_not_look_for_a_head_that_is_lost(hosts, tmp_path) -> None:
    words = ["-n", "2", "--max-restarts", "2", "--wait-hosts", "60", "by_hand.py", *[LASTS.format(9)] * 2]
    processes = hosts(words, words, env=TOKEN | write_fake_runtime(tmp_path))
    job_id = wait_for_run(tmp_path, 1)
    processes[0].send_signal(signal.SIGSTOP)  # so that the other one learns of no decision
    processes[1].send_signal(signal.SIGTERM)
    processes[0].kill()
    code, _, err = ended(processes)[1]
    assert code == 143 and "Looking for the head" not in err, err
    wait_until_gone(job_id)


def test_before_the_job_begins_ctrl_c_at_host_0_ends_it_and_the_host_that_has_come(hosts, tmp_path) -> None:
    words = ["-n", "3", "--hosts", "3", "--max-restarts", "2", "--wait-hosts", "60", "by_hand.py", *[SLEEPS] * 3]
    processes = hosts(words, words, env=TOKEN | write_fake_runtime(tmp_path))
    wait_until(lambda: _has_found_head(processes[1].pid), "an agent that is there")
    processes[0].send_signal(signal.SIGINT)
    first, second = ended(processes)
    assert (first[0], second[0]) == (130, 130), (first, second)
    assert not list(tmp_path.glob("jaxrun-runs/*")), "no run directory was made"


def _has_found_head(pid: int) -> bool:
    """Whether the agent in this process has found its head, which knows it by then: only now it catches SIGUSR1."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (signal.SIGUSR1 - 1) & 1)
