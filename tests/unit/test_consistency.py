"""The errors for processes that differ, or that are not the job that was requested."""

from dataclasses import replace

import pytest

from jaxrun.head.consistency import (
    Expected,
    check_device_reports,
    compare_hellos,
    describe_duplicate_rank,
    describe_missing_ranks,
    describe_unknown_rank,
)
from jaxrun.protocol.worker_messages import DeviceReport, Hello

JOB_ID = "ab" * 16


def _hellos(count, host=lambda rank: "h1", **changes):
    made = {}
    for rank in range(count):
        made[rank] = Hello(
            rank=rank,
            host=host(rank),
            pid=1000 + rank,
            time=1.0,
            started_at=0.0,
            versions={"python": "3.11.7", "jaxlib": "0.10.2"},
            program_hash="0123456789abcdef",
            environment={"XLA_FLAGS": "--xla_a"},
        )
        made[rank] = replace(made[rank], **changes.get(f"r{rank}", {}))
    return made


def _proofs(count, devices=1, platform="cpu", kind="cpu", **changes):
    made = {}
    for rank in range(count):
        made[rank] = DeviceReport(
            rank=rank,
            process_index=rank,
            process_count=count,
            local_devices=devices,
            global_devices=count * devices,
            device_kinds=(kind,),
            platform=platform,
            nonce=JOB_ID,
            joined_at=1.0,
            time=1.0,
        )
        made[rank] = replace(made[rank], **changes.get(f"r{rank}", {}))
    return made


def _expected(count, platform="cpu", devices=None):
    return Expected(count, JOB_ID, platform, devices)


def _each(rank):
    return f"h{rank + 1}"


@pytest.mark.parametrize("count", [1, 8])
def test_a_uniform_job_is_not_refused(count):
    hellos = _hellos(count, _each)
    assert compare_hellos(hellos) == ""
    assert check_device_reports(_proofs(count, devices=2), hellos, _expected(count, devices=2)) == ""


def test_versions_that_differ_are_shown_with_their_hosts():
    older = {"versions": {"python": "3.11.7", "jaxlib": "0.10.1"}}
    assert compare_hellos(_hellos(8, lambda rank: f"h{rank // 4 + 1}", r7=older)) == (
        "the processes differ in jaxlib\n"
        "  ranks 0-6   jaxlib 0.10.2   (h1, h2)\n"
        "  rank 7      jaxlib 0.10.1   (h2)\n"
        "every process must run the same program with the same versions and settings."
    )


def test_hosts_are_left_out_where_there_is_one():
    assert compare_hellos(_hellos(3, r0={"program_hash": "f" * 16}, r2={"program_hash": ""})) == (
        "the processes differ in program\n"
        "  rank 0   program ffffffffffffffff\n"
        "  rank 1   program 0123456789abcdef\n"
        "  rank 2   program (cannot be read)\n"
        "every process must run the same program with the same versions and settings."
    )


def test_every_difference_is_shown_and_nothing_else():
    environment = {"XLA_FLAGS": "--xla_b", "NCCL_DEBUG": "INFO"}
    assert compare_hellos(_hellos(2, r1={"environment": environment})) == (
        "the processes differ in NCCL_DEBUG, XLA_FLAGS\n"
        "  rank 0   NCCL_DEBUG (not set)\n"
        "  rank 1   NCCL_DEBUG INFO\n"
        "  rank 0   XLA_FLAGS --xla_a\n"
        "  rank 1   XLA_FLAGS --xla_b\n"
        "every process must run the same program with the same versions and settings."
    )


