"""The command line: what the user types becomes a plan, or one clear message."""

import os
import sys
from pathlib import Path

import pytest

import jaxrun
from jaxrun.cli.main import main
from jaxrun.cli.make_job import make_job
from jaxrun.errors import UsageError
from jaxrun.job.job import Job


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory with train.py in it, on a machine that shows no GPU."""
    (tmp_path / "train.py").write_text("raise SystemExit('this program must not run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


@pytest.fixture
def plans(monkeypatch):
    """Collects the plans that would be run; the job's exit code is then 42."""
    collected = []
    monkeypatch.setattr("jaxrun.supervisor.run.run", lambda plan, environ, early_server: collected.append(plan) or 42)
    return collected


def test_options_that_are_not_given_keep_the_defaults_of_the_job():
    nothing = {"program": ("p",), "assignments": (), "env_files": (), "processes": None, "no_fork": False}
    assert make_job(nothing, {}) == Job(program=("p",))


def test_the_jobs_exit_code_is_the_commands(here, plans):
    assert main(["train.py"]) == 42


def test_options_become_the_job(here, plans):
    options = "-n 4 -d2 --platform=cpu --simulate-hosts 2 --backend local --timeout 9 --init-timeout 7.5 --grace 0 -v"
    names = ["--run-dir", "out put", "--tag", "try 1", "--no-fork", "--quiet-ranks", "1-2"]
    assert main([*options.split(), *names, "train.py"]) == 42
    (plan,) = plans
    assert plan.job == Job(
        program=("train.py",),
        processes=4,
        devices_per_process=2,
        platform="cpu",
        simulated_hosts=2,
        timeout=9.0,
        init_timeout=7.5,
        grace=0.0,
        run_dir=Path("out put"),
        tag="try 1",
        verbose=True,
        no_fork="--no-fork was given",
        quiet_ranks=(range(1, 3),),
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--", "-n", "9"],
        ["-n", "9", "-m", "x", "explain"],
        ["--no-such-option", "a b", "", "ä'\"\n"],
        ["--version"],
    ],
)
def test_everything_after_the_program_belongs_to_it(here, plans, arguments):
    assert main(["-n", "2", "train.py", *arguments]) == 42
    assert plans[0].job.program == ("train.py", *arguments)
    assert plans[0].job.processes == 2


def test_m_runs_a_module_with_its_arguments(here, plans):
    assert main(["-n", "2", "-m", "train", "--help"]) == 42
    assert plans[0].argv[1:] == ("-m", "jaxrun_runtime", "-m", "train", "--help")


def test_a_double_dash_ends_the_options(here, plans):
    assert main(["-n", "2", "--", "train.py", "--x"]) == 42
    assert plans[0].job.program == ("train.py", "--x")


def test_a_program_called_like_the_subcommand_runs_by_its_path(here, plans):
    (here / "explain").write_text("")
    assert main(["./explain"]) == 42
    assert main(["-n", "1", "explain"]) == 42


def test_variables_come_from_files_then_from_the_command_line(here, plans, monkeypatch):
    monkeypatch.setenv("PASSED", "on")
    (here / "job.env").write_text("A=file\nB=file\n")
    assert main(["--env", "A=flag", "--env-file", "job.env", "--env", "PASSED", "train.py"]) == 42
    assert plans[0].job.env == {"A": "flag", "B": "file", "PASSED": "on"}


def test_a_program_may_decline_forking(here, plans):
    (here / "threads.py").write_text("# jaxrun: no-fork\n")
    main(["threads.py"])
    main(["-m", "threads"])
    main(["train.py"])
    assert [plan.fork for plan in plans] == [False, False, True]
    assert "threads.py asks for it" in plans[0].notes[0]


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


def test_torchruns_processes_per_node_are_those_of_each_of_several_hosts():
    job = make_job({"program": ("p",), "backend": "slurm", "hosts": 2, "processes_per_node": 4}, {})
    assert (job.hosts, job.processes_per_host, job.processes) == (2, 4, None)
    assert make_job({"program": ("p",), "processes_per_node": "gpu"}, {}).platform == "gpu"


def test_times_may_have_units(here, plans):
    assert main(["--timeout", "1h30m", "--stall-timeout", "90s", "--grace", "500ms", "train.py"]) == 42
    job = plans[0].job
    assert (job.timeout, job.stall_timeout, job.grace) == (5400, 90, 0.5)


