"""A running job is asked from elsewhere, without disturbing it: `jaxrun stacks` and `jaxrun profile`."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from harness import MISBEHAVE, TIME_LIMIT, process_state, started, wait_until
from jax.profiler import ProfileData

from jaxrun.errors import UsageError
from jaxrun.job_client.running_job import find_running_job


def command(*words, status=0):
    """What `jaxrun WORDS` prints."""
    argv = [sys.executable, "-m", "jaxrun", *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == status, done
    return done.stdout + done.stderr


# ---- stacks


@pytest.fixture(scope="module")
def stuck(tmp_path_factory):
    """A job in which rank 1 hangs and the other waits for it, once they have compiled. Its stderr is in `screen`."""
    directory = tmp_path_factory.mktemp("stuck")
    with (directory / "screen").open("wb") as screen:
        with started(directory, "-n", "2", MISBEHAVE, "--rank", "1", "--hang", stderr=screen) as job:
            job.wait_for_output("ready", 2)
            job.wait_until(lambda: "2 groups" in command("stacks", job.run_dir), "ranks that are stuck")
            yield job
            assert job.process.poll() is None


@contextlib.contextmanager
def stopped(job, rank):
    """This rank is stopped by a signal meanwhile."""
    pid = next(event["pid"] for event in job.events("WorkerSpawned") if event["rank"] == rank)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: process_state(pid) == "T")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_the_ranks_are_shown_in_groups_and_nowhere_else(stuck):
    assert "2 ranks, 2 groups" in command("stacks", stuck.run_dir)
    assert "misbehave.py" in command("stacks", "--full", stuck.run_dir).partition("\n\n")[2]
    assert "groups" not in (stuck.run_dir.parent / "screen").read_text()


def test_a_stopped_rank_is_described_by_its_kernel_state(stuck):
    with stopped(stuck, 0):
        assert "no answer: stopped by a signal (SIGCONT resumes it)" in command("stacks", stuck.run_dir)


@pytest.mark.extended
def test_native_shows_c_frames(stuck):
    text = command("stacks", "--native", stuck.run_dir)
    assert "2 ranks, 2 groups" in text
    groups = dict(part.split(":\n", 1) for part in text.split("\n\n")[1:])
    assert groups.keys() == {"rank 0", "rank 1"}
    assert "in misbehave" in groups["rank 1"] and "nanosleep   libc" in groups["rank 1"]
    assert "in main" in groups["rank 0"] and "gloo::" in groups["rank 0"]
    assert "gloo::" not in command("stacks", "--full", stuck.run_dir)


@pytest.mark.extended
def test_native_of_a_stopped_rank_shows_its_python_frames(stuck):
    with stopped(stuck, 1):
        text = command("stacks", "--native", stuck.run_dir)
    assert "rank 1:\n  (a stopped process is seen without C frames)\n  File " in text


# ---- launchers that are not asked


def launched_by(run_dir, pid, host=None, **more):
    launcher = {"host": host or os.uname().nodename, "pid": pid, **more}
    (run_dir / "job.json").write_text(json.dumps({"job_id": "ab" * 16, "launcher": launcher}))
    (run_dir / "events.jsonl").touch()


def refusal(run_dir):
    with pytest.raises(UsageError) as caught:
        find_running_job(run_dir, "jaxrun stacks")
    return str(caught.value)


def test_a_job_that_is_over_or_has_no_launcher_here_is_not_asked(tmp_path):
    launched_by(tmp_path, os.getpid())
    assert f"the launcher of {tmp_path} is gone, and left no verdict" in refusal(tmp_path)
    launched_by(tmp_path, os.getpid(), "h9")
    assert re.search(rf"runs on h9, not on .*; type there: jaxrun stacks {tmp_path}", refusal(tmp_path))
    (tmp_path / "verdict.json").touch()
    assert refusal(tmp_path) == f"the job of {tmp_path} is over; how it went: jaxrun explain {tmp_path}"


def test_a_job_of_an_older_jaxrun_and_a_job_without_its_socket_are_distinguished_from_a_dead_job(tmp_path):
    with (tmp_path / "events.jsonl").open("ab"):
        launched_by(tmp_path, os.getpid())
        assert f"the job of {tmp_path} has no socket, so it cannot be asked: an older jaxrun" in refusal(tmp_path)
        path = f"/tmp/nowhere/{'ab' * 16}.sock"
        launched_by(tmp_path, os.getpid(), socket=path)
        assert f"cannot ask the job of {tmp_path}: {path}: No such file or directory" in refusal(tmp_path)
        launched_by(tmp_path, os.getpid(), socket="/run/docker.sock")  # which somebody may have written there
        assert "it is not the name of a job's socket" in refusal(tmp_path)


# ---- profiles

# Makes steps of two calls each until there is a file `stop`; while there is a file `own`, it takes its own profile.
PROFILED = """
import os
import tempfile
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("data",))


