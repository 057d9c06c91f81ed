"""Impossible requests to several hosts: a clear error in time, and nothing left on any host."""

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
            result = job.result(timeout=40)
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


def test_without_an_mpirun_it_says_what_to_install(typed: Typed) -> None:
    result = typed("h1", "env", "PATH=/nonexistent", *launcher("--backend", "mpirun", "-H", "h1:1"))
    refused(result, 69, "mpirun", "PATH", "install")


def test_outside_of_an_allocation_it_says_how_to_get_one(typed: Typed) -> None:
    refused(typed("ctl", *launcher("--backend", "slurm", "-n", "2")), 2, "allocation", "salloc", "--submit", "--sbatch")


@NEEDS_MPIRUN
def test_more_processes_than_slots_are_refused(typed: Typed) -> None:
    refused(typed("h1", *launcher(*MPIRUN, "-H", "h1:1,h2:2", "-n", "4")), 2, "-n 4", "room for 3")


def test_more_processes_than_the_allocation_has_cpus_are_refused(typed: Typed) -> None:
    refused(typed("ctl", *SALLOC, *launcher("--backend", "slurm", "-n", "9")), 2, "9 processes")


@NEEDS_MPIRUN
def test_a_line_of_the_hostfile_that_cannot_be_read_is_shown(typed: Typed, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two hosts\nh1 slots=1\nh2 slots=many\n")
    refused(typed("h1", *launcher(*MPIRUN, "--hostfile", "hosts")), 2, "hosts:3", "slots=many")


FROM_H1 = [
    pytest.param("h1", launcher(*MPIRUN, "-H", "h1:1,h2:1", python=FAR_PYTHON), id="Open MPI 5", marks=NEEDS_MPIRUN),
    pytest.param(
        "ctl", (*SALLOC, *launcher("--backend", "slurm", "--init-timeout", "5", python=FAR_PYTHON)), id="Slurm"
    ),
]


@pytest.mark.parametrize(("host", "words"), FROM_H1)
def test_a_host_without_that_python_is_named_with_the_path(
    typed: Typed, bed: Bed, host: str, words: tuple[str, ...]
) -> None:
    prepare(bed, h2=f"rm -rf {ENVIRONMENT}")
    refused(typed(host, *words), 69, FAR_PYTHON, "h2")


@pytest.mark.parametrize(("host", "words"), FROM_H1)
def test_a_host_without_jaxrun_is_named(typed: Typed, bed: Bed, host: str, words: tuple[str, ...]) -> None:
    prepare(bed, h2=instead('-S "$@"'))
    refused(typed(host, *words), 69, "No module named", "jaxrun", "h2")


@pytest.mark.parametrize(("host", "words"), FROM_H1)
def test_a_host_with_another_jaxrun_is_named_with_both_versions(
    typed: Typed, bed: Bed, host: str, words: tuple[str, ...]
) -> None:
    package = Path(str(jaxrun.__file__)).parent
    other = f"cp -r {package} {ENVIRONMENT}/other && echo '__version__ = \"9.9\"' >>{ENVIRONMENT}/other/__init__.py"
    path = f"mkdir {ENVIRONMENT}/path && mv {ENVIRONMENT}/other {ENVIRONMENT}/path/jaxrun"
    script = instead('"$@"', f"PYTHONPATH={ENVIRONMENT}/path ")
    prepare(bed, h2=f"{other}; {path}; {script}")
    refused(typed(host, *words), 69, "h2 has jaxrun 9.9", f"the launcher is jaxrun {jaxrun.__version__}")


def prepare(bed: Bed, *, h2: str) -> None:
    """Make the environment on all hosts, and then do this on h2."""
    for host in ("ctl", "h1", "h2"):
        bed.inside(host, "sh", "-c", MAKE_ENVIRONMENT)
    bed.inside("h2", "sh", "-c", h2)


def instead(arguments: str, before: str = "") -> str:
    """Puts a script in the place of the host's Python, that runs it in another way."""
    script = f"#!/bin/sh\n{before}exec {shlex.quote(sys.executable)} {arguments}\n"
    return f"rm {FAR_PYTHON}; printf %s {shlex.quote(script)} >{FAR_PYTHON}; chmod +x {FAR_PYTHON}"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        pytest.param("h1", launcher(*MPIRUN, "-H", "h1:1,h2:1"), id="Open MPI 5", marks=NEEDS_MPIRUN),
        pytest.param("ctl", (*SALLOC, *launcher("--backend", "slurm")), id="Slurm"),
    ],
)
def test_a_run_directory_that_others_do_not_see_has_all_logs_nevertheless(
    bed: Bed, tmp_path: Path, host: str, words: tuple[str, ...]
) -> None:
    program = tmp_path / "talks.py"
    program.write_text("import jax\nprint(f'{jax.process_index()} ' * 100_000, 'end')\n")
    run_dir = f"/dev/shm/run-{tmp_path.name}"
    process = bed.start("exec", host, "--", *words, "--run-dir", run_dir, "--only-rank", "0", str(program))
    out, err = process.communicate(timeout=40)
    assert process.returncode == 0, out + err
    assert "cannot write to the run directory" in err and "h2" in err and "their logs come by network" in err
    for rank in range(2):
        log = bed.inside(host, "cat", f"{run_dir}/rank-{rank:04d}.out")
        assert log == f"{rank} " * 100_000 + " end\n"