@pytest.mark.parametrize("name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_hosts_may_number_their_devices_differently(name):
    environment = {"XLA_FLAGS": "--xla_a", name: "0,1"}
    assert compare_hellos(_hellos(2, r1={"environment": environment})) == ""


@pytest.mark.parametrize(("on_rank_1", "refused"), [("7", False), (None, True)])
def test_partition_indices_may_differ_but_all_ranks_must_have_one(on_rank_1, refused):
    environment = {} if on_rank_1 is None else {"JAX_PARTITION_INDEX": on_rank_1}
    text = compare_hellos(_hellos(2, r0={"environment": {"JAX_PARTITION_INDEX": "0"}}, r1={"environment": environment}))
    assert ("rank 1   JAX_PARTITION_INDEX (not set)" in text) == refused
    assert bool(text) == refused


def test_two_processes_with_one_rank():
    known = _hellos(2, _each)[1]
    assert describe_duplicate_rank(known, replace(known, pid=7, host="h9")) == (
        "two processes say that they are rank 1: process 1001 on h2 and process 7 on h9\n"
        "every process needs a rank of its own; is one of them left over from an earlier job?"
    )


def test_a_rank_that_the_job_does_not_have():
    assert describe_unknown_rank(8, 4).startswith("a process says that it is rank 8, but the job has ranks 0 to 3\n")


def test_local_device_counts_that_differ():
    seven = {"local_devices": 7, "global_devices": 63}
    proofs = {
        rank: replace(proof, global_devices=63)
        for rank, proof in _proofs(8, devices=8, platform="gpu", kind="NVIDIA H200", r7=seven).items()
    }
    environment = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6"}
    hellos = _hellos(8, lambda rank: "h1" if rank < 4 else "h2", r7={"environment": environment})
    assert check_device_reports(proofs, hellos, _expected(8, "cuda")) == (
        "local device counts differ\n"
        "  ranks 0-6   8 devices   (h1, h2, NVIDIA H200)  XLA_FLAGS=--xla_a\n"
        "  rank 7      7 devices   (h2, NVIDIA H200)  CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6\n"
        "every process must see the same number of devices; free the missing ones, or ask for -d 7."
    )


def test_one_device_is_singular():
    text = check_device_reports(_proofs(2, r1={"local_devices": 2}), _hellos(2), _expected(2))
    assert "  rank 0   1 device    (cpu)" in text and "  rank 1   2 devices   (cpu)" in text
    assert text.endswith("or ask for -d 1.")


def test_fewer_devices_than_requested_are_refused():
    assert check_device_reports(_proofs(2), _hellos(2), _expected(2, devices=4)) == (
        "every process was to have 4 devices, but JAX shows 1 in each  XLA_FLAGS=--xla_a\n"
        "ask for -d 1, or take the setting away that decides otherwise."
    )


def test_a_cpu_fallback():
    assert check_device_reports(_proofs(4), _hellos(4, _each), _expected(4, "cuda")) == (
        "the job asked for cuda, but JAX runs on something else\n"
        "  ranks 0-3   platform cpu   (h1, h2, h3, h4)\n"
        "is JAX installed with support for cuda there, and is a device free? Or ask for --platform cpu."
    )


@pytest.mark.parametrize(("asked", "platform"), [("cuda", "gpu"), ("rocm", "gpu"), ("tpu", "tpu"), ("cpu", "cpu")])
def test_jax_names_platforms_its_own_way(asked, platform):
    assert check_device_reports(_proofs(2, platform=platform), _hellos(2), _expected(2, asked)) == ""


def test_a_gpu_job_in_place_of_a_cpu_job_names_platforms_that_can_be_requested():
    text = check_device_reports(_proofs(1, platform="gpu"), _hellos(1), _expected(1, "cpu"))
    assert text.endswith("Or ask for --platform cuda (or rocm).")


def test_a_foreign_coordinator_is_reported_first():
    stranger = {"nonce": "cd" * 16, "process_count": 9, "local_devices": 3}
    text = check_device_reports(_proofs(3, r2=stranger), _hellos(3, _each), _expected(3))
    assert text.startswith("rank 2 (h3) joined the coordinator of another job\n")


def test_a_job_of_another_size_to_jax():
    alone = {"process_index": 0, "process_count": 1}
    assert check_device_reports(_proofs(4, r1=alone, r2=alone, r3=alone), _hellos(4), _expected(4)) == (
        "JAX does not show the job of size 4 that was asked for\n"
        "  ranks 1-3   process 0 of 1 to JAX\n"
        "does the program, or a variable of yours, call jax.distributed.initialize before jaxrun does?"
    )


def test_another_number_of_devices_in_all():
    assert check_device_reports(_proofs(4, r3={"global_devices": 3}), _hellos(4), _expected(4)) == (
        "the processes have 4 devices together, but JAX shows another number in all\n"
        "  rank 3   3 devices\n"
        "they did not all join one job; start it again."
    )


def test_missing_ranks_are_named():
    hosts = {rank: f"h{rank // 2 + 1}" for rank in range(8)}
    assert describe_missing_ranks(hosts, [0, 1, 2, 4, 5, 6], 60.0, "started") == (
        "6 of 8 ranks started within 60 s; missing: ranks 3, 7 (h2, h4)\n"
        "their output, if any, is in the logs; a slow file system or import needs a larger --init-timeout."
    )
    assert "missing: rank 1\n" in describe_missing_ranks({0: "h1", 1: "h1"}, [0], 2.5, "joined")
