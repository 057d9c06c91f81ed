"""The errors for processes that differ, or that are not the job that was requested."""

import pytest
from msgspec.structs import replace

from jaxrun.controller.head.consistency import Expected, check_device_reports, compare_hellos, describe_missing_ranks
from jaxrun.protocol.worker_messages import DeviceReport, Hello

JOB_ID = "ab" * 16
SAME = "every process must run the same program with the same versions and settings."


def each(rank):
    return f"h{rank + 1}"


def hellos(count, host=lambda rank: "h1", changes=None):
    """`changes`: by rank."""
    versions, environment = {"python": "3.11.7", "jaxlib": "0.10.2"}, {"XLA_FLAGS": "--xla_a"}
    made = {r: Hello(r, host(r), 1000 + r, 1.0, 0.0, versions, "0123456789abcdef", environment) for r in range(count)}
    return {rank: replace(hello, **(changes or {}).get(rank, {})) for rank, hello in made.items()}


def reports(count, changes=None, *, devices=1, platform="cpu", kinds=("cpu",)):
    given = {"process_count": count, "local_devices": devices, "global_devices": count * devices, "platform": platform}
    given |= {"device_kinds": kinds, "nonce": JOB_ID, "joined_at": 1.0, "time": 1.0}
    made = {rank: DeviceReport(rank=rank, process_index=rank, **given) for rank in range(count)}
    return {rank: replace(report, **(changes or {}).get(rank, {})) for rank, report in made.items()}


def check(found, *, host=lambda rank: "h1", platform="cpu", devices=None, of_hellos=None):
    expected = Expected(len(found), JOB_ID, platform, devices)
    return check_device_reports(found, hellos(len(found), host, of_hellos), expected)


# ---- hellos

DIFFERENT = {
    "versions, with their hosts": (
        hellos(8, lambda rank: f"h{rank // 4 + 1}", {7: {"versions": {"python": "3.11.7", "jaxlib": "0.10.1"}}}),
        "the processes differ in jaxlib\n  ranks 0-6   jaxlib 0.10.2   (h1, h2)\n  rank 7      jaxlib 0.10.1   (h2)\n",
    ),
    "programs on one host": (
        hellos(3, changes={0: {"program_hash": "f" * 16}, 2: {"program_hash": ""}}),
        "the processes differ in program\n"
        "  rank 0   program ffffffffffffffff\n"
        "  rank 1   program 0123456789abcdef\n"
        "  rank 2   program (cannot be read)\n",
    ),
    "several variables": (
        hellos(2, changes={1: {"environment": {"XLA_FLAGS": "--xla_b", "NCCL_DEBUG": "INFO"}}}),
        "the processes differ in NCCL_DEBUG, XLA_FLAGS\n"
        "  rank 0   NCCL_DEBUG (not set)\n"
        "  rank 1   NCCL_DEBUG INFO\n"
        "  rank 0   XLA_FLAGS --xla_a\n"
        "  rank 1   XLA_FLAGS --xla_b\n",
    ),
    "a partition that one does not have": (
        hellos(2, changes={0: {"environment": {"JAX_PARTITION_INDEX": "0"}}, 1: {"environment": {}}}),
        "the processes differ in JAX_PARTITION_INDEX\n"
        "  rank 0   JAX_PARTITION_INDEX (set)\n"
        "  rank 1   JAX_PARTITION_INDEX (not set)\n",
    ),
}


@pytest.mark.parametrize(("found", "text"), DIFFERENT.values(), ids=DIFFERENT)
def test_processes_that_differ_are_refused_with_a_table(found, text):
    assert compare_hellos(found) == text + SAME


ALIKE = {
    "one process": hellos(1, each),
    "processes on hosts of their own": hellos(8, each),
    **{
        f"{name}, by which hosts number their devices": hellos(
            2, changes={1: {"environment": {"XLA_FLAGS": "--xla_a", name: "0,1"}}}
        )
        for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
    },
    "partitions": hellos(2, changes={rank: {"environment": {"JAX_PARTITION_INDEX": str(rank)}} for rank in range(2)}),
}


@pytest.mark.parametrize("found", ALIKE.values(), ids=ALIKE)
def test_processes_that_may_differ_so_are_not_refused(found):
    assert compare_hellos(found) == ""


# ---- device reports

