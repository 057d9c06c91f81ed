"""`jaxrun profile`: a JAX profile of the same calls on all ranks of a running job, with nothing in the program."""

import subprocess
import sys
from collections import Counter

import pytest
from harness import HERE, extended, started
from jax.profiler import ProfileData

PROGRAM = str(HERE / "profiled.py")


def profile(*arguments, status=0):
    command = [sys.executable, "-m", "jaxrun", "profile", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == status, done
    return done.stdout + done.stderr


@pytest.fixture(scope="module", params=["record", extended("strict")])
def running(tmp_path_factory, request):
    with started(tmp_path_factory.mktemp("profiled"), "-n", "2", "--lockstep", request.param, PROGRAM) as job:
        job.wait_for_output("ready", 2)
        yield job
        assert job.process.poll() is None


def calls(file):
    """How often each function was called in a profile."""
    events = (e for plane in ProfileData.from_file(str(file)).planes for line in plane.lines for e in line.events)
    return Counter(event.name for event in events if "ExecuteReplicated" in event.name or "PjitFunction" in event.name)


@pytest.mark.jax_version
def test_all_ranks_write_the_profile_of_the_same_calls_into_one_session(running):
    text = profile("--steps", 3, running.run_dir)
    assert "jaxrun: profiling 3 steps: calls #" in text and "of ranks 0-1 ..." in text
    assert f"to see them: xprof --logdir {running.run_dir}/profile" in text
    (session,) = (running.run_dir / "profile" / "plugins" / "profile").iterdir()
    files = sorted(session.iterdir())
    assert [file.name[:9] for file in files] == ["rank-0000", "rank-0001"]
    counted = [calls(file) for file in files]
    assert counted[0] == counted[1] and counted[0], counted
    profiled = [event for event in running.events() if event["event"] == "profiled"]
    assert len({event["last"] for event in profiled}) == 1 and len(profiled) == 2
    assert all(event["started"] < event["sent"] for event in profiled)
    assert sorted(path.name for path in (running.run_dir / "profile").iterdir()) == ["plugins"]


def test_another_directory_and_another_number_of_steps(running, tmp_path):
    assert "2 profiles, " in (text := profile("--steps", 1, "--output", tmp_path / "a b", running.run_dir))
    assert f"xprof --logdir '{tmp_path}/a b'" in text
    assert len(list((tmp_path / "a b").glob("plugins/profile/*/*.xplane.pb"))) == 2
    assert "is a file, not a directory" in profile("--output", PROGRAM, running.run_dir, status=2)


def test_a_directory_that_cannot_be_made_is_named_by_the_ranks(running):
    assert "NotADirectoryError" in profile("--output", f"{PROGRAM}/x", running.run_dir, status=69)


def test_a_program_that_takes_a_profile_of_its_own_is_left_to_it(running):
    own = running.run_dir.parent / "own"
    own.touch()
    running.wait_for_output("own", 2)
    text = profile("--steps", 1, running.run_dir, status=69)
    assert "no profile of all ranks: ranks 0-1: its program is taking a profile of its own" in text
    own.unlink()
    running.wait_for_output("no more", 2)
    assert "2 profiles" in profile("--steps", 1, running.run_dir)


def test_a_profile_ends_with_the_program(tmp_path):
    with started(tmp_path, "-n", "2", PROGRAM) as job:
        job.wait_for_output("ready", 2)
        command = [sys.executable, "-m", "jaxrun", "profile", "--steps", "1000000", str(job.run_dir)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
            while not list(job.run_dir.glob("profile/.rank-*")):
                assert asking.poll() is None
            (tmp_path / "stop").touch()
            text = asking.communicate(timeout=90)[0]
        assert "profiling 1000000 steps" in text
        assert "2 profiles" in text and "the program ended after call #" in text
        assert job.result().code == 0
        assert "is over" in profile(job.run_dir, status=2)
