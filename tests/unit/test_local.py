"""The plans of the local backend and of one command per host: placement, devices, cores and variables of each rank."""

import re

import pytest

from jaxrun.cli.main import main
from jaxrun.cli.make_job import make_job, without_effect
from jaxrun.errors import UsageError
from jaxrun.protocol.probe_messages import Gpus, Machine
from jaxrun.spec.backends.local import plan
from jaxrun.spec.engines import by_hand
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.render import plan_summary

_ID = "0123456789abcdef" * 2
_CPU = Machine("box", cores=(0, 1, 2, 3), gpus={"cuda": Gpus(), "rocm": Gpus()})
_EIGHT = Machine("box", tuple(range(64)), {"cuda": Gpus(("NVIDIA H200",) * 8, "NVML"), "rocm": Gpus()})


def _plan(machine=_CPU, environ=None, **request):
    return plan(Job(program=("train.py",), **request), environ or {}, _ID, machine)


@pytest.mark.parametrize(
    ("processes", "devices", "ordinals"),
    [
        (8, 1, [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
        (1, 8, [(0, 1, 2, 3, 4, 5, 6, 7)]),
        (4, 2, [(0, 1), (2, 3), (4, 5), (6, 7)]),
        (None, None, [(0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,)]),
        (None, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, None, [(0,), (1,)]),
    ],
)
def test_eight_gpus_are_shared_out_by_ordinal(processes, devices, ordinals):
    made = _plan(_EIGHT, {"CUDA_VISIBLE_DEVICES": "8,9,10,11,12,13,14,15"}, processes=processes,
                 devices_per_process=devices)  # fmt: skip
    assert [worker.local_device_ids for worker in made.workers] == ordinals
    assert [worker.local_rank for worker in made.workers] == list(range(len(ordinals)))
    assert made.local_devices == len(ordinals[0])
    assert made.set_env["JAX_PLATFORMS"] == "cuda,cpu"
    assert not {"CUDA_VISIBLE_DEVICES", "JAX_NUM_CPU_DEVICES"} & {*made.set_env, *made.unset_env}
    assert made.fork and not any(worker.cpus for worker in made.workers)
    assert (made.job.platform, made.job.processes) == ("cuda", len(ordinals))


def test_gpus_are_dealt_over_simulated_hosts_and_those_that_stay_idle_are_mentioned():
    made = _plan(_EIGHT, simulated_hosts=2)
    placed = [(worker.host, worker.local_rank, worker.local_device_ids) for worker in made.workers]
    assert placed[3:5] == [("h1", 3, (3,)), ("h2", 0, (4,))] and not any("idle" in note for note in made.notes)
    assert _plan(_EIGHT, processes=6).notes[0].startswith("2 of 8 visible GPUs stay idle")


_ONE = Machine("box", (0,), {"cuda": Gpus(("H",), "nvidia-smi", "CUDA_VISIBLE_DEVICES=3")})
_HIDDEN = Machine("box", (0,), {"cuda": Gpus((), "NVML", "CUDA_VISIBLE_DEVICES=")})
_TPU = Machine("box", (0,), {"cuda": Gpus(), "rocm": Gpus()}, tpu=True)
_FLAGS = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}


@pytest.mark.parametrize(
    ("machine", "environ", "request_", "message"),
    [
        (_EIGHT, {}, {"processes": 9}, r"-n 9 x -d 1 takes 9 GPUs, but 8 are visible \(counted by NVML"),
        (_EIGHT, {}, {"processes": 4, "devices_per_process": 4}, "-n 4 x -d 4 takes 16 GPUs, but 8 are visible"),
        (_EIGHT, {}, {"devices_per_process": 9}, "-n 1 x -d 9 takes 9 GPUs, but 8"),
        (_ONE, {}, {"processes": 2}, r"but 1 is visible \(counted by nvidia-smi, CUDA_VISIBLE_DEVICES=3\)"),
        (_HIDDEN, {}, {"platform": "cuda"}, "--platform cuda asks for GPUs, but none is .*CUDA_VISIBLE_DEVICES="),
        (_CPU, {"JAX_PLATFORMS": "rocm,cpu"}, {}, "JAX_PLATFORMS=rocm asks for GPUs, but none"),
        (_TPU, {}, {"processes": 2}, "one process, with all chips"),
        (_TPU, {}, {"devices_per_process": 1}, "one process, with all chips"),
        (_CPU, {}, {"platform": "tpu"}, "shows none"),
        (_CPU, {}, {"processes": 3, "simulated_hosts": 2}, r"-n 3 processes.*give a multiple of 2, such as -n 4"),
        (_CPU, _FLAGS, {"devices_per_process": 2}, "-d 2 contradicts XLA_FLAGS.*=4; leave one of them out"),
        (_CPU, {}, {"devices_per_process": 2, "env": _FLAGS}, "contradicts XLA_FLAGS"),
        (_CPU, {}, {"processes": 4, "only_ranks": (range(5),)}, "names rank 4, but the ranks of this job are 0 to 3"),
        (_CPU, {"JAX_PLATFORMS": "METAL,cpu"}, {}, "names 'METAL'; give one of cpu, gpu, cuda, rocm, tpu"),
    ],
)
def test_what_the_machine_has_not_or_settings_contradict_is_refused(machine, environ, request_, message):
    with pytest.raises(UsageError, match=message):
        _plan(machine, environ, **request_)


def test_amd_gpus_are_taken_where_there_are_no_others():
    made = _plan(Machine("box", (0,), {"cuda": Gpus(), "rocm": Gpus(("AMD GPU",) * 2, "kfd")}))
    assert made.set_env["JAX_PLATFORMS"] == "rocm,cpu" and len(made.workers) == 2
    assert not made.fork and "rocm devices have not been tried after a fork" in made.notes[-1]


def test_gpus_that_jax_cannot_use_or_that_were_not_asked_for_are_left_alone():
    machine = Machine("box", (0,), _EIGHT.gpus, cuda_plugin=False)
    made = _plan(machine)
    assert made.job.platform == "cpu" and "8 NVIDIA GPUs are visible" in made.notes[0]
    assert _plan(machine, platform="cuda").job.platform == "cuda"
    made = _plan(_EIGHT, platform="cpu", processes=2)
    assert made.set_env["JAX_PLATFORMS"] == "cpu" and not made.notes
    assert [worker.local_device_ids for worker in made.workers] == [(), ()]


def test_without_gpus_the_default_is_one_process_per_host():
    made = _plan(_TPU)
    assert (made.job.platform, len(made.workers), made.local_devices) == ("tpu", 1, None)
    assert [(w.host, w.local_size) for w in _plan().workers] == [("box", 1)]
    assert [(w.host, w.local_size) for w in _plan(simulated_hosts=3).workers] == [("h1", 1), ("h2", 1), ("h3", 1)]


@pytest.mark.parametrize(("hosts", "each", "cores"), [(1, 1, 1), (1, 5, 2), (3, 1, 12), (3, 2, 4)])
def test_simulated_hosts_hold_equal_blocks_of_ranks(hosts, each, cores):
    made = _plan(Machine("box", tuple(range(cores))), processes=hosts * each, simulated_hosts=hosts)
    assert [worker.rank for worker in made.workers] == list(range(hosts * each))
    assert [worker.host for worker in made.workers] == [f"h{h + 1}" for h in range(hosts) for _ in range(each)]
    assert [worker.local_rank for worker in made.workers] == list(range(each)) * hosts
    assert made.hosts == tuple(f"h{h + 1}" for h in range(hosts))
    assert len({worker.simulated_boot_id for worker in made.workers}) == hosts


def test_a_simulated_boot_id_is_valid_and_belongs_to_job_and_host():
    (first, second), (other, _) = (
        [worker.simulated_boot_id for worker in plan(Job(program=("p",), simulated_hosts=2), {}, job_id, _CPU).workers]
        for job_id in (_ID, _ID[::-1])
    )
    assert re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", first)
    assert len({first, second, other}) == 3
    assert _plan(simulated_hosts=2).workers[0].simulated_boot_id == first
    assert _plan().workers[0].simulated_boot_id == ""


def test_workers_stay_on_one_core_only_when_they_outnumber_the_cores():
    machine = Machine("box", (2, 3))
    assert [w.cpus for w in _plan(machine, processes=3).workers] == [(2,), (3,), (2,)]
    assert [w.cpus for w in _plan(machine, processes=2).workers] == [(), ()]


@pytest.mark.parametrize(
    ("environ", "devices", "count", "variable"),
    [
        ({}, None, 1, None),
        ({}, 3, 3, "3"),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=4 --x"}, None, 4, None),
        (_FLAGS, 4, 4, "4"),
        ({"JAX_NUM_CPU_DEVICES": "5"}, None, 5, None),
        ({"JAX_NUM_CPU_DEVICES": "5", **_FLAGS}, None, 5, None),
        ({"JAX_NUM_CPU_DEVICES": "5"}, 2, 2, "2"),
        ({"XLA_FLAGS": "--xla_other=4"}, 2, 2, "2"),
    ],
)
def test_simulated_devices_come_from_d_or_from_the_users_settings(environ, devices, count, variable):
    made = _plan(environ=environ, devices_per_process=devices)
    assert (made.local_devices, made.set_env.get("JAX_NUM_CPU_DEVICES")) == (count, variable)
    assert "XLA_FLAGS" not in {*made.set_env, *made.unset_env}


@pytest.mark.parametrize(
    ("machine", "value", "platform", "expected"),
    [
        (_CPU, None, "auto", "cpu"),
        (_CPU, "cpu", "auto", None),
        (_CPU, "cpu,cuda", "auto", None),
        (_CPU, "cuda", "cpu", "cpu"),
        (_CPU, "", "auto", "cpu"),
        (_EIGHT, "gpu", "auto", "cuda,cpu"),
        (_EIGHT, "cuda", "auto", None),
        (_EIGHT, "cuda,cpu", "auto", None),
    ],
)
def test_the_platform_is_always_explicit_and_the_users_variable_counts_like_the_option(
    machine, value, platform, expected
):
    made = _plan(machine, {} if value is None else {"JAX_PLATFORMS": value}, platform=platform)
    assert (made.set_env.get("JAX_PLATFORMS"), made.job.platform) == (expected, "cpu" if machine is _CPU else "cuda")


def test_variables_of_the_user_reach_the_workers_and_stale_ones_do_not():
    environ = {"JAX_PROCESS_ID": "7", "JAXRUN_RANK": "7", "HOME": "/h", "SLURM_PROCID": "7", "A": "1"}
    made = _plan(environ=environ, env={"A": "2", "OMP_NUM_THREADS": "9"})
    env = made.base_env(environ)
    assert (env["A"], env["OMP_NUM_THREADS"], env["HOME"], env["SLURM_PROCID"]) == ("2", "9", "/h", "7")
    assert not {"JAX_PROCESS_ID", "JAXRUN_RANK"} & set(env)
    assert "PYTHONSAFEPATH" not in env


def test_workers_are_forked_unless_something_prevents_it():
    assert _plan().fork and not _plan().notes
    made = _plan(no_fork="--no-fork was given")
    assert not made.fork and made.notes == ("every worker is a fresh interpreter: --no-fork was given",)
    assert _plan(_EIGHT).fork and not _plan(_EIGHT).notes


def test_xla_has_two_threads_for_each_simulated_device():
    assert _plan(devices_per_process=8).set_env["NPROC"] == "16"
    assert _plan(devices_per_process=2).set_env["NPROC"] == "4"
    assert "NPROC" not in _plan(devices_per_process=1).set_env
    assert "NPROC" not in _plan(environ={"NPROC": "3"}, devices_per_process=4).set_env
    assert "NPROC" not in _plan(_EIGHT, devices_per_process=4).set_env


# ---- one command per host

_FOUR = Machine("box", (0, 1), {"cuda": Gpus(("NVIDIA H200",) * 4, "NVML"), "rocm": Gpus()}, cuda_plugin=True)


def _plan_of_hosts(machine=_CPU, **request):
    return by_hand.plan(Job(program=("train.py",), backend="hosts", **request), {}, _ID, machine)


@pytest.mark.parametrize(
    ("request_", "machine", "ranks", "size"),
    [
        ({"hosts": 2, "host_rank": 0, "processes": 8}, _CPU, "0-3", 8),
        ({"hosts": 2, "host_rank": 1, "processes": 8}, _CPU, "4-7", 8),
        ({"hosts": 3, "host_rank": 2, "processes_per_host": 2}, _CPU, "4-5", 6),
        ({"hosts": 3, "host_rank": 2}, _CPU, "2-2", 3),
        ({"hosts": 2, "host_rank": 1}, _FOUR, "4-7", 8),
        ({"hosts": 2, "host_rank": 1, "devices_per_process": 4}, _FOUR, "1-1", 2),
    ],
)
def test_each_host_starts_the_agent_of_its_own_ranks(request_, machine, ranks, size):
    made = _plan_of_hosts(machine, **request_)
    assert made.launch_command.argv[-2:] == (ranks, str(size)) and len(made.workers) == size
    first, last = map(int, ranks.split("-"))
    own = [worker.rank for worker in made.workers if worker.host == f"--host-rank {request_['host_rank']}"]
    assert own == list(range(first, last + 1)) and made.placement.agents[first] == tuple(own)
    assert sorted(rank for ranks in made.placement.agents.values() for rank in ranks) == list(range(size))
    assert f"on {request_['hosts']} hosts, with a command on each" in plan_summary(made)


def test_the_options_become_a_job_of_this_backend():
    job = make_job({"program": ("p",), "hosts": 2, "host_rank": 0, "head": "h1:7777", "processes_per_node": 4}, {})
    assert (job.backend, job.host_rank, job.head, job.processes_per_host) == ("hosts", 0, "h1:7777", 4)
    values = {"program": ("p",), "hosts": 2, "host_rank": 0, "backend": "slurm", "partition": "gpu"}
    assert without_effect(values, {"backend", "partition"}, {}) == {"backend", "partition"}


def test_in_a_pod_the_hosts_wait_for_ten_minutes_unless_another_time_is_said():
    by_hand = {"program": ("p",), "hosts": 2, "host_rank": 0}
    pod = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    assert make_job(by_hand, pod).init_timeout == make_job({"program": ("p",), "backend": "attach"}, pod).init_timeout
    assert make_job(by_hand, pod).init_timeout == 600.0
    assert make_job({**by_hand, "init_timeout": 7.0}, pod).init_timeout == 7.0
    assert make_job(by_hand, {}).init_timeout == make_job({"program": ("p",)}, pod).init_timeout == 120.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--host-rank", "1"], "--host-rank 1 needs --hosts, the number of hosts"),
        (["--host-rank", "2", "--hosts", "2"], "--host-rank 2 is not one of --hosts 2, whose numbers are 0 to 1"),
        (["--head", "h1:7777"], "--head h1:7777 needs --host-rank"),
        (["--host-rank", "0", "--hosts", "2", "-n", "3"], "-n 3 processes cannot be divided equally among --hosts 2"),
        (
            ["--host-rank", "0", "--hosts", "2", "-n", "4", "--processes-per-host", "1"],
            "-n 4 is not -N 2 x --processes-per-host 1",
        ),
        (["--host-rank", "0", "--hosts", "2", "--head", "h1"], "host:port or [fd00::1]:port, not 'h1'"),
        (["--host-rank", "0", "--hosts", "2", "--head", "no..where:7"], "'no..where' in 'no..where:7' is not a host"),
        (["--host-rank", "1", "--hosts", "2", "--rendezvous", "gone"], "--rendezvous gone is not a directory"),
        (["--host-rank", "0", "--hosts", "2", "--backend", "slurm"], "--host-rank is for hosts without --backend"),
        (
            ["--host-rank", "0", "--hosts", "2", "-H", "h1"],
            "--backend pbs or --backend sge, not for --host-rank",
        ),
        (["--hosts", "2"], "--backend sge, --backend kubernetes or --host-rank on each"),
        (["--rendezvous", "."], "--rendezvous is for --host-rank on each host, not for --backend local"),
    ],
)
def test_what_does_not_fit_together_is_one_message(tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "train.py").write_text("raise SystemExit('this program must not run')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main([*words, "train.py"]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_one_host_is_this_machine():
    assert make_job({"program": ("p",), "hosts": 1, "processes_per_node": 3}, {}).processes == 3
