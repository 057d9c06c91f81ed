"""--keep-survivors in pods: the Job is complete although a pod was lost, or all pods start again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_fixture import RUNS, Bed
from harness import wait_until, write_fake_runtime
from kubelet import JobController, Pod, applied
from test_kubernetes_jobs import HOSTS, STOPS, logs, written
from test_survivors_on_hosts import RETURNS, SUM

pytestmark = [pytest.mark.extended, pytest.mark.usefixtures("mended")]

LATE = 73
# Rank 2 is killed at step 20 if the program has an argument. Steps until one of the ranks sees a file "go".
UNTIL_GO = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

steps, goes = 0, False
while not goes:
    if jax.process_index() == 2 and steps == 20 and sys.argv[1:]:
        os.kill(os.getpid(), 9)
    try:
        with live_devices(jax.devices()) as devices:
            split = NamedSharding(Mesh(np.array(devices), "x"), P("x"))
            own = np.full(1, 100 if os.path.exists("go") else 1, np.float32)
            total = float(jax.jit(jnp.sum)(jax.make_array_from_callback((len(devices),), split, lambda at: own)))
    except Exception as error:
        print("lost", type(error).__name__, flush=True)
        continue
    steps, goes = steps + 1, total >= 100
    if steps == 20:
        print("ready", flush=True)
    time.sleep(0.01)
print("went on with", len(devices), flush=True)
"""
# Steps until there have been 30 with a rank that is back.
UNTIL_WHOLE = """
import time
import jax, jax.numpy as jnp, numpy as np
import jaxrun_runtime as jr
from jax.experimental.multihost_utils import live_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

steps = again = 0
while again < 30:
"""
UNTIL_WHOLE += (
    SUM
    + """\
    steps, again = steps + 1, again + (len(devices) == 3 and devices[0].process_index != 0)
    if steps == 20:
        print("ready", flush=True)
    time.sleep(0.01)
print("whole again, attempt", jr.attempt().number, flush=True)
"""
)
ON_SIGTERM = """
import signal
signal.signal(signal.SIGTERM, lambda *_: (print("has saved", flush=True), os._exit(3)))
"""
ON_CPU = (*HOSTS, "--platform", "cpu", "--env", "JAX_PLATFORMS=cpu", "--keep-survivors")
BY_HAND = (*HOSTS, "--keep-survivors")
WAITS = RUNS + "print('ready', flush=True); any(iter(lambda: time.sleep(0.01) or os.path.exists('go'), True)); "
TWICE = RUNS + "print('attempt', os.environ['JAXRUN_ATTEMPT'], flush=True); "
TWICE += "os.environ['JAXRUN_ATTEMPT'] == '1' and (print('ready', flush=True), time.sleep(1000)); done()"


def in_background(steps: Callable[[], object]) -> None:
    threading.Thread(target=steps, daemon=True).start()


def wait_until_ready(job: JobController) -> None:
    wait_until(lambda: job.started and job.started[0].log.count("] ready") == 3, "three ranks that are ready")


def successors(job: JobController, index: int) -> list[Pod]:
    """The pods that have come in the place of the first one with this index."""
    return [pod for pod in job.started[3:] if pod.index == index]


def is_told_of_the_loss(pod: Pod) -> bool:
    return pod.exit_code == LATE and "goes on without" in pod.message


def take_away(job: JobController, take: Callable[[int], None], directory: Path, *, refused: int = 1) -> None:
    """Take pod 1 away once all run, and let the program end once so many pods in its place were refused.

    A pod may come before the loss is known, and is told that its rank runs on another host: it is not counted.
    """
    wait_until_ready(job)
    take(1)
    wait_until(lambda: sum(map(is_told_of_the_loss, successors(job, 1))) >= refused, "pods told that the job goes on")
    (directory / "go").touch()


