"""scripts/ and docker/: what they print and refuse, and that the files of docker/ agree with the checkout.

That the images build and run, tests/cluster/test_containers.py tries.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
from harness import TIME_LIMIT, extended
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]


def scripts(folder: str, *names: str) -> list[ModuleType]:
    """Files of scripts/FOLDER as modules; they import each other by name."""
    sys.path.insert(0, str(ROOT / "scripts" / folder))
    try:
        return [import_module(name) for name in names]
    finally:
        del sys.path[0]


against, lockstep, imports, startup = scripts("bench.d", "_against", "lockstep", "_imports", "startup")
remote, requirements, state = scripts("testbed.d", "remote", "requirements", "state")


# ---- scripts/matrix: from reports of the tests to the table of what was tried with which engine

REPORT = """\
<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="7">
<testcase classname="t" name="d"><properties>
  <property name="matrix" value="Slurm 22.05.8 | launched | Ctrl-C"/>
  <property name="order" value="test_x.py:0007"/></properties><skipped message="none"/></testcase>
<testcase classname="t" name="e"><properties>
  <property name="matrix" value="Slurm 22.05.8 | attached | Ctrl-C"/>
  <property name="order" value="test_x.py:0007"/></properties><error message="no"/></testcase>
<testcase classname="t" name="a"><properties>
  <property name="matrix" value="Open MPI 5.0.11 | launched | an exception"/>
  <property name="with" value="JAX 0.10.2 on Python 3.11.7"/></properties></testcase>
<testcase classname="t" name="b"><properties>
  <property name="matrix" value="Open MPI 5.0.11 | attached | an exception"/>
  <property name="with" value="JAX 0.10.2 on Python 3.11.7"/></properties><failure message="no"/></testcase>
<testcase classname="t" name="c"><properties>
  <property name="matrix" value="Slurm 22.05.8 | launched | an exception"/></properties></testcase>
<testcase classname="t" name="f"><properties><property name="seconds" value="1"/></properties></testcase>
<testcase classname="t" name="g"/>
</testsuite></testsuites>
"""
TABLE = """\
| event | Open MPI 5.0.11 | Slurm 22.05.8 |
| --- | --- | --- |
| an exception | ✓ / ✗ | ✓ /   |
| Ctrl-C |  | ? / ✗ |

