"""What cannot be started on several hosts: a clear error in time, and nothing left on any host."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_fixture import Bed
from harness import Result
from launch_modes import MPICH, OPEN_MPI_5, PYTHON, Engine

import jaxrun

pytestmark = pytest.mark.extended

Typed = Callable[..., Result]
PROGRAM = "print('the program ran')\n"
MPIRUN = ("--backend", "mpirun", "--mpirun", OPEN_MPI_5.mpirun)
NEEDS_MPIRUN = pytest.mark.skipif(bool(OPEN_MPI_5.missing()), reason=OPEN_MPI_5.missing() or "-")
SALLOC = ("salloc", "-N2", "-n2", "--nodelist=h1,h2", "--quiet")
# An environment with this Python and its packages, where the host keeps what is its own: in /dev/shm.
ENVIRONMENT = "/dev/shm/env"
FAR_PYTHON = f"{ENVIRONMENT}/bin/python"
MAKE_ENVIRONMENT = f"""
rm -rf {ENVIRONMENT} && mkdir -p {ENVIRONMENT}/bin
cp {shlex.quote(sys.prefix)}/pyvenv.cfg {ENVIRONMENT} && ln -s {shlex.quote(sys.prefix)}/lib {ENVIRONMENT}/lib
ln -s {shlex.quote(str(Path(sys.executable).resolve()))} {FAR_PYTHON}
"""


@pytest.fixture
def typed(bed: Bed, tmp_path: Path) -> Typed:
    """Types a command on a host, and checks that it ends and leaves nothing on any."""

    def typed(host: str, *words: str) -> Result:
        (tmp_path / "program.py").write_text(PROGRAM)
        with bed.typed(host, *words, "program.py", directory=tmp_path) as job:
            result = job.result()
            job.gone()
        assert "Traceback" not in result.err, result
        return result

    return typed


def launcher(*options: str, python: str = PYTHON) -> tuple[str, ...]:
    return (python, "-m", "jaxrun", "--run-dir", "run", *options)


def refused(result: Result, code: int, *words: str) -> None:
    assert result.code == code, result
    for word in words:
        assert word in result.err, result
    assert "the program ran" not in result.out


@pytest.mark.parametrize("engine", [OPEN_MPI_5, MPICH], ids=["Open MPI 5", "MPICH"])
def test_an_unknown_host_is_named_with_the_error_of_ssh(typed: Typed, engine: Engine) -> None:
    if reason := engine.missing():
        pytest.skip(reason)
    result = typed("h1", *launcher("--backend", "mpirun", "--mpirun", engine.mpirun, "-H", "h1:1,nowhere:1"))
    refused(result, 69, engine.label, "nowhere")


@NEEDS_MPIRUN
@pytest.mark.usefixtures("mended")
def test_a_host_that_is_off_is_named(typed: Typed, bed: Bed) -> None:
    bed.run("off", "h3")
    refused(typed("h1", *launcher(*MPIRUN, "-H", "h1:1,h3:1")), 69, "Open MPI", "h3")


OTHER_JAXRUN = f"""
mkdir {ENVIRONMENT}/path && cp -r {Path(str(jaxrun.__file__)).parent} {ENVIRONMENT}/path/jaxrun
echo 'VERSION = "9.9"' >>{ENVIRONMENT}/path/jaxrun/protocol/names.py
"""


def instead(arguments: str, before: str = "") -> str:
    """Puts a script in the place of the host's Python, that runs it in another way."""
    script = f"#!/bin/sh\n{before}exec {shlex.quote(sys.executable)} {arguments}\n"
    return f"rm {FAR_PYTHON}; printf %s {shlex.quote(script)} >{FAR_PYTHON}; chmod +x {FAR_PYTHON}"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        pytest.param(
            "h1", launcher(*MPIRUN, "-H", "h1:1,h2:1", python=FAR_PYTHON), id="Open MPI 5", marks=NEEDS_MPIRUN
        ),
        pytest.param(
            "ctl", (*SALLOC, *launcher("--backend", "slurm", "--init-timeout", "5", python=FAR_PYTHON)), id="Slurm"
        ),
    ],
)
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (f"rm -rf {ENVIRONMENT}", [FAR_PYTHON]),
        (instead('-S "$@"'), ["No module named", "jaxrun"]),
        (instead('-S "$@"', "sleep 2\n"), ["No module named", "jaxrun"]),
        (
            OTHER_JAXRUN + instead('"$@"', f"PYTHONPATH={ENVIRONMENT}/path "),
            ["h2 has jaxrun 9.9", f"the launcher has jaxrun {jaxrun.__version__}"],
        ),
    ],
    ids=["no Python", "no jaxrun", "no jaxrun, and the other host has come", "another jaxrun"],
)
def test_a_host_with_another_installation_is_named_with_what_is_wrong(
    typed: Typed, bed: Bed, host: str, words: tuple[str, ...], changes: str, named: list[str]
) -> None:
    for one in ("ctl", "h1", "h2"):
        bed.inside(one, "sh", "-c", MAKE_ENVIRONMENT)
    bed.inside("h2", "sh", "-c", changes)
    refused(typed(host, *words), 69, "h2", *named)


@NEEDS_MPIRUN
def test_an_interface_that_others_cannot_reach_is_named_with_the_missing_ranks(typed: Typed) -> None:
    options = ("-H", "h1:1,h2:1,h3:1", "--interface", "127.0.0.1", "--init-timeout", "8")
    refused(typed("h1", *launcher(*MPIRUN, *options)), 69, "127.0.0.1", "h2", "h3")


def test_an_interactive_job_of_slurms_cannot_be_requeued(typed: Typed) -> None:
    words = ("salloc", "-Q", "-N2", *launcher("--backend", "slurm", "--requeue"))
    refused(typed("ctl", *words), 2, "interactive one; leave it out")


FORGOTTEN = "For one job of all, type: {} -n 2 jaxrun attach --no-run-dir program.py. "


@pytest.mark.parametrize(
    ("host", "words", "command"),
    [
        pytest.param(
            *("h1", (OPEN_MPI_5.mpirun, "--allow-run-as-root", "--host", "h1:1,h2:1", "-n", "2"), "mpirun"),
            id="Open MPI 5",
            marks=NEEDS_MPIRUN,
        ),
        pytest.param(
            *("h1", (MPICH.mpirun, "-hosts", "h1,h2", "-n", "2"), "mpirun"),
            id="MPICH",
            marks=pytest.mark.skipif(bool(MPICH.missing()), reason=MPICH.missing() or "-"),
        ),
        pytest.param("ctl", ("srun", "-N2", "-n2"), "srun", id="Slurm"),
    ],
)
def test_a_forgotten_attach_is_refused_with_the_line_to_type(
    typed: Typed, host: str, words: tuple[str, ...], command: str
) -> None:
    refused(typed(host, *words, PYTHON, "-m", "jaxrun", "--no-run-dir"), 2, FORGOTTEN.format(command))


def test_a_batch_script_that_was_submitted_inside_a_step_runs_its_job(typed: Typed, tmp_path: Path) -> None:
    lines = ("#!/bin/sh", f'{PYTHON} -m jaxrun --no-run-dir --platform cpu "$@"')
    (tmp_path / "job.sh").write_text("\n".join(lines))
    submits = 'test "$SLURM_PROCID" != 0 || sbatch --wait -n 2 -o out.txt job.sh "$@"'
    assert typed("ctl", "srun", "-n2", "-N1", "-O", "sh", "-c", submits, "sh").code == 0
    assert "the program ran" in (tmp_path / "out.txt").read_text()