def test_every_job_has_an_id_of_its_own(here, plans):
    main(["train.py"])
    main(["train.py"])
    assert plans[0].job_id != plans[1].job_id and len(plans[0].job_id) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "jaxrun: no program given"),
        (["-n", "4"], "jaxrun: no program given"),
        (["-m"], "jaxrun: -m needs the name of a module"),
        (["-n", "0", "train.py"], "-n/--processes must be 1 or more, not 0"),
        (["-n", "-3", "train.py"], "-n/--processes must be 1 or more, not -3"),
        (["-d", "0", "train.py"], "-d/--devices-per-process must be 1 or more, not 0"),
        (["-n", "x", "train.py"], "jaxrun: -n/--processes: 'x' is not a valid integer\n"),
        (["--proceses", "2", "train.py"], "there is no option --proceses; did you mean --processes?"),
        (["--stall", "3", "train.py"], "there is no option --stall; did you mean --stall-timeout or --stall-notice?"),
        (["--platform", "xpu", "train.py"], "--platform: 'xpu' is not one of"),
        (["--platform", "gpu", "train.py"], "--platform gpu asks for GPUs, but none is visible"),
        (["--timeout", "soon", "train.py"], "--timeout: 'soon' is no time; write seconds, or 90s, 5m, 1h30m"),
        (["--nproc-per-node", "some", "train.py"], "'some' is neither a number nor auto or gpu"),
        (["-n", "3", "--nproc-per-node", "2", "train.py"], "--nproc-per-node 2 contradicts -n 3"),
        (["-n"], "jaxrun: -n requires an argument\n"),
        (["--lr", "0.1", "train.py"], "there is no option --lr; options of the program stand after its name"),
        (["--master_addr", "h1", "train.py"], "there is no option --master-addr: where the hosts meet is said with"),
        (["-ppn", "2", "train.py"], "there is no option -ppn: processes on each host are said with"),
        (["explian", "latest"], "'explian' does not exist; did you mean the command jaxrun explain?"),
        (["stacks", "--ful"], "there is no option --ful of jaxrun stacks; did you mean --full?"),
        (["trian.py"], "did you mean train.py?"),
        (["."], "is a directory without __main__.py"),
        (["-m", "nosuch"], "no module named 'nosuch'"),
        (["-m", "train.py"], "leave -m out to run the file train.py"),
        (["--env", "1=2", "train.py"], "--env NAME=VALUE is expected, not '1=2'"),
        (["--env", "NOT_SET_ANYWHERE", "train.py"], "NOT_SET_ANYWHERE"),
        (["--env", "JAXRUN_RANK=3", "train.py"], "JAXRUN_RANK"),
        (["--env-file", "missing.env", "train.py"], "missing.env"),
        (["--env-file", "bad.env", "train.py"], "bad.env:2: NAME=VALUE is expected, not 'oops'"),
        (["--run-dir", "x", "--no-run-dir", "train.py"], "contradict"),
        (["-n", "3", "--simulate-hosts", "2", "train.py"], "give a multiple of 2"),
        (["--platform", "cuda", "train.py"], "--platform cuda asks for GPUs, but none is visible"),
        (["--only-rank", "1", "train.py"], "--only-rank names rank 1"),
        (["-n", "2", "--only-rank", "0", "--quiet-ranks", "1", "train.py"], "--only-rank"),
        (["--timeout", "nan", "train.py"], "--timeout must be a positive number"),
        (["--timeout", "0", "train.py"], "--timeout must be a positive number"),
        (["--backend", "smoke", "train.py"], "smoke"),
        (["--", "-m", "train"], "a program cannot be called '-m'"),
        (["explain"], "no job has left its run directory here: there is no jaxrun-runs in"),
        (["explain", "gone"], "jaxrun: RUN_DIR: directory 'gone' does not exist"),
    ],
)
def test_bad_input_is_one_message_and_starts_nothing(here, plans, monkeypatch, capsys, arguments, message):
    (here / "bad.env").write_text("A=1\noops\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = sorted(here.iterdir())
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == ""
    assert not plans and sorted(here.iterdir()) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-N", "2", "train.py"], "-N/--hosts is for --backend mpirun, --backend slurm or --host-rank on each host"),
        (["--backend", "slurm", "-H", "h1", "train.py"], "-H/--host is for --backend mpirun, not for --backend slurm"),
        (["--backend", "mpirun", "--partition", "p", "train.py"], "--partition is for --backend slurm"),
        (["--backend", "slurm", "--simulate-hosts", "2", "train.py"], "--simulate-hosts is for --backend local"),
        (["--backend", "mpirun", "-H", "h1", "--hostfile", "x", "train.py"], "--host h1 and --hostfile x contradict"),
        (["--backend", "mpirun", "--mpi-args", "'a", "train.py"], '--mpi-args "\'a" cannot be split into words'),
        (["--backend", "mpirun", "--hostfile", "none", "train.py"], "none"),
        (["--backend", "mpirun", "train.py"], "say how many with -n"),
        (["--backend", "slurm", "train.py"], "--submit"),
        (["attach", "train.py"], "nothing says which rank this process is; looked for the variables of"),
        (["attach", "--rank", "1", "train.py"], "needs --rank and --size; given is --rank 1"),
        (["attach", "--rank", "2", "--size", "2", "--head", "h:1", "train.py"], "--rank 2 is not in a job of --size 2"),
        (["attach", "--rank", "1", "--size", "2", "train.py"], "--head host:port, alike on all ranks"),
        (["attach", "--rank", "1", "--size", "2", "--head", "h1", "train.py"], "host:port or [fd00::1]:port, not 'h1'"),
        (["attach", "--rank", "1", "--size", "2", "--rendezvous", "none", "train.py"], "none is not a directory"),
    ],
)
def test_an_option_of_another_backend_is_refused_with_one_message(here, plans, monkeypatch, capsys, arguments, message):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "OMPI_", "PMI_"))]:
        monkeypatch.delenv(name)
    before = sorted(here.iterdir())
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err and printed.out == "" and "Traceback" not in printed.err
    assert not plans and sorted(here.iterdir()) == before


