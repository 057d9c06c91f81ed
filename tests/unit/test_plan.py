"""A plan: what people and programs see of it, the limits that it would exceed, and the table of backends."""

import json
import resource
import shlex
from importlib import import_module

import pytest
from msgspec.structs import asdict, fields

from jaxrun.cli.click_options import parameters
from jaxrun.cli.main import main
from jaxrun.controller.supervisor.run_job import check_limits
from jaxrun.errors import UsageError
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.settings import WorkerSettings
from jaxrun.records.job_file import format_job_file
from jaxrun.records.rundir.recorded_files import RecordedLauncher
from jaxrun.spec.backends import ATTACH, BACKENDS, HOSTS, backends_of, understands
from jaxrun.spec.backends.planning import make_plan
from jaxrun.spec.engines import ENGINES, HOST_OPTIONS, EngineRow
from jaxrun.spec.engines.rank_info import RankInfo, detect_rank_info
from jaxrun.spec.engines.slurm import SLURM
from jaxrun.spec.job.combinations import check_options
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import options_of
from jaxrun.spec.job.plan import LaunchCommand, Plan, Worker
from jaxrun.spec.job.render import plan_summary, render_plan


def _worker(rank, **more):
    return Worker(rank=rank, local_rank=rank % 2, local_size=2, host=f"h{rank // 2 + 1}", **more)


def _plan(**changes):
    values = {
        "job": Job(program=("train.py",), processes=4, platform="cpu", simulated_hosts=2),
        "job_id": "ab" * 16,
        "workers": tuple(map(_worker, range(4))),
        "argv": ("/opt/my python/bin/python", "/opt/jaxrun_runtime", "train.py", "it's", "a\nb"),
        "set_env": {"JAX_PLATFORMS": "cpu", "HF_TOKEN": "hunter2", "https_proxy": "http://me:hunter2@p:1"},
        "unset_env": ("JAX_PROCESS_ID",),
        "local_devices": 2,
        "device_names": (),
        "fork": True,
        "notes": ("a remark",),
    }
    return Plan(**{**values, **changes})


def test_a_command_to_paste_into_a_shell_and_a_table_of_the_workers_are_shown():
    made = _plan()
    command, table = render_plan(made, {}).split("\n\n4 processes")
    assert shlex.split(command) == list(made.argv)
    lines = table.splitlines()
    start = lines.index("rank  host  local rank  devices  cores")
    assert lines[start + 1 : start + 5] == [
        "0     h1    0 of 2      cpu x 2  all",
        "1     h1    1 of 2      cpu x 2  all",
        "2     h2    0 of 2      cpu x 2  all",
        "3     h2    1 of 2      cpu x 2  all",
    ]


def test_the_gpus_of_a_worker_are_named():
    workers = tuple(_worker(rank, local_device_ids=(2 * rank, 2 * rank + 1), cpus=(rank,)) for rank in range(2))
    job = Job(program=("p",), platform="cuda")
    text = render_plan(_plan(job=job, workers=workers, device_names=("A", "A", "A", "B")), {})
    assert "cuda:0, cuda:1 (A)" in text and "cuda:2, cuda:3 (A, B)" in text


def test_variables_that_change_are_shown_once_or_rank_by_rank():
    lines = [line.strip() for line in render_plan(_plan(), {}).splitlines()]
    assert lines.count("JAXRUN_SIZE=4") == 1
    assert "JAXRUN_HOST=h2 JAXRUN_LOCAL_RANK=1 JAXRUN_RANK=3 JAX_PROCESS_ID=3" in lines
    assert any("only at the start" in line and "JAXRUN_CHANNEL_FD" in line for line in lines)
    text = render_plan(_plan(), {"JAX_PLATFORMS": "cpu", "HOME": "/root"})
    assert "JAX_PLATFORMS" not in text and "/root" not in text
    assert "removes: JAX_PROCESS_ID" in text and "note: a remark" in text