ALONE = {"process_index": 0, "process_count": 1}
SEVEN = {"local_devices": 7, "global_devices": 63}
FEWER_ON_RANK_7 = {rank: {"global_devices": 63} for rank in range(7)} | {7: SEVEN}
REFUSED = {
    "counts of local devices": (
        reports(8, FEWER_ON_RANK_7, devices=8, platform="gpu", kinds=("NVIDIA H200",)),
        {
            "host": lambda rank: "h1" if rank < 4 else "h2",
            "platform": "cuda",
            "of_hellos": {7: {"environment": {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}}},
        },
        "local device counts differ\n"
        "  ranks 0-6   8 devices   (h1, h2, NVIDIA H200)  XLA_FLAGS=--xla_a\n"
        "  rank 7      7 devices   (h2, NVIDIA H200)  CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6\n"
        "every process must see the same number of devices; free the missing ones, or ask for -d 7.",
    ),
    "one device is singular": (
        reports(2, {1: {"local_devices": 2}}),
        {},
        "local device counts differ\n"
        "  rank 0   1 device    (cpu)  XLA_FLAGS=--xla_a\n"
        "  rank 1   2 devices   (cpu)  XLA_FLAGS=--xla_a\n"
        "every process must see the same number of devices; free the missing ones, or ask for -d 1.",
    ),
    "fewer devices than requested": (
        reports(2),
        {"devices": 4},
        "every process should have 4 devices, but JAX sees 1 in each  XLA_FLAGS=--xla_a\n"
        "ask for -d 1, or remove the setting that says otherwise.",
    ),
    "a CPU instead of GPUs": (
        reports(4),
        {"host": each, "platform": "cuda"},
        "the job asked for cuda, but JAX runs on something else\n"
        "  ranks 0-3   platform cpu   (h1, h2, h3, h4)\n"
        "is JAX installed with support for cuda there, and is a device free? Or ask for --platform cpu.",
    ),
    "a GPU instead of CPUs": (
        reports(1, platform="gpu"),
        {},
        "the job asked for cpu, but JAX runs on something else\n"
        "  rank 0   platform gpu\n"
        "is JAX installed with support for cpu there, and is a device free? Or ask for --platform cuda (or rocm).",
    ),
    "a job of another size": (
        reports(4, dict.fromkeys((1, 2, 3), ALONE)),
        {},
        "JAX does not see the job of 4 processes that you asked for\n"
        "  ranks 1-3   process 0 of 1 to JAX\n"
        "does the program, or a variable of yours, call jax.distributed.initialize before jaxrun does?",
    ),
    "another's place": (
        reports(2, {1: {"process_index": 0}}),
        {},
        "JAX does not see the job of 2 processes that you asked for\n"
        "  rank 1   process 0 of 2 to JAX\n"
        "does the program, or a variable of yours, call jax.distributed.initialize before jaxrun does?",
    ),
    "another number of devices in all": (
        reports(4, {3: {"global_devices": 3}}),
        {},
        "the processes have 4 devices together, but JAX sees another number\n"
        "  rank 3   3 devices\n"
        "they did not all join one job; start it again.",
    ),
}


@pytest.mark.parametrize(("found", "wanted", "text"), REFUSED.values(), ids=REFUSED)
def test_devices_other_than_the_jobs_are_refused_with_a_table(found, wanted, text):
    assert check(found, **wanted) == text


def test_a_foreign_coordinator_is_reported_first():
    stranger = {"nonce": "cd" * 16, "process_count": 9, "local_devices": 3}
    text = check(reports(3, {2: stranger}), host=each)
    assert text.startswith("rank 2 (h3) joined the coordinator of another job\n")


@pytest.mark.parametrize(("asked", "platform"), [("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu"), ("cpu", "cpu")])
def test_a_uniform_job_is_not_refused_whose_platform_jax_names_its_own_way(asked, platform):
    for count in (1, 8):
        assert check(reports(count, devices=2, platform=platform), host=each, devices=2, platform=asked) == ""


def test_missing_ranks_are_named():
    hosts = {rank: f"h{rank // 2 + 1}" for rank in range(8)}
    assert describe_missing_ranks(hosts, [0, 1, 2, 4, 5, 6], 60.0, "started") == (
        "6 of 8 ranks started within 60 s; missing: ranks 3, 7 (h2, h4)\n"
        "their output, if any, is in the logs; a slow file system or import needs a larger --init-timeout."
    )
    assert "missing: rank 1\n" in describe_missing_ranks({0: "h1", 1: "h1"}, [0], 2.5, "joined")