def test_without_an_mpirun_the_error_says_what_to_install(here, plans, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(here))
    monkeypatch.setattr(sys, "executable", str(here / "python"))
    assert main(["--backend", "mpirun", "-n", "2", "train.py"]) == 69
    assert "apt-get install openmpi-bin" in capsys.readouterr().err and not plans


@pytest.mark.parametrize(
    ("words", "requeue", "program"),
    [
        (["--requeue", "train.py", "--requeue=1"], "scontrol", ("train.py", "--requeue=1")),
        (["--requeue=chain:8", "train.py", "--requeue=1"], "chain:8", ("train.py", "--requeue=1")),
        (["--requeue=scontrol", "-n", "2", "train.py"], "scontrol", ("train.py",)),
        (["train.py", "--requeue=chain:8"], "", ("train.py", "--requeue=chain:8")),
    ],
)
def test_a_flag_may_have_a_value_and_takes_no_word_of_the_program(here, monkeypatch, words, requeue, program):
    made = []
    monkeypatch.setattr("jaxrun.backends.make_plan", lambda job, environ, job_id: made.append(job) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["--backend", "slurm", *words])
    assert [(job.requeue, job.program) for job in made] == [(requeue, program)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requeue=often"], "--requeue must be scontrol, or chain:N for N jobs"),
        (["--requeue=chain:0"], "not 'chain:0'"),
        (["--requeue", "--no-run-dir"], "--requeue needs the run directory"),
        (["--requeue=chain:2", "--sbatch", "job.sh"], "take --submit in place of --sbatch"),
    ],
)
def test_a_job_that_could_not_go_on_is_refused(here, plans, capsys, words, message):
    assert main(["--backend", "slurm", *words, "train.py"]) == 2
    assert message in capsys.readouterr().err and not (here / "job.sh").exists()
    assert main(["--requeue", "train.py"]) == 2
    assert "--requeue is for --backend slurm" in capsys.readouterr().err


def test_a_batch_script_is_written_and_nothing_started(here, plans, capsys):
    assert main(["--backend", "slurm", "-N", "2", "--sbatch", "job.sh", "train.py", "--lr", "0.1"]) == 0
    script = (here / "job.sh").read_text()
    assert "#SBATCH --nodes=2" in script and script.rstrip().endswith("--backend slurm -N 2 train.py --lr 0.1")
    assert "--sbatch" not in script.splitlines()[-1] and not plans


def test_attach_has_only_options_that_it_uses(here, capsys):
    assert main(["attach", "-n", "4", "train.py"]) == 2
    assert "there is no option -n of jaxrun attach" in capsys.readouterr().err
    assert main(["attach", "--help-all"]) == 0
    assert "mpirun|srun ... jaxrun attach" in capsys.readouterr().out


def test_dry_run_prints_the_plan_and_starts_nothing(here, plans, capsys):
    before = sorted(here.iterdir())
    assert main(["--dry-run", "-n", "2", "train.py", "a b"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{sys.executable} -m jaxrun_runtime train.py 'a b'\n")
    assert "\nrank  host" in printed and not plans and sorted(here.iterdir()) == before


def test_an_error_of_the_run_ends_in_its_exit_code(here, monkeypatch, capsys):
    def refuse(plan, environ, early_server):
        raise UsageError("the run directory is taken")

    monkeypatch.setattr("jaxrun.supervisor.run.run", refuse)
    assert main(["train.py"]) == 2
    assert capsys.readouterr().err == "jaxrun: the run directory is taken\n"


def test_help_fits_one_screen(capsys):
    assert main(["-h"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert lines[0] == "Usage: jaxrun [OPTIONS] PROGRAM [ARGS]..."
    assert sum(line.startswith("  -") for line in lines) == 6
    assert sum(line.startswith("  jaxrun ") for line in lines) == 4


def test_help_all_shows_every_option_and_every_exit_code(capsys):
    from jaxrun import errors
    from jaxrun.cli.options import parameters

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