def job_file(plan):
    return format_job_file(plan, RecordedLauncher())


@pytest.mark.parametrize("show", [lambda plan: render_plan(plan, {}), job_file], ids=["render", "job_file"])
def test_secrets_are_not_shown(show):
    text = show(_plan())
    assert "hunter2" not in text and "HF_TOKEN" in text and "***" in text


def test_a_plan_is_json_with_names_that_are_no_unicode_too():
    content = json.loads(job_file(_plan(argv=("python", "\udcff"))))
    assert content["argv"] == ["python", "\udcff"]
    assert (content["processes"], content["hosts"], content["options"]["platform"]) == (4, ["h1", "h2"], "cpu")
    assert content["workers"][3]["local_rank"] == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "4 processes x 2 devices (cpu) on 2 simulated hosts"),
        ({"job": Job(program=("p",), platform="cuda")}, "4 processes x 2 devices (cuda) on this machine"),
        ({"workers": (_worker(0),), "local_devices": 1}, "1 process x 1 device (cpu) on 2 simulated hosts"),
        ({"workers": (_worker(0),), "local_devices": None}, "1 process (cpu) on 2 simulated hosts"),
    ],
)
def test_the_shape_of_a_job_is_one_line(changes, expected):
    assert plan_summary(_plan(**changes)) == expected


def test_workers_settings_are_equal_in_the_job_in_their_environment_and_in_job_json():
    told = WorkerSettings(
        lockstep="off", make_mesh="jax", compile="each", compile_cache="/c", stdin="none",
        verbose=True, torch_env=True, expand_args=True, pdb=True, init_timeout=5.0, coordinator_tls="on"
    )  # fmt: skip
    other = WorkerSettings(debug_post_mortem=True)  # contradicts pdb
    third = WorkerSettings(keep_survivors=True)  # contradicts both
    names = {
        field.name
        for field in fields(told)
        for one in (told, other, third)
        if getattr(one, field.name) != field.default
    }
    assert names == {field.name for field in fields(WorkerSettings)}
    worker = _worker(0, local_device_ids=(3,), cpus=(1,), simulated_boot_id="x")
    for settings in (WorkerSettings(), other, third, told):
        plan = _plan(job=Job(program=("p",), **asdict(settings)), workers=(worker,))
        assert plan.job.worker_settings == settings
        env = plan.worker_env(worker, run_dir="/runs/1")
        assert WorkerEnv.from_env({**plan.base_env({}), **env.to_env()}) == env
    assert (env.size, env.local_device_ids, env.cpus, env.run_dir) == (1, (3,), (1,), "/runs/1")
    assert asdict(told).items() <= asdict(env).items()
    assert asdict(told).items() <= json.loads(job_file(plan))["options"].items()


# ---- limits that a job would exceed are told before anything is made


def _plan_of(size, *, remote):
    workers = tuple(Worker(rank, rank, size, "h1") for rank in range(size))
    return _plan(workers=workers, launch_command=LaunchCommand(SLURM, "srun", ("srun",)) if remote else None)


@pytest.fixture
def limits(monkeypatch):
    """limits(SOFT, HARD) sets the limit of open files that is seen; returns those that are set then."""
    made = []

    def pretend(soft, hard):
        monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
        monkeypatch.setattr(resource, "setrlimit", lambda which, pair: made.append(pair))
        return made

    return pretend


