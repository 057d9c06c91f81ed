"""The table of backends: what --backend offers, which options each understands, and how another is added."""

import shutil
from importlib import import_module

import click
import pytest

from jaxrun.backends import BACKENDS, HOST_OPTIONS, Backend, check_options, make_plan
from jaxrun.cli.main import main
from jaxrun.cli.options import parameters
from jaxrun.errors import UsageError
from jaxrun.job.job import Job


@pytest.fixture
def pbs(monkeypatch, tmp_path):
    """A backend beside those of jaxrun, by its file and one line in the table; gives the environment of a PBS job."""
    monkeypatch.setitem(BACKENDS, "pbs", Backend("pbs_example", HOST_OPTIONS))
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    (tmp_path / "mpiexec").symlink_to(shutil.which("true"))
    (tmp_path / "nodes").write_text("h1\nh1\nh2\nh2\n")
    return {"PATH": str(tmp_path), "PBS_JOBID": "7.ctl", "PBS_NODEFILE": str(tmp_path / "nodes")}


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_of_the_table_has_a_plan(name):
    assert callable(import_module(BACKENDS[name].module).plan)


def test_every_option_of_a_backend_is_an_option_of_the_command():
    known = {parameter.name for parameter in parameters()}
    assert all(set(backend.options) <= known for backend in BACKENDS.values())


def test_an_option_that_the_backend_does_not_understand_is_refused():
    message = (
        "-N/--hosts is for --backend mpirun, --backend slurm or --host-rank on each host, not for --backend local; "
    )
    with pytest.raises(UsageError, match=message):
        check_options(Job(program=("p",), hosts=2))
    check_options(Job(program=("p",), hosts=2, backend="slurm"))
    check_options(Job(program=("p",), interface="eth0", backend="attach"))


def test_a_new_backend_is_one_file_and_one_line(pbs):
    job = Job(program=("train.py",), backend="pbs", hosts=2)
    check_options(job)
    plan = make_plan(job, pbs, "0123456789abcdef" * 2)
    assert [worker.host for worker in plan.workers] == ["h1", "h1", "h2", "h2"]
    assert plan.launch_command.title == "mpiexec in PBS job 7.ctl"


def test_the_command_offers_a_new_backend_and_its_help_names_it(pbs):
    options = {parameter.name: parameter for parameter in parameters()}
    assert options["backend"].metavar == "local|mpirun|slurm|pbs"
    assert isinstance(options["backend"].type, click.Choice) and "pbs" in options["backend"].type.choices
    assert options["hosts"].help == "Real hosts, with mpirun, slurm, pbs or --host-rank."


def test_a_dry_run_shows_the_plan_of_a_new_backend(pbs, tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name, value in pbs.items():
        monkeypatch.setenv(name, value)
    assert main(["--backend", "pbs", "-n", "3", "--dry-run", "train.py"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{tmp_path}/mpiexec --line-buffer --envall -n 3 --hosts h1,h1,h2 ")
    assert "3 processes on 2 hosts by mpiexec in PBS job 7.ctl" in page


def test_the_pytest_plugin_offers_the_backends_of_the_table():
    from jaxrun.pytest_plugin import options

    assert options.BACKENDS is BACKENDS
