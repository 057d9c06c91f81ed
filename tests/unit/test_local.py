"""The local backend's plan as a value: placement, devices, cores and variables of each rank."""

import re

import pytest

from jaxrun.errors import UsageError
from jaxrun.spec.backends.local import plan
from jaxrun.spec.job.devices import Gpus, Machine
from jaxrun.spec.job.job import Job

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
        (_EIGHT, {}, {"compile": "once"}, "--compile once is for cpu: sharing was not tried on cuda; leave it out"),
        (_CPU, {"JAX_PLATFORMS": "METAL,cpu"}, {}, "names 'METAL'; give one of cpu, gpu, cuda, rocm, tpu"),
    ],
)
def test_what_the_machine_has_not_or_settings_contradict_is_refused(machine, environ, request_, message):
    with pytest.raises(UsageError, match=message):
        _plan(machine, environ, **request_)


def test_amd_gpus_are_taken_where_there_are_no_others():
    machine = Machine("box", (0,), {"cuda": Gpus(), "rocm": Gpus(("AMD GPU",) * 2, "kfd")})
    made = _plan(machine)
    assert made.set_env["JAX_PLATFORMS"] == "rocm,cpu" and len(made.workers) == 2
    assert not made.fork and "rocm devices have not been tried after a fork" in made.notes[-1]


def test_gpus_that_jax_cannot_use_are_left_alone_and_mentioned():
    machine = Machine("box", (0,), _EIGHT.gpus, cuda_plugin=False)
    made = _plan(machine)
    assert made.job.platform == "cpu" and "8 NVIDIA GPUs are visible" in made.notes[0]
    assert _plan(machine, platform="cuda").job.platform == "cuda"


def test_without_gpus_the_default_is_one_process_per_host():
    made = _plan(_TPU)
    assert (made.job.platform, len(made.workers), made.local_devices) == ("tpu", 1, None)
    assert [(w.host, w.local_size) for w in _plan().workers] == [("box", 1)]
    assert [(w.host, w.local_size) for w in _plan(simulated_hosts=3).workers] == [("h1", 1), ("h2", 1), ("h3", 1)]


def test_gpus_are_left_alone_if_the_cpu_was_requested():
    made = _plan(_EIGHT, platform="cpu", processes=2)
    assert made.set_env["JAX_PLATFORMS"] == "cpu" and not made.notes
    assert [worker.local_device_ids for worker in made.workers] == [(), ()]


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
    assert env["PYTHONSAFEPATH"] == "1"


def test_workers_are_forked_unless_something_prevents_it():
    assert _plan().fork and not _plan().notes
    made = _plan(no_fork="--no-fork was given")
    assert not made.fork and made.notes == ("every worker is a fresh interpreter: --no-fork was given",)
    assert _plan(_EIGHT).fork and not _plan(_EIGHT).notes


@pytest.mark.parametrize("option", ["quiet_ranks", "only_ranks"])
def test_ranks_that_the_job_has_not_are_refused(option):
    assert _plan(processes=4, **{option: (range(4),)})
    with pytest.raises(UsageError, match="names rank 4, but the ranks of this job are 0 to 3"):
        _plan(processes=4, **{option: (range(2), range(3, 5))})


def test_xla_has_two_threads_for_each_simulated_device():
    assert _plan(devices_per_process=8).set_env["NPROC"] == "16"
    assert _plan(devices_per_process=2).set_env["NPROC"] == "4"
    assert "NPROC" not in _plan(devices_per_process=1).set_env
    assert "NPROC" not in _plan(environ={"NPROC": "3"}, devices_per_process=4).set_env
    assert "NPROC" not in _plan(_EIGHT, devices_per_process=4).set_env
