"""A plan shows itself to people and to programs, and keeps secrets from both."""

import json
import shlex

import pytest

from jaxrun.job.job import Job
from jaxrun.job.plan import Plan, Worker, to_json
from jaxrun.job.render import plan_summary, render_plan
from jaxrun.protocol.env import WorkerEnv


def _worker(rank, **more):
    return Worker(rank=rank, local_rank=rank % 2, local_size=2, host=f"h{rank // 2 + 1}", **more)


def _plan(**changes):
    values = {
        "job": Job(program=("train.py",), processes=4, platform="cpu", simulated_hosts=2),
        "job_id": "ab" * 16,
        "workers": tuple(map(_worker, range(4))),
        "argv": ("/opt/my python/bin/python", "-m", "jaxrun_runtime", "train.py", "it's", "a\nb"),
        "set_env": {"JAX_PLATFORMS": "cpu", "HF_TOKEN": "hunter2", "https_proxy": "http://me:hunter2@p:1"},
        "unset_env": ("JAX_PROCESS_ID",),
        "local_devices": 2,
        "device_names": (),
        "fork": True,
        "notes": ("a remark",),
    }
    return Plan(**{**values, **changes})


def test_the_command_can_be_pasted_into_a_shell():
    made = _plan()
    command = render_plan(made, {}).split("\n\n4 processes")[0]
    assert shlex.split(command) == list(made.argv)


def test_the_workers_stand_in_a_table():
    lines = render_plan(_plan(), {}).splitlines()
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


def test_variables_that_are_alike_stand_once_and_the_others_rank_by_rank():
    lines = [line.strip() for line in render_plan(_plan(), {}).splitlines()]
    assert lines.count("JAXRUN_SIZE=4") == 1
    assert "JAXRUN_HOST=h2 JAXRUN_LOCAL_RANK=1 JAXRUN_RANK=3 JAX_PROCESS_ID=3" in lines
    assert any("only at the start" in line and "JAXRUN_CHANNEL_FD" in line for line in lines)


def test_only_what_changes_is_shown():
    text = render_plan(_plan(), {"JAX_PLATFORMS": "cpu", "HOME": "/root"})
    assert "JAX_PLATFORMS" not in text and "/root" not in text
    assert "takes away: JAX_PROCESS_ID" in text and "note: a remark" in text


@pytest.mark.parametrize("show", [lambda plan: render_plan(plan, {}), to_json], ids=["render", "to_json"])
def test_secrets_are_not_shown(show):
    text = show(_plan())
    assert "hunter2" not in text and "HF_TOKEN" in text and "***" in text


def test_a_plan_is_json_with_names_that_are_no_unicode_too():
    content = json.loads(to_json(_plan(argv=("python", "\udcff"))))
    assert content["argv"] == ["python", "\udcff"]
    assert (content["processes"], content["hosts"], content["platform"]) == (4, ["h1", "h2"], "cpu")
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


def test_worker_settings_reach_it_through_its_environment():
    made = _plan(workers=(_worker(0, local_device_ids=(3,), cpus=(1,), simulated_boot_id="x"),))
    env = made.worker_env(made.workers[0], run_dir="/runs/1", channel_fd=5, stacks_fd=6, flight_fd=7)
    assert WorkerEnv.from_env({**made.base_env({}), **env.to_env()}) == env
    assert (env.size, env.local_device_ids, env.cpus, env.run_dir) == (1, (3,), (1,), "/runs/1")
