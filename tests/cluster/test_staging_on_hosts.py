"""--stage on three hosts, each with a disk of its own (/dev/shm): all get a copy, or the one that cannot is named."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_fixture import HOSTS, RUNS, Bed, Job, Result
from harness import extended, make_environment, write_fake_runtime
from launch_modes import BASIC, LAUNCHED, OPEN_MPI_5, PYTHON, SLURM, LaunchMode

DISK = "/dev/shm"
OWN = f"{DISK}/jaxrun-stage-{os.geteuid()}"
SHOWS = f"{RUNS}print('starts from', sys.prefix, os.uname().nodename, flush=True); done()"


@pytest.fixture(autouse=True)
def empty_disks(bed: Bed) -> Iterator[None]:
    yield
    for host in HOSTS:
        bed.inside(host, "rm", "-rf", OWN)


@contextmanager
def started(bed: Bed, mode: LaunchMode, directory: Path, *words: str, python: str = PYTHON) -> Iterator[Job]:
    """A job with all hosts, from an allocation that outlives the loss of one."""
    if reason := mode.engine.missing():
        pytest.skip(reason)
    words = ("--stage-dir", DISK, "--run-dir", str(directory / "run"), *words)
    command = [python if word == PYTHON else word for word in mode.command(HOSTS, *words)]
    if mode.engine is SLURM:
        command.insert(1, "--no-kill")
    env = write_fake_runtime(directory)
    with bed.typed(mode.host, *command, directory=directory, env=env) as job:
        yield job


def copies(bed: Bed, host: str) -> Sequence[str]:
    """What is below the directory of the copies on a host."""
    return bed.inside(host, "sh", "-c", f"ls -A {OWN} 2>/dev/null || true").split()


def copied_bytes(job: Job) -> dict[int, int]:
    """How many bytes have come to the hosts, by the first rank of each."""
    return {event["agent"]: event["nbytes"] for event in job.events("StagedCopied")}


@pytest.mark.extended
@pytest.mark.parametrize("mode", [BASIC[0], extended(BASIC[1])], ids=[str(mode) for mode in BASIC])
def test_a_full_disk_is_named_then_ranks_start_from_copies_which_the_next_job_finds(
    bed: Bed, tmp_path: Path, mode: LaunchMode
) -> None:
    python = make_environment(tmp_path / "env")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "large").write_bytes(os.urandom(2**21))

    def run(name: str) -> tuple[Result, Job]:
        (tmp_path / name).mkdir()
        words = ("--stage", "venv", "--stage", str(tmp_path / "src"), "by_hand.py", *[SHOWS] * 3)
        with started(bed, mode, tmp_path / name, *words, python=python) as job:
            result = job.result()
            job.gone()
        return result, job

    bed.inside("h2", "mkdir", "-m", "700", OWN)
    bed.inside("h2", "mount", "-t", "tmpfs", "-o", "size=1M,mode=700", "tmpfs", OWN)
    try:
        result, _ = run("full")
        assert result.code == 69, result
        named = f"h2 has no copy of what is staged: [Errno 28] No space left on device: '{OWN}/"
        assert named in result.err.replace("\n", " ")
        assert not any("draft" in name for host in HOSTS for name in copies(bed, host))
    finally:
        bed.inside("h2", "umount", OWN)

    result, job = run("again")
    names = copies(bed, "h1")
    assert len(names) == 2 and all(sorted(copies(bed, host)) == sorted(names) for host in HOSTS)
    shown = [job.log(rank).split() for rank in range(3)]
    assert result.code == 0 and [words[-1] for words in shown] == list(HOSTS), result
    assert {Path(words[2]).parts[:-2] for words in shown} == {Path(OWN).parts}
    assert copied_bytes(job)[1] > 2**21, result

    result, job = run("next")
    assert result.code == 0 and " once: " not in result.err, result
    assert set(copied_bytes(job).values()) == {0}


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
def test_a_host_that_is_cut_off_while_it_copies_is_named_and_the_next_launch_works(bed: Bed, tmp_path: Path) -> None:
    mode = LaunchMode(OPEN_MPI_5, LAUNCHED)
    (tmp_path / "src").mkdir()
    with open(tmp_path / "src" / "large", "wb") as file:
        file.truncate(2**30)
    words = ("--stage", str(tmp_path / "src"), "by_hand.py", *[f"{RUNS}done()"] * 3)
    (tmp_path / "cut").mkdir()
    (tmp_path / "again").mkdir()
    with started(bed, mode, tmp_path / "cut", *words) as job:
        job.wait_until(lambda: any("draft" in name for name in copies(bed, "h3")), "h3 copies")
        bed.run("cut", "h3")
        result = job.result()
        bed.run("mend", "h3")
        job.gone()
    assert result.code == 69 and "h3" in result.verdict()["headline"], result  # type: ignore[operator]
    assert not any("draft" in name for name in copies(bed, "h2"))
    with started(bed, mode, tmp_path / "again", *words) as job:
        result = job.result()
        job.gone()
    assert result.code == 0 and all(len(copies(bed, host)) == 1 for host in HOSTS), result


@pytest.mark.extended
@pytest.mark.usefixtures("mended")
def test_a_spare_host_gets_its_copy_when_it_takes_a_place(bed: Bed, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "some").write_text("text")
    code = f"{RUNS}print('copy', os.path.exists('{OWN}'), 'JAXRUN_STAGED' in os.environ, flush=True); "
    ends = "done() if os.environ['JAXRUN_ATTEMPT'] == '2' else time.sleep(1000)"
    words = ("--stage", str(tmp_path / "src"), "--max-restarts", "1", "--spares", "1", "by_hand.py", *[code + ends] * 2)
    with started(bed, LaunchMode(SLURM, LAUNCHED), tmp_path, *words) as job:
        job.wait_for_output("copy", 2)
        job.wait_for_event("SpareReported")
        assert copies(bed, "h3") == []
        bed.run("off", "h2")
        result = job.result()
    assert result.code == 0 and "h3 takes the place of h2" in result.err, result
    assert len(copies(bed, "h3")) == 1
    logs = [log.read_text() for log in sorted((job.run_dir / "attempt-2").glob("rank-*.out"))]
    assert logs == ["copy True True\n"] * 2