def test_a_rank_that_dies_in_its_pod_is_survived(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(UNTIL_GO)
    with applied(bed, written(tmp_path, *ON_CPU, "steps.py", "dies"), tmp_path, {}) as job:
        job.resolve_names()

        def go() -> None:
            wait_until(lambda: job.started and job.started[0].log.count("lost ProcessFailureError") == 2)
            (tmp_path / "go").touch()

        in_background(go)
        assert job.run() == "Complete", logs(job)
    assert len(job.started) == 3 and job.failed == 0, logs(job)
    said = job.started[0].log
    assert "rank 2 of 3 on h3 was killed by SIGKILL (9)" in said and said.count("went on with 2") == 2, said


def test_a_rank_that_dies_in_its_pod_comes_back_there_alone(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "returns.py").write_text(RETURNS)
    with applied(bed, written(tmp_path, *ON_CPU, "--max-restarts", "2", "returns.py"), tmp_path, {}) as job:
        job.resolve_names()
        assert job.run() == "Complete", logs(job)
    assert [pod.exit_code for pod in job.started] == [0] * 3 and job.failed == 0, logs(job)
    said = job.started[0].log
    assert "rank 2 (h3) is back" in said and said.count("whole again") == 3 and "attempt 1" not in said, said


@pytest.mark.parametrize("is_killed", [False, True], ids=["lost", "killed"])
def test_the_others_go_on_without_a_lost_pod_and_the_pods_in_its_place_do_not_count(
    bed: Bed, tmp_path: Path, is_killed: bool
) -> None:
    (tmp_path / "steps.py").write_text(UNTIL_GO)
    with applied(bed, written(tmp_path, *ON_CPU, "steps.py"), tmp_path, {}) as job:
        job.resolve_names()
        take = job.kill if is_killed else job.lose
        in_background(lambda: take_away(job, take, tmp_path, refused=2))  # too many if each of them counted
        assert job.run() == "Complete", logs(job)
    first, lost, other, *later = job.started
    assert (first.exit_code, lost.exit_code, other.exit_code, job.failed) == (0, 137, 0, 1), logs(job)
    assert "rank 1 of 3 on h2 was lost" in first.log and "ranks 0, 2 go on (--keep-survivors)" in first.log, first.log
    assert first.log.count("went on with 2") == 2, first.log
    told = [pod.message for pod in later if is_told_of_the_loss(pod)]  # not one that comes as the program ends
    assert {pod.index for pod in later} == {1} and "this job goes on without its rank 1" in told[-1], logs(job)


def test_a_program_that_fails_after_the_loss_of_a_pod_is_not_started_again(bed: Bed, tmp_path: Path) -> None:
    manifest = written(tmp_path, *BY_HAND, "by_hand.py", *[WAITS + "os._exit(7)"] * 3)
    with applied(bed, manifest, tmp_path, write_fake_runtime(tmp_path)) as job:
        job.resolve_names()
        in_background(lambda: take_away(job, job.lose, tmp_path))
        assert job.run() == "Failed", logs(job)
    # This program has not called live_devices since the loss, which therefore counts as the cause of the failure.
    assert [pod.exit_code for pod in job.started[:3]] == [69, 137, 69] and job.failed == 3, logs(job)
    assert job.started[0].log.count("] ready") == 3 and "] ready" not in "".join(pod.log for pod in job.started[3:])


def test_without_pod_0_no_other_goes_on(bed: Bed, tmp_path: Path) -> None:
    manifest = written(tmp_path, *BY_HAND, "by_hand.py", *[WAITS + "done()"] * 3)
    with applied(bed, manifest, tmp_path, write_fake_runtime(tmp_path)) as job:
        job.resolve_names()
        in_background(lambda: (wait_until_ready(job), job.lose(0)))
        assert job.run() == "Failed", logs(job)
    assert [pod.exit_code for pod in job.started[:3]] == [137, 69, 69] and job.failed == 3, logs(job)
    assert "the head at 10.77.0.1 was lost" in job.started[1].message, logs(job)


@pytest.mark.parametrize("how", ["killed", "lost", "drained"])
def test_with_restarts_the_pod_in_the_place_of_a_lost_one_is_taken_in_while_the_others_go_on(
    bed: Bed, tmp_path: Path, how: str
) -> None:
    (tmp_path / "taken_in.py").write_text(UNTIL_WHOLE)
    with applied(bed, written(tmp_path, *ON_CPU, "--max-restarts", "2", "taken_in.py"), tmp_path, {}) as job:
        job.resolve_names()
        take = {"killed": job.kill, "lost": job.lose, "drained": job.drain}[how]
        in_background(lambda: (wait_until_ready(job), take(1)))
        assert job.run() == "Complete", logs(job)
    assert [pod.index for pod in job.started] == [0, 1, 2, 1] and job.failed == (how == "killed"), logs(job)
    assert [pod.exit_code for pod in job.started] == [0, 75 if how == "drained" else 137, 0, 0], logs(job)
    said = job.started[0].log
    assert said.count("whole again, attempt 1") == 3 and "rank 1 (h2) is back" in said, said
    counted = "" if how == "drained" else " (1 of 2)"  # a pod that goes away does not count as a failure
    assert f"and it is started again{counted} once its host is back, or another in its place" in said, said
    if how == "drained":
        assert "the pod of h2 goes away; ranks 0, 2 go on (--keep-survivors)" in said, said
        assert "rank 1 of 3 on h2 was lost: its pod went away" in said, said
        assert "leaves the job, which continues without it" in job.started[1].log, logs(job)


def test_a_drained_pod_that_listens_to_sigterm_ends_by_itself_and_the_others_go_on(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(ON_SIGTERM + UNTIL_GO)
    with applied(bed, written(tmp_path, *ON_CPU, "steps.py"), tmp_path, {}) as job:
        job.resolve_names()
        in_background(lambda: take_away(job, job.drain, tmp_path))
        assert job.run() == "Complete", logs(job)
    assert [pod.exit_code for pod in job.started[:3]] == [0, 75, 0] and job.failed == 0, logs(job)
    said = job.started[0].log
    assert "asked rank 1 to end (SIGTERM)" in said and "has saved" in said and said.count("went on with 2") == 2, said
    assert "rank 1 of 3 on h2 exited with status 3" in said, said


def test_with_restarts_all_begin_anew_once_another_pod_is_in_the_place_of_pod_0(bed: Bed, tmp_path: Path) -> None:
    manifest = written(tmp_path, *BY_HAND, "--max-restarts", "2", "by_hand.py", *[TWICE] * 3)
    with applied(bed, manifest, tmp_path, write_fake_runtime(tmp_path)) as job:
        job.resolve_names()
        in_background(lambda: (wait_until_ready(job), job.kill(0)))
        assert job.run() == "Complete", logs(job)
    assert [pod.index for pod in job.started] == [0, 1, 2, 0] and job.failed == 1, logs(job)
    said = job.started[-1].log
    assert said.count("] attempt 2") == 3, logs(job)
    assert "this job continues: h" in said and "the head is back" in job.started[1].log, logs(job)


def test_all_pods_begin_anew_after_a_drain_of_pod_0_even_the_one_that_was_lost_before(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    with applied(bed, written(tmp_path, *ON_CPU, "stops.py"), tmp_path, {}) as job:
        job.resolve_names()

        def drain() -> None:
            wait_until(lambda: job.started and job.started[0].log.count("polls") == 3, "three ranks that poll")
            job.kill(1)
            wait_until(lambda: any(map(is_told_of_the_loss, successors(job, 1))), "a pod told that the job goes on")
            job.drain(0)

        in_background(drain)
        assert job.run() == "Complete", logs(job)
    assert [pod.exit_code for pod in job.started[:3]] == [75, 137, 75] and job.failed == 1, logs(job)
    assert successors(job, 0)[0].log.count("ended again") == 3, logs(job)
