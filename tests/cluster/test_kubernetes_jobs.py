"""Jobs of --backend kubernetes: their manifests, carried out on the testbed's hosts by a stand-in for Kubernetes."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from cluster_fixture import RUNS, Bed
from harness import wait_until, write_fake_runtime
from kubelet import JobController, applied

HOSTS = ("-N", "3", "--processes-per-host", "1", "--init-timeout", "60")
ENDS = RUNS + "done()"
STOPS = """
import os, jaxrun_runtime as jr
first = not os.path.exists("saved")
if first:
    print("polls", flush=True)
while first and not jr.should_stop():
    jr.make_mesh  # until somebody drains a host
if first and jr.rank == 0:
    open("saved", "w").close()
print("ended", "first" if first else "again", flush=True)
"""


def written(directory: Path, *words: str, env: Mapping[str, str] | None = None) -> Path:
    """The manifest of `jaxrun --backend kubernetes WORDS`."""
    command = [sys.executable, "-m", "jaxrun", "--backend", "kubernetes", "--image", "none", "--manifest", "job.yaml"]
    subprocess.run([*command, *words], cwd=directory, check=True, stderr=subprocess.DEVNULL)
    return directory / "job.yaml"


def logs(job: JobController) -> str:
    return "\n".join(f"--- pod {pod.index}: {pod.process.returncode} {pod.message}\n{pod.log}" for pod in job.started)


@pytest.mark.extended
def test_pods_whose_names_resolve_late_are_one_job(bed: Bed, tmp_path: Path) -> None:
    env = write_fake_runtime(tmp_path)
    manifest = written(
        tmp_path,
        *HOSTS,
        "--env",
        "WORD=$(HOSTNAME)",
        "by_hand.py",
        *[RUNS + "print(os.environ['WORD'], flush=True); done()"] * 3,
    )
    with applied(bed, manifest, tmp_path, env) as job:
        threading.Thread(target=resolve_once_missed, args=(job,), daemon=True).start()
        assert job.run() == "Complete", logs(job)
    assert len(job.started) == 3 and {pod.message for pod in job.started} == {""}
    first, second, _ = job.started
    assert [line for line in first.log.splitlines() if "$(HOSTNAME)" in line] and "3 processes on 3 hosts" in first.log
    assert "does not resolve yet" in first.log and "host 1 of 3: rank 1 of 3 join the head at" in second.log


def test_a_failure_is_shown_on_every_pod_and_counted_and_a_refusal_ends_the_job_at_once(
    bed: Bed, tmp_path: Path
) -> None:
    env = write_fake_runtime(tmp_path)
    manifest = written(tmp_path, *HOSTS, "by_hand.py", ENDS, RUNS + "os._exit(7)", ENDS)
    with applied(bed, manifest, tmp_path, env) as job:
        job.resolve_names()
        assert job.run() == "Failed", logs(job)
    assert [pod.process.returncode for pod in job.started] == [7] * 3, logs(job)
    assert all(pod.message.startswith("rank 1 of 3 on h2 exited with status 7") for pod in job.started), logs(job)
    refused = tmp_path / "refused"
    refused.mkdir()
    manifest = written(refused, *HOSTS, "--max-restarts", "3", "none.py")
    with applied(bed, manifest, refused, env) as job:
        job.resolve_names()
        assert job.run() == "Failed", logs(job)
    assert len(job.started) == 3 and 2 in {pod.process.returncode for pod in job.started}, logs(job)


def resolve_once_missed(job: JobController) -> None:
    wait_until(lambda: job.started and "does not resolve yet" in job.started[0].log)
    job.resolve_names()


ONCE_AGAIN = RUNS + "print('attempt', os.environ['JAXRUN_ATTEMPT'], flush=True); "
ONCE_AGAIN += "os.environ['JAXRUN_ATTEMPT'] == '1' and time.sleep(1000); done()"


def take_away_once_all_run(job: JobController, index: int, take_away: Callable[[int], None]) -> None:
    wait_until(lambda: job.started and job.started[0].log.count("attempt 1") == 3)
    take_away(index)


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
@pytest.mark.parametrize("index", [1, 0])
@pytest.mark.parametrize("is_drained", [False, True], ids=["lost", "drained"])
def test_a_pod_that_is_replaced_keeps_its_place_and_the_others_stay(
    bed: Bed, tmp_path: Path, index: int, is_drained: bool
) -> None:
    manifest = written(tmp_path, *HOSTS, "--max-restarts", "2", "by_hand.py", *[ONCE_AGAIN] * 3)
    with applied(bed, manifest, tmp_path, write_fake_runtime(tmp_path)) as job:
        job.resolve_names()
        of_pod = (job, index, job.drain if is_drained else job.lose)
        threading.Thread(target=take_away_once_all_run, args=of_pod, daemon=True).start()

        def until_it_is_missed() -> None:  # a pod that is back at once is not worth a line
            if index != 0 and not is_drained:
                wait_until(lambda: "waiting for h2" in job.started[0].log)

        assert job.run(before_replacement=until_it_is_missed) == "Complete", logs(job)
    assert [pod.index for pod in job.started] == [0, 1, 2, index] and job.failed == 0, logs(job)
    said = job.started[-1 if index == 0 else 0].log
    assert said.count("] attempt 2") == 3, logs(job)
    if index == 0:  # the other pods have kept the job, and tell the head that takes the place of the lost one
        assert ("has left, as its pod was drained" if is_drained else "(h1) was lost in") in said, logs(job)
        assert "this job continues: h" in said and "the head is back" in job.started[1].log, logs(job)
    elif is_drained:
        assert "the pod of h2 goes away; the others stay" in said and job.started[1].process.returncode == 75, said
        assert "leaves the job, which continues without it" in job.started[1].log, logs(job)
    else:
        assert re.search(r"waiting for h2 \(rank 1\), (10|9) min \d+ s more \(--wait-hosts\)", said), said
        assert "h2 (rank 1) is back after" in said, said


def drain_once_all_poll(job: JobController) -> None:
    wait_until(lambda: job.started and job.started[0].log.count("polls") == 3)
    job.drain(1)


@pytest.mark.extended
def test_a_drained_pod_lets_the_program_save_and_all_pods_start_again_uncounted(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(STOPS)
    manifest = written(tmp_path, *HOSTS, "--platform", "cpu", "--env", "JAX_PLATFORMS=cpu", "stops.py")
    with applied(bed, manifest, tmp_path, {}) as job:
        job.resolve_names()
        threading.Thread(target=drain_once_all_poll, args=(job,), daemon=True).start()
        assert job.run() == "Complete", logs(job)
    assert [pod.process.returncode for pod in job.started] == [75] * 3 + [0] * 3 and job.failed == 0, logs(job)
    said = "".join(pod.log for pod in job.started)
    assert said.count("ended first") == said.count("ended again") == 3, said
