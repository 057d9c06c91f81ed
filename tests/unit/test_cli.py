"""The command line: what the user types becomes a plan, or one clear message; and what the machine lacks for it."""

import errno
import json
import os
import shlex
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

import jaxrun
from jaxrun.cli.click_options import parameters
from jaxrun.cli.help import Command
from jaxrun.cli.main import main
from jaxrun.cli.make_job import make_job
from jaxrun.errors import UsageError, describe_shortage
from jaxrun.protocol.names import GANG_ADDRESS
from jaxrun.protocol.worker_command import runtime_directory
from jaxrun.spec.job import devices, option_kinds
from jaxrun.spec.job.fault_spec import parse_faults
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.nvml import NO_DRIVER, NvmlReading
from jaxrun.spec.job.option_declaration import options_of


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory with train.py in it, on a machine that shows no GPU."""
    (tmp_path / "train.py").write_text("raise SystemExit('this program must not run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


@pytest.fixture
def run_raises(monkeypatch):
    """run_raises(ERROR): to run a plan raises it."""
    return lambda error: monkeypatch.setattr("jaxrun.controller.supervisor.run_job.run", Mock(side_effect=error))


def test_a_task_of_an_mpirun_starts_no_job_of_its_own_unless_that_is_said(here, monkeypatch, capsys):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("JAXRUN_PROCESSES", "1")
    assert main(["train.py"]) == main(["--dry-run", "train.py"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and "type: mpirun -n 2 jaxrun attach train.py. " in output.err
    monkeypatch.delenv("JAXRUN_PROCESSES")
    by_hand = ["--hosts", "2", "--host-rank", "1", "--head", "h1:7777"]
    for meant in (["-n", "1"], ["-np", "1"], by_hand):
        assert main([*meant, "--dry-run", "train.py"]) == 0
    monkeypatch.setenv(GANG_ADDRESS, "unix:/tmp/x")
    assert main(["--dry-run", "train.py"]) == 0


def test_a_first_word_that_other_tools_have_is_understood_unless_a_program_has_that_name(here, capsys):
    for word in ("run", "launch", "exec"):
        assert main([word, "-n", "2", "--dry-run", "train.py"]) == 0
        assert "2 processes x 1 device" in capsys.readouterr().out
    for words, beginning in (
        (["version"], "jaxrun "),
        (["help"], "Usage: jaxrun [OPTIONS] PROGRAM"),
        (["help", "logs"], "Usage: jaxrun logs"),
    ):
        assert main(words) == 0 and capsys.readouterr().out.startswith(beginning)
    for word in ("ps", "ls"):
        assert main([word]) == 2 and "no job has left its run directory here" in capsys.readouterr().err
    (here / "run").write_text("print('a program')\n")
    assert main(["--dry-run", "run", "train.py"]) == 0 and " run train.py\n" in capsys.readouterr().out


def test_a_python_command_on_path_is_named_by_its_path_and_no_other(here, capsys, monkeypatch):
    folder = here / "bin"
    folder.mkdir()
    for name, first in (("my-train", "#!/usr/bin/python3"), ("my-shell", "#!/bin/sh")):
        (folder / name).write_text(f"{first}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    assert main(["-n", "2", "my-train", "--lr", "1"]) == 2
    assert f"start the command of that name with: jaxrun [OPTIONS] {folder / 'my-train'}" in capsys.readouterr().err
    assert main(["my-shell"]) == 2 and "the command of that name" not in capsys.readouterr().err


def test_torchruns_processes_per_core_are_as_many_as_this_process_may_use(here, capsys):
    assert main(["--nproc-per-node=cpu", "--dry-run", "--json", "train.py"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert len(plan["workers"]) == len(os.sched_getaffinity(0))


def test_options_that_are_not_given_keep_the_defaults_of_the_job():
    nothing = {"program": ("p",), "assignments": (), "env_files": (), "processes": None, "no_fork": False}
    assert make_job(nothing, {}) == Job(program=("p",))


def test_options_become_the_job(here, plans):
    options = "-n 4 -d2 --platform=cpu --simulate-hosts 2 --backend local --no-fork --quiet-ranks 1-2 -v "
    options += "--timeout 1h30m --init-timeout 7.5 --stall-timeout 90s --grace 500ms"
    names = ["--run-dir", "out put", "--tag", "try 1"]
    assert main([*options.split(), *names, "train.py"]) == 42
    (plan,) = plans
    assert plan.job == Job(
        program=("train.py",),
        processes=4,
        devices_per_process=2,
        platform="cpu",
        simulated_hosts=2,
        timeout=5400.0,
        init_timeout=7.5,
        stall_timeout=90.0,
        grace=0.5,
        run_dir=Path("out put"),
        tag="try 1",
        verbose=True,
        no_fork="--no-fork was given",
        quiet_ranks=(range(1, 3),),
    )


@pytest.mark.parametrize(
    ("words", "program"),
    [
        (["train.py", "--help"], ("train.py", "--help")),
        (["train.py", "--", "-n", "9"], ("train.py", "--", "-n", "9")),
        (["train.py", "-n", "9", "-m", "x", "explain"], ("train.py", "-n", "9", "-m", "x", "explain")),
        (["train.py", "--no-such", "a b", "", "ä'\"\n"], ("train.py", "--no-such", "a b", "", "ä'\"\n")),
        (["--", "train.py", "--x"], ("train.py", "--x")),
        (["-m", "train", "--help"], ("train", "--help")),
    ],
)
def test_everything_after_the_program_belongs_to_it(here, plans, words, program):
    assert main(["-n", "2", *words]) == 42
    (plan,) = plans
    assert (plan.job.program, plan.job.processes) == (program, 2)
    assert plan.argv[1:] == (runtime_directory(), *(["-m"] if plan.job.module else []), *program)
    assert plan.job.module == (words[0] == "-m")


def test_a_program_called_like_the_subcommand_runs_by_its_path(here, plans):
    (here / "explain").write_text("")
    assert main(["./explain"]) == 42
    assert main(["-n", "1", "explain"]) == 42


def test_variables_come_from_files_then_from_the_command_line(here, plans, monkeypatch):
    monkeypatch.setenv("PASSED", "on")
    (here / "job.env").write_text("A=file\nB=file\n")
    assert main(["--env", "A=flag", "--env-file", "job.env", "--env", "PASSED", "train.py"]) == 42
    assert plans[0].job.env == {"A": "flag", "B": "file", "PASSED": "on"}


def test_a_program_may_decline_forking_and_every_job_has_an_id_of_its_own(here, plans):
    (here / "threads.py").write_text("# jaxrun: no-fork\n")
    main(["threads.py"])
    main(["-m", "threads"])
    main(["train.py"])
    assert [plan.fork for plan in plans] == [False, False, True]
    assert "threads.py asks for it" in plans[0].notes[0]
    assert len({plan.job_id for plan in plans}) == 3 and all(len(plan.job_id) == 32 for plan in plans)


@pytest.mark.parametrize(
    ("words", "processes", "devices"),
    [
        (["-np", "3"], 3, 1),
        (["--np=3"], 3, 1),
        (["--nproc-per-node", "3"], 3, 1),
        (["--nproc_per_node=3", "--nnodes", "1"], 3, 1),
        (["--devices_per_process", "2", "--nproc-per-node", "auto"], 1, 2),
    ],
)
def test_the_names_of_other_launchers_are_understood(here, plans, words, processes, devices):
    assert main([*words, "train.py"]) == 42
    assert (len(plans[0].workers), plans[0].local_devices) == (processes, devices)


def test_torchruns_processes_per_node_count_for_each_host():
    job = make_job({"program": ("p",), "backend": "slurm", "hosts": 2, "processes_per_node": 4}, {})
    assert (job.hosts, job.processes_per_host, job.processes) == (2, 4, None)
    assert make_job({"program": ("p",), "processes_per_node": "gpu"}, {}).platform == "gpu"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "jaxrun: no program given"),
        (["-n", "4"], "jaxrun: no program given"),
        (["-m"], "jaxrun: -m needs the name of a module"),
        (["-n", "x", "train.py"], "jaxrun: -n/--processes: 'x' is not a valid integer\n"),
        (["explain", "--nosuch"], "no option --nosuch of jaxrun explain; jaxrun explain --help lists its options"),
        (["--submit", "train.py"], "not for --backend local; add --backend slurm"),
        (["-n", "2", "run", "train.py"], "leave out run: jaxrun [OPTIONS] PROGRAM"),
        (["-n", "2", "uv", "run", "train.py"], "it comes before jaxrun: uv run jaxrun [OPTIONS] PROGRAM"),
        (["--gpu", "train.py"], "there is no option --gpu: leave it out: each GPU gets a process"),
        (["--gpus", "4", "train.py"], "there is no option --gpus: leave it out for all GPUs of a host"),
        (["tpo"], "did you mean the command jaxrun top?"),
        (["--proceses", "2", "train.py"], "there is no option --proceses; did you mean --processes?"),
        (["--stall", "3", "train.py"], "there is no option --stall; did you mean --stall-timeout or --stall-notice?"),
        (["--platform", "xpu", "train.py"], "--platform: 'xpu' is not one of"),
        (["--platform", "gpu", "train.py"], "--platform gpu asks for GPUs, but none is visible"),
        (["--platform", "rocm", "train.py"], "but none is visible (the kernel lists no AMD GPU); make one visible, or"),
        (["--timeout", "soon", "train.py"], "--timeout: 'soon' is not a time; write seconds, or 90s, 5m, 1h30m"),
        (["--nproc-per-node", "some", "train.py"], "'some' is neither a number nor auto or gpu or cpu"),
        (["-n", "3", "--nproc-per-node", "2", "train.py"], "--nproc-per-node 2 contradicts -n 3"),
        (["-n"], "jaxrun: -n requires an argument\n"),
        (["--lr", "0.1", "train.py"], "there is no option --lr; put the program's options after its name"),
        (
            ["attach", "--master_addr", "h1", "train.py"],
            "there is no option --master-addr: use --head HOST:PORT, the same on all hosts",
        ),
        (["-c", "print(1)"], "there is no option -c: write the code into a file"),
        (["-c", "2", "-n", "2", "x.py"], "there is no option -c: use --cpus-per-process 2"),
        (["-n", "2", "-c2", "x.py"], "there is no option -c2: use --cpus-per-process 2"),
        (["-ppn", "2", "train.py"], "there is no option -ppn: use --processes-per-host"),
        (["explian", "latest"], "'explian' does not exist; did you mean the command jaxrun explain?"),
        (["stacks", "--ful"], "there is no option --ful of jaxrun stacks; did you mean --full?"),
        (["--env", "NOT_SET_ANYWHERE", "train.py"], "NOT_SET_ANYWHERE"),
        (["--env-file", "bad.env", "train.py"], "bad.env:2: NAME=VALUE is expected, but this line has no equals sign"),
        (["-n", "3", "--simulate-hosts", "2", "train.py"], "give a multiple of 2"),
        (["--backend", "smoke", "train.py"], "smoke"),
        (["--bind", "numa", "train.py"], "--bind: 'numa' is not one of 'auto', 'gpu', 'cores', 'none'"),
        (["--wrap", "no-such-command -x", "train.py"], "--wrap: there is no command 'no-such-command' on PATH"),
        (["--wrap", "sh -c 'x", "train.py"], "cannot be split into words"),
        (["--", "-m", "train"], "a program cannot be called '-m'"),
        (["explain"], "no job has left its run directory here: there is no jaxrun-runs in"),
        (["explain", "gone"], "jaxrun: RUN_DIR: directory 'gone' does not exist"),
        (
            ["--backend", "slurm", "-H", "h1", "train.py"],
            "-H/--host is for --backend mpirun, --backend ssh, --backend",
        ),
        (["--backend", "mpirun", "--partition", "p", "train.py"], "--partition is for --backend slurm"),
        (["--backend", "slurm", "--simulate-hosts", "2", "train.py"], "--simulate-hosts is for --backend local"),
        (["--backend", "mpirun", "-H", "h1", "--hostfile", "x", "train.py"], "--host h1 and --hostfile x contradict"),
        (["--backend", "mpirun", "--mpi-args", "'a", "train.py"], '--mpi-args "\'a" cannot be split into words'),
        (["--requeue", "train.py"], "--requeue is for --backend slurm"),
        (["--backend", "slurm", "--requeue", "--no-run-dir", "train.py"], "--requeue needs the run directory"),
        (["doctor", "train.py"], "unexpected extra argument (train.py)"),
        (["doctor", "--submit"], "no option --submit of jaxrun doctor"),
        (["doctor", "--partition", "p"], "--partition is for --backend slurm"),
        (["doctor", "--backend", "slurm"], "SLURM_JOB_ID is not set"),
        (["attach", "-n", "4", "train.py"], "there is no option -n of jaxrun attach"),
        (["attach", "train.py"], "nothing says which rank this process is; looked for the variables of"),
        (["attach", "--rank", "1", "--size", "2", "train.py"], "--head HOST:PORT, where rank 0 listens"),
        (["attach", "--rank", "1", "--size", "2", "--head", "h1", "train.py"], "host:port or [fd00::1]:port, not 'h1'"),
        (["attach", "--rank", "1", "--size", "2", "--rendezvous", "none", "train.py"], "none is not a directory"),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(here, plans, monkeypatch, capsys, words, message):
    (here / "bad.env").write_text("A=1\noops\n")
    (here / "srun").symlink_to("/bin/true")
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(devices, "ask_nvml", lambda limit_s: NvmlReading(trouble=NO_DRIVER))
    before = sorted(here.iterdir())
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("jaxrun: ") and message in printed.err and "Traceback" not in printed.err
    assert printed.out == "" and not plans and sorted(here.iterdir()) == before


def test_a_batch_script_is_written_and_nothing_started(here, plans, capsys):
    assert main(["--backend", "slurm", "-N", "2", "--sbatch", "job.sh", "train.py", "--lr", "0.1"]) == 0
    script = (here / "job.sh").read_text()
    assert "#SBATCH --nodes=2" in script and script.rstrip().endswith(" --hosts=2 --backend=slurm train.py --lr 0.1")
    assert "--sbatch" not in script.splitlines()[-1] and not plans


def test_dry_run_prints_the_plan_and_starts_nothing(here, plans, capsys):
    before = sorted(here.iterdir())
    assert main(["--dry-run", "-n", "2", "train.py", "a b"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{sys.executable} {runtime_directory()} train.py 'a b'\n")
    assert "\nrank  host" in printed and not plans and sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (UsageError("the run directory is taken"), 2, "jaxrun: the run directory is taken\n"),
        (OSError(errno.EMFILE, "Too many open files", "/x"), 69, "open files (/x); raise the limit: ulimit -n 65536"),
        (OSError(errno.EAGAIN, "Resource temporarily unavailable"), 69, "No more processes can be started; raise"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 69, "Cannot allocate memory; start fewer processes with -n"),
        (OSError(errno.ENOSPC, "No space left on device"), 69, "No space left on device; make room, or"),
        (OSError(errno.EROFS, "Read-only file system"), 69, "Read-only file system; make room, or let the job leave"),
        (RuntimeError("can't start new thread"), 69, "no more threads can be started here"),
    ],
)
def test_an_error_of_the_run_or_what_the_machine_lacks_ends_in_one_line(here, run_raises, capsys, error, status, words):
    run_raises(error)
    assert main(["train.py"]) == status
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1


@pytest.mark.parametrize("error", [OSError(errno.EBADF, "Bad file descriptor"), RuntimeError("dead"), ValueError("x")])
def test_an_error_of_another_kind_keeps_its_traceback(here, run_raises, error):
    run_raises(error)
    assert describe_shortage(error) == ""
    with pytest.raises(type(error)):
        main(["train.py"])


@pytest.mark.parametrize("words", [("train.py",), ("attach", "train.py"), ("explain",), ("stacks",)])
def test_a_deleted_working_directory_is_reported(tmp_path, monkeypatch, capsys, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(
        "jaxrun: the working directory has been deleted; change to an existing one"
    )


@pytest.mark.parametrize(
    ("words", "options", "examples"), [(["-h"], 8, 3), (["attach", "-h"], 8, 1), (["doctor", "-h"], 5, 2)]
)
def test_help_has_the_options_of_the_first_hour_on_one_screen(capsys, words, options, examples):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert lines[0].startswith("Usage: ") and "Options:" in lines
    assert sum(line.startswith("  -") for line in lines) == options
    assert sum(line.startswith("  jaxrun ") for line in lines) == examples


def test_help_all_shows_every_option_and_every_exit_code(capsys):
    from jaxrun import errors
    from jaxrun.cli.click_options import parameters

    assert main(["attach", "--help-all"]) == 0
    assert "mpirun|srun ... jaxrun attach" in capsys.readouterr().out
    assert main(["--help-all"]) == 0
    page = capsys.readouterr().out
    assert max(map(len, page.splitlines())) <= 100
    names = {name for param in parameters() for name in param.opts if name.startswith("-")}
    assert len(names) > 20 and all(name in page for name in names)
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")} - {errors.EXIT_SIGNAL_BASE}
    assert all(f"\n  {code} " in page for code in codes) and "\n  128+n" in page


def test_the_version_is_shown(capsys):
    assert main(["--version"]) == main(["-V"]) == main(["-V", "-n", "x"]) == 0
    assert capsys.readouterr().out == f"jaxrun {jaxrun.__version__}\n" * 3


@pytest.mark.parametrize(
    ("shell", "typed", "suggestions"),
    [
        ("bash", "jaxrun --sim", "plain,--simulate-hosts"),
        ("bash", "jaxrun tr", "file,tr"),
        ("bash", "jaxrun ex", "plain,explain\n"),
        ("bash", "jaxrun t", "plain,top\nplain,train.py\n"),
        ("bash", "jaxrun train.py --ver", "file,--ver\n"),
        ("bash", "jaxrun -n 2 train.py -", "file,-\n"),
        ("zsh", "jaxrun -m train --st", "file\n--st\n"),
        ("bash", "jaxrun stacks --f", "plain,--full"),
        ("bash", "jaxrun explain r", "dir,r"),
        ("bash", "jaxrun --run-dir r", "dir,r"),
        ("bash", "jaxrun --hostfile h", "file,h"),
        ("bash", "jaxrun --stage v", "dir,v"),
        ("fish", "jaxrun ex", "plain,explain\n"),
        ("zsh", "jaxrun ex", "plain\nexplain\n_\n"),
        ("fish", "jaxrun train.py --ver", "file,--ver\n"),
        ("fish", "jaxrun --stag", "plain,--stage\tFirst copy this directory to a local disk of each host"),
        ("fish", "jaxrun attach --ra", "plain,--rank\t"),
    ],
)
def test_shells_complete_options_and_programs(here, monkeypatch, capsys, shell, typed, suggestions):
    words = typed.split()
    monkeypatch.setenv("_JAXRUN_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words) - 1))
    with pytest.raises(SystemExit):
        main([])
    shown = capsys.readouterr().out
    assert shown.startswith(suggestions)
    assert not {"plain,", "file,"} <= {
        line[: line.find(",") + 1] for line in shown.splitlines()
    }  # bash drops the plain


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_an_error_about_the_words_of_attach_is_printed_by_rank_0_alone(rank, lines, monkeypatch, capsys):
    monkeypatch.setattr("jaxrun.cli.main._RANK_0_TIME_S", 0.0)
    for name, value in (("OMPI_COMM_WORLD_RANK", rank), ("OMPI_COMM_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert main(["attach", "--bogus", "train.py"]) == 2
    assert capsys.readouterr().err.count("there is no option --bogus") == lines


# ---- the words of a job are a command line that asks for the same job

_SAMPLES = (
    (option_kinds.FLAG, True),
    (option_kinds.TEXT, "a 'b' c"),
    (option_kinds.COUNT, 3),
    (option_kinds.TIME, 1234567.25),
    (option_kinds.FILE, Path("a b")),
    (option_kinds.DIRECTORY, Path("a b")),
    (option_kinds.FILES, (Path("a b"), Path("c"))),
    (option_kinds.DIRECTORIES, (Path("a b"), Path("venv"))),
    (option_kinds.COMMAND, "/opt/my bin/x"),
    (option_kinds.RANKS, (range(3), range(5, 6))),
    (option_kinds.WORDS, ("nsys", "a 'b'", "")),
    (option_kinds.FAULTS, parse_faults("kill:1,3@2s,pause:any@1s")),
    (option_kinds.ASSIGNMENTS, ("A=b c", "URL=x=y")),
)


def _sample(declared):
    if declared.kind.choices:
        return [*declared.kind.choices][-1]
    other = declared.kind.on or (7 if declared.kind.words else "/a b")
    return next((value for kind, value in _SAMPLES if kind is declared.kind), other)


def _read(words):
    command = Command("jaxrun", params=parameters(), context_settings={"allow_interspersed_args": False})
    return command.make_context("jaxrun", [*words]).params


def test_what_is_written_for_a_value_is_read_as_the_same_value():
    values = {field.name: (declared, _sample(declared)) for field, declared in options_of(Job)}
    words = [word for declared, value in values.values() for word in declared.words(value)]
    read = _read([*words, "train.py"])
    expected = {name: True if declared.kind.is_flag else value for name, (declared, value) in values.items()}
    assert len(values) > 70 and {name: read[name] for name in expected} == expected


@pytest.mark.parametrize(
    "words",
    [
        "--stall-timeout auto --grow never --min-hosts 1 --max-restarts 1 -N 2 --backend slurm -m a.b c --grow 1h",
        "-n 4 --no-fork --only-rank 0-1,3 --wrap nsys --wrap 'a b' --env A=b train.py --n 4",
        "-N 2 --host-rank 1 --head h1:7777 train.py",
    ],
)
def test_the_words_of_a_job_ask_for_the_same_job(words):
    job = make_job(_read(shlex.split(words)), {})
    assert make_job(_read(job.command_words()), {}) == job
    assert make_job(_read(job.command_words(without=("min_hosts", "grow"))), {}) == replace(
        job, min_hosts=None, grow=None
    )


def test_a_program_that_has_the_name_of_a_command_is_said_to_be_a_program():
    assert Job(program=("list", "x")).command_words() == ["--", "list", "x"]
    assert Job(program=("list",), module=True).command_words() == ["-m", "list"]
    assert Job(program=("list",), processes=2).command_words() == ["--processes=2", "list"]