Tried on three hosts, with JAX 0.10.2 on Python 3.11.7."""


def test_matrix_prints_the_table_replaces_the_old_one_and_reports_errors(tmp_path: Path) -> None:
    report, readme = tmp_path / "report.xml", tmp_path / "README.md"
    report.write_text(REPORT)
    readme.write_text("<!-- matrix -->\n<!-- end of matrix -->\n")

    def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, ROOT / "scripts/matrix", *words], capture_output=True, text=True)

    assert run(report).stdout.startswith(TABLE)
    for _ in range(2):  # the second time over the first
        assert run(report, "--write", readme).returncode == 0 and readme.read_text().count(TABLE) == 1
    # Of what was tried again, the later report counts.
    again = tmp_path / "again.xml"
    again.write_text(REPORT.replace('<failure message="no"/>', ""))
    assert "| an exception | ✓ / ✓ |" in run(report, again).stdout
    assert run(report, "--write", report).returncode == 1  # which has no marks
    none = tmp_path / "none.xml"
    missing = run(none)
    assert (missing.returncode, missing.stderr) == (1, f"scripts/matrix: {none}: No such file or directory\n")


# ---- scripts/bench: what --against reads and shows, and that the benchmark of lockstep measures what it says


def test_measurements_of_two_checkouts_are_compared_by_name_within_their_rounds() -> None:
    def measured(seconds: float, **more: object) -> dict[str, float]:
        samples = [
            {"contender": "jaxrun", "size": 4, "round": 1, "seconds": seconds, "least": {"psum": 1.0}, **more},
            {"contender": "jaxrun", "size": 8, "round": 1, "seconds": 0.0, "wrong": "status 1"},
        ]
        return against.read(samples)

    assert measured(2.0) == {"jaxrun 4 seconds": 2.0, "jaxrun 4 least psum": 1.0}
    rounds = [(measured(2.0), measured(1.0)), (measured(30.0), measured(10.0)), (measured(1.0), measured(1.0, size=2))]
    header, seconds, psum = against.render(rounds).splitlines()
    assert header.split() == ["measured", "here", "there", "ratio", "min-max", "rounds"]
    assert seconds.split() == ["jaxrun", "4", "seconds", "16", "5.5", "2.50", "2.00-3.00", "2"]
    assert psum.split()[-3:] == ["1.00", "1.00-1.00", "2"]


def test_a_checkout_to_compare_with_gets_its_environment_first(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="no checkout with the benchmark 'lag'"):
        against.prepare("lag", tmp_path)
    (tmp_path / "scripts" / "bench.d").mkdir(parents=True)
    (tmp_path / "scripts" / "bench.d" / "lag.py").touch()
    install = tmp_path / "scripts" / "install"
    install.write_text('#!/bin/sh\ncd "${0%/*}/.." && mkdir .venv\n')
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "x.py").touch()
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    install.chmod(0o755)
    against.prepare("lag", tmp_path)
    assert (tmp_path / ".venv").is_dir()
    assert list(tmp_path.glob("launcher/__pycache__/x.*.pyc"))  # as what pip installs
    with pytest.raises(SystemExit, match="scripts/install failed"):  # the directory is there already
        against.prepare("lag", tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize(("mode", "wrong"), [("record", ""), extended("off", "rank 0 has no flight recorder")])
def test_a_job_is_measured_and_what_it_recorded_is_looked_at(mode: str, wrong: str, monkeypatch) -> None:
    if wrong:  # the job is off, and should have recorded
        found = lockstep.misrecorded
        monkeypatch.setattr(
            lockstep, "misrecorded", lambda directory, mode, details: found(directory, "record", details)
        )
    done = lockstep.measure(mode, 2, 1, lockstep.Effort(blocks=1, seconds=0.1, programs=1))
    assert done.wrong == wrong
    if not wrong:
        assert done.least.keys() == {*lockstep.EACH_CALL, *lockstep.ONCE}
        assert done.ratio.keys() == done.pace.keys() == {"local", "global"}
        assert all(0 < seconds <= done.median[kind] for kind, seconds in done.least.items())


def test_the_imports_of_a_measured_program_stand_before_its_own() -> None:
    text = '"""A program."""\n\nfrom __future__ import annotations\n\nimport os\n'
    measured = imports.with_imports(text, "flax")
    assert measured.splitlines()[3:7] == ["import flax.nnx", "import optax", "import orbax.checkpoint", ""]
    assert imports.with_imports("import os\n", "keras") == "import keras\nimport os\n"
    assert imports.with_imports(text, "bare") == imports.with_imports(text, "netket") == text


@pytest.mark.extended
def test_a_start_is_measured_in_seconds_of_all_processes_and_in_the_memory_of_its_ranks(tmp_path: Path) -> None:
    with imports.importing(startup.JAX_SUM, "flax", tmp_path) as program:
        done = startup.measure(startup.JAXRUN, 2, 1, program)
        private, shared, wrong = startup.measure_memory(startup.JAXRUN, 2, program)
    assert done.wrong == wrong == ""
    assert 0.5 < done.cpu < 60 and 5 < private < shared


# ---- scripts/test, scripts/engines


def checkout(tmp_path: Path, *names: str, **stubs: str) -> Path:
    """A checkout with these scripts as they are, and files of shell commands as others: scripts_install, …."""
    (tmp_path / "scripts").mkdir()
    for name in ("lib.sh", *names):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    for name, commands in stubs.items():
        stub = tmp_path / name.replace("venv", ".venv").replace("_", "/")
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(f"#!/bin/bash\n{commands}\n")
        stub.chmod(0o755)
    return tmp_path


def test_the_output_of_the_last_run_of_tests_that_failed_is_kept_and_named(tmp_path: Path) -> None:
    """Also where pytest writes colours, and a later run passes."""
    pytest_stub = r"""echo "ran ${@: -1}"; printf '\033[31mred\033[0m\n' >&2; [[ ${@: -1} == -q ]]"""
    checkout(tmp_path, "test", scripts_install="", venv_bin_python=pytest_stub)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([tmp_path / "scripts/test", *words], capture_output=True, text=True, timeout=TIME_LIMIT)

    assert run("-q").returncode == 0 and list(tmp_path.glob("test-failure*")) == []
    failed = run("-x")
    assert failed.returncode == 1
    assert failed.stdout.splitlines()[-1] == "the output of this run is kept in test-failure.log"
    assert run("-q").returncode == 0
    assert [path.name for path in tmp_path.glob("test-failure*")] == ["test-failure.log"]
    kept = (tmp_path / "test-failure.log").read_text()
    assert "ran -x" in kept and "\nred\n" in kept and failed.stdout.splitlines()[-1] in kept
    ignored = subprocess.run(["git", "check-ignore", "-q", "test-failure.log"], cwd=ROOT)
    assert ignored.returncode in (0, 128)  # 128: this is no checkout of git


@pytest.mark.parametrize(
    ("status", "install"), [(0, "mkdir -p .venv/bin && ln -s /bin/true .venv/bin/python"), (69, "exit 69")]
)
def test_engines_are_installed_also_where_there_is_no_environment_yet(
    tmp_path: Path, status: int, install: str
) -> None:
    install = f'cd "${{0%/*}}/.."; echo installing; {install}'
    checkout(tmp_path, "engines", scripts_install=install, scripts_testbed="")
    make = "mkdir -p .engines/openmpi-5.0.11/bin && ln -s /bin/true .engines/openmpi-5.0.11/bin/python"
    subprocess.run(make, shell=True, cwd=tmp_path, check=True)  # what the environment's python would make
    command = [tmp_path / "scripts/engines", "openmpi==5.0.11"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    assert done.returncode == status and "installing\n" in done.stdout and "cannot be installed" not in done.stderr
    assert (tmp_path / ".engines/openmpi-5.0.11/complete").exists() == (status == 0)


# ---- scripts/gpu on a machine without GPUs


def gpu(*words: str | Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts/gpu", *words]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=3 * TIME_LIMIT, env={**os.environ, **environ}
    )


@pytest.mark.extended
def test_a_check_that_does_not_exist_is_refused_with_the_names_of_those_that_do() -> None:
    done = gpu("--python", sys.executable, "--platform", "cpu", "--only", "selfchek")
    assert done.returncode == 2
    assert "selfchek" in done.stderr and "selfcheck" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.extended
def test_the_checks_that_need_no_gpu_run_on_cpus_and_the_others_are_said_not_to() -> None:
    checks = ("selfcheck", "waits-for-rank", "visible")
    done = gpu("--python", sys.executable, "--platform", "cpu", "--only", *checks)
    assert done.returncode == 0, done.stderr
    table = " ".join([line for line in done.stdout.splitlines() if line.startswith("| ")][-3:])
    assert "| not run | needs 2 GPUs, this machine has 0 GPUs" in table
    assert "psum, all_gather and ppermute are right" in done.stdout
    assert "exit 124: 1 rank 1 endless.py" in done.stdout


@pytest.mark.extended
@pytest.mark.parametrize("namespaces", [True, False])
def test_two_ranks_meet_over_two_host_names_also_where_no_machine_can_be_renamed(
    namespaces: bool, tmp_path: Path
) -> None:
    """As on one GPU; without namespaces Python gives jaxrun another name for the machine."""
    (tmp_path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "unshare").chmod(0o755)
    path = {} if namespaces else {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    checks = (
        ("pair-lag", "pair-shape", "pair-restarted", "pair-tls") if namespaces else ("pair-killed", "pair-straggler")
    )
    done = gpu("--python", sys.executable, "--platform", "cpu", "--only", *checks, **path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| the same: ")]
    assert len(rows) == len(checks) and all("| ✓ |" in row for row in rows)
    assert ("rank 1 (gb) sleeps at pair.py" if namespaces else "rank 1 of 2 on gb was killed") in done.stdout


# ---- scripts/testbed: what it refuses, and how it reads ssh's command line


@pytest.mark.parametrize("root", ["relative", "/with space", "/" + "x" * 80])
def test_a_directory_that_cannot_hold_a_testbed_is_refused(root: str) -> None:
    with pytest.raises(state.Refusal, match="must be an absolute path without spaces of at most 80"):
        state.Place(Path(root))


OPTION = st.sampled_from([["-x"], ["-tt"], ["-p", "22"], ["-p22"], ["-o", "A=b c"], ["-xl", "me"], ["-oA=b"]])
OPTIONS = st.lists(OPTION).map(lambda options: [word for option in options for word in option])


@pytest.mark.extended
@settings(max_examples=40)
@given(OPTIONS, OPTIONS, st.lists(st.text()))
def test_ssh_options_are_dropped_and_the_command_is_kept(before: list[str], after: list[str], words: list[str]) -> None:
    assert remote.parse([*before, "me@h2", *after, "hostname", *words]) == remote.Remote("h2", ("hostname", *words))
    assert remote.parse(["h2", "--", "-x", *words]).words == ("-x", *words)


@pytest.mark.parametrize("arguments", [[], ["-x"], ["-p", "h1"], ["--"]])
def test_ssh_without_a_host_is_refused(arguments: list[str]) -> None:
    with pytest.raises(state.Refusal, match="no host was given"):
        remote.parse(arguments)


# ---- docker/

DOCKER = ROOT / "docker"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cuda"])
def test_every_source_of_a_copy_is_in_the_checkout_and_in_the_build_context(name: str) -> None:
    first, *context = (DOCKER / f"{name}.dockerignore").read_text().splitlines()
    allowed = [line.removeprefix("!") for line in context if line.startswith("!")]
    text = (DOCKER / name).read_text().replace("\\\n", " ")
    copies = [words.split() for words in re.findall(r"^COPY (?!--from=)(.*)", text, re.MULTILINE)]
    sources = {source for words in copies for source in words[:-1]}
    assert first == "*" and {"pyproject.toml", "README.md", "launcher", "runtime"} <= sources
    for source in sources:
        assert (ROOT / source).exists() and any(Path(source).is_relative_to(path) for path in allowed), source


# ---- scripts/preload-check


def preload_check(*words: str) -> subprocess.CompletedProcess[str]:
    command = [ROOT / "scripts/preload-check", "--python", sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=3 * TIME_LIMIT)


@pytest.mark.extended
def test_a_package_that_is_not_in_the_table_is_refused_and_one_that_is_unsafe_not_tried() -> None:
    done = preload_check("no_such_package")
    assert done.returncode == 2 and "--look no_such_package" in done.stdout
    done = preload_check("netket")
    assert done.returncode == 0 and "not tried" in done.stdout and "jax_enable_x64" in done.stdout


@pytest.mark.extended
def test_a_program_that_uses_optax_sees_the_same_with_preloading_and_an_import_is_looked_at() -> None:
    done = preload_check("optax")
    assert (done.returncode, done.stdout.split()[-1]) == (0, "same"), done.stdout
    looked = json.loads(preload_check("--look", "optax").stdout)
    assert "absl.flags._flagvalues.ReloadDetector" in str(looked["changes"]["import hooks"]["+"])
