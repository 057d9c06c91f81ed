"""Options from elsewhere: defaults from pyproject.toml and from variables; and those that stand after the program."""

from pathlib import Path

import pytest

from jaxrun.cli.main import main
from jaxrun.protocol.names import GANG_ADDRESS, JOB_ID


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project whose pyproject.toml is written by `project(text)`; the tests run in a folder below it."""
    folder = tmp_path / "src"
    folder.mkdir()
    (folder / "train.py").write_text("raise SystemExit('this program must not run')\n")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("CI", raising=False)
    return lambda text: (tmp_path / "pyproject.toml").write_text(f"[project]\nname = 'x'\n\n{text}\n")


@pytest.fixture
def job(plans):
    """job(WORDS…) → the Job that would be run."""

    def run(*words):
        assert main([*words, "train.py"]) == 42
        return plans[-1].job

    return run


def test_the_file_gives_way_to_a_variable_and_that_to_the_command_line(project, job, monkeypatch):
    table = "[tool.jaxrun]\nprocesses = 2\nstall-timeout = '5m'\nmpi-args = '--mca a b'\n"
    project(f"{table}no_run_dir = true\nno-fork = true\n")
    assert (job().processes, job().stall_timeout, job().no_run_dir) == (2, 300, True)
    assert job().no_fork == "--no-fork was given"
    monkeypatch.setenv("JAXRUN_PROCESSES", "3")
    monkeypatch.setenv("JAXRUN_NO_RUN_DIR", "0")
    monkeypatch.setenv("JAXRUN_NO_FORK", "0")
    assert (job().processes, job().stall_timeout, job().no_run_dir, job().no_fork) == (3, 300, False, "")
    assert (job("-np", "4").processes, job("--stall-timeout", "0").stall_timeout) == (4, 0)


def test_variables_of_the_workers_add_up(project, job, monkeypatch):
    project("[tool.jaxrun.env]\nA = 1\nB = 'two words'\nC = 3")
    monkeypatch.setenv("JAXRUN_ENV", "C=4 D='five six'")
    assert job("--env", "B=9").env == {"A": "1", "B": "9", "C": "4", "D": "five six"}


def test_defaults_that_the_backend_does_not_know_or_the_command_line_contradicts_are_left_out(project, job):
    project("[tool.jaxrun]\npartition = 'gpu'\nquiet-ranks = '1'\nrun-dir = 'x'")
    found = job("-n", "2", "--only-rank", "0", "--no-run-dir")
    assert (found.partition, found.quiet_ranks, found.run_dir) == ("", (), None)
    with_them = job("-n", "2")
    assert with_them.quiet_ranks == (range(1, 2),) and str(with_them.run_dir) == "x"


def test_a_typed_option_overrides_each_default_that_excludes_it(project, job):
    project("[tool.jaxrun]\nmax-restarts = 3\nquiet = true\nlockstep = 'strict'\nno-run-dir = true")
    assert (job("-n", "2").max_restarts, job("-n", "2").lockstep) == (3, "strict")
    found = job("-n", "2", "--pdb", "-v", "--metrics", "9400")
    assert (found.max_restarts, found.quiet, found.no_run_dir, found.lockstep) == (0, False, False, "strict")
    assert job("-n", "2", "--keep-survivors").lockstep == "check"


def test_the_nearest_file_with_the_table_counts(project, tmp_path, job):
    project("[tool.jaxrun]\nprocesses = 2")
    (tmp_path / "src" / "pyproject.toml").write_text("[tool.other]\njaxrun = 1\n")
    assert job().processes == 2
    (tmp_path / "src" / "pyproject.toml").write_text("[tool.jaxrun]\nprocesses = 3\n")
    assert job().processes == 3


@pytest.mark.parametrize("variable", [JOB_ID, GANG_ADDRESS])
def test_a_process_of_a_job_takes_no_variable_and_a_gang_nothing(project, job, monkeypatch, variable):
    project("[tool.jaxrun]\nprocesses = 2")
    monkeypatch.setenv("JAXRUN_TIMEOUT", "5m")
    monkeypatch.setenv(variable, "7")
    found = job()
    assert found.timeout is None
    assert found.processes == (2 if variable == JOB_ID else 1)


@pytest.mark.parametrize(
    ("table", "variable", "message"),
    [
        ("[tool.jaxrun]\nproceses = 2", "", "[tool.jaxrun] has no option 'proceses'; did you mean 'processes'?"),
        ("[tool.jaxrun]\ndry-run = true", "", "[tool.jaxrun] has no option 'dry-run'; jaxrun --help-all lists them"),
        ("[tool.jaxrun]\nprocesses = [2]", "", "pyproject.toml: processes must be one value, not [2]"),
        ("[tool.jaxrun]\nprocesses = 1.5", "", "pyproject.toml: -n/--processes: '1.5' is not a valid integer"),
        ("[tool.jaxrun]\nenv = [['A']]", "", "pyproject.toml: env must be a list of strings"),
        ("[tool]\njaxrun = 3", "", "[tool.jaxrun] must be a table, not 3"),
        ("[tool.jaxrun]\nprocesses = ", "", "pyproject.toml cannot be read: "),
        ("", "two", "jaxrun: JAXRUN_PROCESSES: -n/--processes: 'two' is not a valid integer\n"),
    ],
)
def test_a_wrong_default_is_refused_with_its_place(project, monkeypatch, capsys, table, variable, message):
    project(table)
    monkeypatch.setenv("JAXRUN_PROCESSES", variable)
    assert main(["train.py"]) == 2
    assert message in capsys.readouterr().err


# ---- options of jaxrun after the program


@pytest.fixture
def ask(project, plans, capsys):
    """ask(TEXT, WORDS…) → what is printed before the job of train.py, whose text is TEXT, is run with these words."""

    def run(text, *words):
        Path("train.py").write_text(text)
        assert main(words) == 42
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("train.py", "-n", "4"), "-n 4 goes to train.py; did you mean jaxrun -n 4 train.py?"),
        (("-d", "2", "train.py", "-np=4", "x"), "-np=4 goes to train.py; did you mean jaxrun -np=4 -d 2 train.py x?"),
        (
            ("train.py", "a b", "--processes", "4", "--lr=1"),
            "--processes 4 goes to train.py; did you mean jaxrun --processes 4 train.py 'a b' --lr=1?",
        ),
        (("-m", "train", "--backend=slurm"), "did you mean jaxrun --backend=slurm -m train?"),
    ],
)
def test_an_option_after_the_program_is_asked_about(ask, words, line):
    assert line in ask("print(1)\n", *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("print(1)", ("-n", "2", "train.py", "-n", "4")),  # known to the user
        ("print(1)", ("--", "train.py", "-n", "4")),  # said to be the program's
        ("print(1)", ("train.py", "--", "-n", "4")),
        ("print(1)", ("train.py", "-n", "many")),  # would be none of ours
        ("print(1)", ("train.py", "-n")),
        ("print(1)", ("train.py", "-m", "--run-dir", "x", "-x")),  # common in programs
        ("parser.add_argument('-n', type=int)", ("train.py", "-n", "4")),
        ("flags.DEFINE_integer('processes', 1, '')", ("train.py", "--processes", "4")),
        ("class Config:\n    devices_per_process: int", ("train.py", "--devices-per-process", "4")),
    ],
)
def test_it_is_not_where_something_speaks_against(ask, text, words):
    assert ask(text, *words) == ""