@pytest.mark.parametrize(
    ("size", "remote", "soft", "hard", "made"),
    [
        (4, False, 1024, 4096, []),
        (100, False, 1024, 4096, [(1264, 4096)]),
        (100, False, 1024, 1100, [(1100, 1100)]),  # enough for those that run
        (100, False, 1024, resource.RLIM_INFINITY, [(1264, resource.RLIM_INFINITY)]),
        (100, False, resource.RLIM_INFINITY, resource.RLIM_INFINITY, []),
        (1000, True, 1024, 4096, [(3064, 4096)]),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_needed(limits, size, remote, soft, hard, made):
    found = limits(soft, hard)
    check_limits(_plan_of(size, remote=remote))
    assert found == made


@pytest.mark.parametrize(
    ("size", "remote", "message"),
    [
        (1000, False, "-n 1000 takes 7064 open files at least, but only 4096 are allowed here; start fewer"),
        (5000, True, "5000 agents take 5064 open files at least, but only 4096 are allowed here"),
    ],
)
def test_a_limit_that_cannot_be_raised_is_reported(limits, size, remote, message):
    made = limits(1024, 4096)
    with pytest.raises(UsageError, match=message):
        check_limits(_plan_of(size, remote=remote))
    assert not made


def test_more_processes_than_the_machine_can_run_leave_nothing_behind(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    (tmp_path / "train.py").touch()
    (tmp_path / "pid_max").write_text("32768\n")
    monkeypatch.setattr("jaxrun.controller.supervisor.run_job._SYSTEM_LIMITS", (str(tmp_path / "pid_max"),))
    before = sorted(tmp_path.iterdir())
    assert main(["-n", "9999", "train.py"]) == 2
    assert "-n 9999 takes 39996 threads at least, but this machine runs no more than 32768" in capsys.readouterr().err
    assert main(["-n", "99999999", "train.py"]) == 2
    assert "-n/--processes must be 1000000 or less, not 99999999" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


# ---- the table of backends: what --backend offers, which options each understands, and how another is added


@pytest.fixture
def jsm(monkeypatch, tmp_path):
    """An engine beside jaxrun's own, by its file and one row in the table; gives the environment of its job."""
    row = EngineRow("jsm_example:JSM", ("JSM_NAMESPACE_RANK",), options=HOST_OPTIONS)
    monkeypatch.setitem(ENGINES, "jsm", row)
    monkeypatch.setitem(BACKENDS, "jsm", backends_of({"jsm": row})["jsm"])
    monkeypatch.syspath_prepend(__file__.rpartition("/")[0])
    (tmp_path / "jsrun").symlink_to("/bin/true")
    return {"PATH": str(tmp_path), "LSB_JOBID": "7"}


def test_every_backend_of_the_table_has_a_plan_and_understands_what_options_need():
    needed = {option.needs for _, option in options_of(Job)}
    for backend in BACKENDS.values():
        assert callable(import_module(backend.module).plan) and set(backend.options) <= needed
    for _, option in options_of(Job):
        assert any(understands(backend, option) for backend in (*BACKENDS, ATTACH, HOSTS))


def test_a_new_engine_is_one_file_and_one_row(jsm, tmp_path, monkeypatch, capsys):
    job = Job(program=("train.py",), backend="jsm", hosts=2, processes_per_host=2)
    check_options(job)
    plan = make_plan(job, jsm, "0123456789abcdef" * 2)
    assert len(plan.workers) == 4 and plan.launch_command.title == "jsrun in LSF job 7"
    assert detect_rank_info({"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4"}) == RankInfo("jsm", 1, 4)
    options = {parameter.name: parameter for parameter in parameters()}
    choices = options["backend"].declared.kind.choices
    assert options["backend"].metavar == "local|mpirun|ssh|slurm|pbs|sge|kubernetes|jsm" and "jsm" in choices
    assert options["hosts"].help.startswith(
        "How many hosts to run on, with mpirun, ssh, slurm, pbs, sge, kubernetes, jsm or --host-rank"
    )
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name, value in jsm.items():
        monkeypatch.setenv(name, value)
    assert main(["--backend", "jsm", "-n", "3", "--dry-run", "train.py"]) == 0
    page = capsys.readouterr().out
    assert page.startswith(f"{tmp_path}/jsrun --nrs 3 --tasks_per_rs 1 ")
    assert "3 processes by jsrun in LSF job 7" in page