def spread(part):
    return jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), np.float32(part))


@jax.jit
def step(x):
    return x + x.mean()


@jax.jit
def measure(x, flags):
    return x.sum(), flags.max(axis=0)


rows, own, stop = spread(np.ones((2, 8))), False, False
print("ready", flush=True)
while not stop:
    time.sleep(0.005)
    flags = spread([[os.path.exists("own"), os.path.exists("stop")]])
    wanted, stop = np.asarray(measure(step(rows), flags)[1]) > 0  # the ranks agree on it
    if wanted != own:
        own = wanted
        jax.profiler.start_trace(tempfile.mkdtemp(dir=".")) if own else jax.profiler.stop_trace()
        print("own" if own else "no more", flush=True)
"""


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """What is said of profiles of such a job, one after another, and where they are."""
    directory = tmp_path_factory.mktemp("profiled")
    (directory / "profiled.py").write_text(PROFILED)
    made = SimpleNamespace(elsewhere=directory / "a b", run_dir=directory / "run")
    with started(directory, "-n", "2", "profiled.py") as job:
        job.wait_for_output("ready", 2)
        made.text = command("profile", "--steps", 3, job.run_dir)
        made.events = job.events("ProfileEnded")
        made.below_a_file_text = command("profile", "--output", f"{__file__}/x", job.run_dir, status=69)

        (directory / "own").touch()
        job.wait_for_output("own", 2)
        made.busy_text = command("profile", "--steps", 1, job.run_dir, status=69)
        (directory / "own").unlink()
        job.wait_for_output("no more", 2)

        argv = [
            sys.executable,
            "-m",
            "jaxrun",
            "profile",
            "--steps",
            "1000000",
            "--output",
            made.elsewhere,
            job.run_dir,
        ]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as asking:
            job.wait_until(lambda: asking.poll() is not None or list(made.elsewhere.glob(".rank-*")), "profile")
            (directory / "stop").touch()
            made.last_text = asking.communicate(timeout=TIME_LIMIT)[0]
        made.code = job.result().code
    return made


def calls(file):
    """How often each function was called in a profile."""
    events = (e for plane in ProfileData.from_file(str(file)).planes for line in plane.lines for e in line.events)
    return Counter(event.name for event in events if "ExecuteReplicated" in event.name or "PjitFunction" in event.name)


@pytest.mark.extended
@pytest.mark.jax_version
def test_all_ranks_write_the_profile_of_the_same_calls_into_one_session(profiles):
    assert "jaxrun: profiling 3 steps: calls #" in profiles.text and "of ranks 0-1 ..." in profiles.text
    directory = profiles.run_dir / "profile"
    assert f"to see them: xprof --logdir {directory}" in profiles.text
    assert [path.name for path in directory.iterdir()] == ["plugins"]
    session = min((directory / "plugins" / "profile").iterdir())  # the first
    files = sorted(session.iterdir())
    assert [file.name[:9] for file in files] == ["rank-0000", "rank-0001"]
    counted = [calls(file) for file in files]
    assert counted[0] == counted[1] and counted[0], counted
    assert len({event["last"] for event in profiles.events}) == 1 and len(profiles.events) == 2
    assert all(event["started_at"] < event["time"] for event in profiles.events)


@pytest.mark.extended
def test_a_directory_that_cannot_be_made_is_named_by_the_ranks(profiles):
    assert "NotADirectoryError" in profiles.below_a_file_text


@pytest.mark.extended
def test_jaxrun_takes_no_profile_while_the_program_takes_one(profiles):
    assert "no profile of all ranks: ranks 0-1: its program is taking a profile of its own" in profiles.busy_text


@pytest.mark.extended
def test_a_profile_in_another_directory_ends_with_the_program(profiles):
    text = profiles.last_text
    assert "profiling 1000000 steps" in text and "the program ended after call #" in text
    assert "2 profiles, " in text and f"xprof --logdir '{profiles.elsewhere}'" in text
    assert len(list(profiles.elsewhere.glob("plugins/profile/*/*.xplane.pb"))) == 2
    assert profiles.code == 0