@pytest.mark.parametrize(
    ("host", "words"),
    [
        pytest.param("h1", launcher(*MPIRUN, "-H", "h1:1,h2:1"), id="Open MPI 5", marks=NEEDS_MPIRUN),
        pytest.param("ctl", (*SALLOC, *launcher("--backend", "slurm")), id="Slurm"),
        pytest.param("ctl", ("srun", "-N2", "-n2", "--nodelist=h1,h2", PYTHON, "-m", "jaxrun", "attach"), id="srun"),
    ],
)
def test_a_shared_compilation_is_refused_where_the_hosts_have_gpus(
    typed: Typed, tmp_path: Path, host: str, words: tuple[str, ...]
) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-11111111-0000-0000-0000-000000000000)'\n")
    smi.chmod(0o755)
    gpus = ("sh", "-c", 'PATH=$1:$PATH; shift; JAX_PLATFORMS=cuda exec "$@"', "sh", str(tmp_path))
    result = typed(host, *gpus, *words, "--compile", "once", "--max-restarts", "2")
    refused(result, 2, "jaxrun: --compile once is for cpu: sharing was not tried on cuda; leave it out\n")


@pytest.mark.parametrize(
    ("before", "after", "code", "words"),
    [
        ((), (), 2, ("mpirun", "srun", "--rank")),
        (("srun", "-N2", "-n2"), ("--rank", "0", "--size", "4"), 2, ("--size 4", "2")),
        ((), ("--rank", "0", "--size", "2"), 2, ("--head host:port",)),
        ((), ("--check", "h1:9"), 69, ("no head can be reached", "10.77.0.254")),
    ],
    ids=["outside of everything", "contradicted", "by hand without a head", "nobody there"],
)
def test_attach_says_what_it_lacks(
    typed: Typed, before: tuple[str, ...], after: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    result = typed("ctl", *before, PYTHON, "-m", "jaxrun", "attach", "--run-dir", "run", *after)
    refused(result, code, *(word for word in words if not word.startswith("10.77")))


def test_a_refusal_of_sbatch_is_shown_in_its_words(typed: Typed) -> None:
    words = launcher("--backend", "slurm", "-N", "2", "-n", "2", "--submit", "--partition", "nope")
    refused(typed("ctl", *words), 69, "invalid partition specified: nope")


@NEEDS_MPIRUN
def test_an_interface_that_is_not_there_is_refused_with_those_that_are(typed: Typed) -> None:
    result = typed("h1", *launcher(*MPIRUN, "-H", "h1:1,h2:1", "--interface", "ib7"))
    refused(result, 2, "--interface ib7", "eth0 10.77.0.1")


@NEEDS_MPIRUN
def test_an_interface_that_others_cannot_reach_is_named_with_the_missing_ranks(typed: Typed) -> None:
    options = ("-H", "h1:1,h2:1,h3:1", "--interface", "127.0.0.1", "--init-timeout", "5")
    refused(typed("h1", *launcher(*MPIRUN, *options)), 69, "127.0.0.1", "h2", "h3")
