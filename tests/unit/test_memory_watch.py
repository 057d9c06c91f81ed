"""Forecasts of a host whose memory will soon be full: what is reported, when, and the line that people see."""

import pytest
from msgspec.structs import replace

from jaxrun.analysis.verdict.memory_text import format_shortage
from jaxrun.files.procfs import read_cgroup_memory, read_host_memory
from jaxrun.node.agent.memory_watch import MemoryReading, MemoryWatch, forecast
from jaxrun.protocol.agent_messages import MemoryShortage

GIB = 2**30


def readings(used, limit=64, *, growing=(4, 5)):
    """One reading a second; ranks 4-7 hold an equal share of what is used, those not `growing` as in the first one."""
    return [
        MemoryReading(
            float(second),
            int(gib * GIB),
            limit * GIB,
            {rank: int((gib if rank in growing else used[0]) / 4 * GIB) for rank in (4, 5, 6, 7)},
        )
        for second, gib in enumerate(used)
    ]


def test_steady_growth_is_reported_a_minute_before_the_memory_is_full():
    found = forecast(readings([48, 48.3, 48.6, 48.9, 49.2]))
    assert found is not None and round(found.full_in_s) == round((64 - 49.2) / 0.3)
    assert (found.growing, found.used, found.limit) == ((4, 5), int(49.2 * GIB), 64 * GIB)
    assert round(found.growth / GIB, 2) == 0.3


@pytest.mark.parametrize(
    "used",
    [
        pytest.param([50, 51, 52], id="too few readings"),
        pytest.param([50, 54, 58, 58, 58, 58], id="it has grown and stopped"),
        pytest.param([58, 54, 58, 54, 58, 54, 58], id="it goes up and down"),
        pytest.param([60, 60, 60, 60, 60], id="full, and not growing"),
        pytest.param([62, 61, 60, 59, 58], id="it shrinks"),
        pytest.param([50, 50.1, 50.2, 50.3, 50.4], id="full in two minutes"),
        pytest.param([1, 5, 9, 13, 17, 21], id="most is free: data is loaded"),
    ],
)
def test_nothing_is_reported_without_lasting_growth(used):
    assert forecast(readings(used)) is None


def test_growth_of_other_processes_is_not_put_on_ranks():
    found = forecast(readings([50, 51, 52, 53, 54], growing=()))
    assert found is not None and found.growing == ()


def meminfo(path, available):
    kib = {"MemTotal": 64 * 2**20, "MemAvailable": available * 2**20, "SwapTotal": 0, "SwapFree": 0}
    path.write_text("".join(f"{name}: {value} kB\n" for name, value in kib.items()))


def test_a_shortage_is_reported_once_and_again_after_it_was_over(tmp_path):
    path = tmp_path / "meminfo"
    watch = MemoryWatch(None, path)

    def read(seconds, available):
        found = []
        for second, gib in zip(seconds, available, strict=True):
            meminfo(path, gib)
            found.append(watch.read({0: (64 - gib) * GIB}, float(second)) is not None)
        return found

    assert read(range(8), [16, 15, 14, 13, 12, 11, 10, 9]) == [False] * 3 + [True] + [False] * 4
    assert not any(read(range(8, 60), [20] * 52))
    assert read(range(60, 66), [16, 15, 14, 13, 12, 11]).count(True) == 1


def test_the_figures_before_a_kill(tmp_path):
    path = tmp_path / "meminfo"
    watch = MemoryWatch(None, path)
    assert watch.describe_last(0) == ""
    for second, gib in enumerate((10, 6, 2)):
        meminfo(path, gib)
        watch.read({0: (60 - gib) * GIB}, float(second))
    assert watch.describe_last(0) == "62 GiB of 64 GiB were used, rank 0 held 58 GiB and grew by 4 GiB/s"
    assert watch.describe_last(1) == ""
    watch.read({0: 0}, 3.0)  # it is being killed
    assert watch.describe_last(0) == "62 GiB of 64 GiB were used, rank 0 held 58 GiB and grew by 4 GiB/s"


@pytest.mark.parametrize("text", ["", "MemTotal: many kB\n", "MemTotal: 5 kB\n"])
def test_a_kernel_without_this_information_is_not_an_error(tmp_path, text):
    (tmp_path / "meminfo").write_text(text)
    assert read_host_memory(tmp_path / "meminfo") is None
    assert read_host_memory(tmp_path / "nowhere") is None


VERSIONS = {
    2: {"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 1\ninactive_file 100000\n"},
    1: {
        "memory.limit_in_bytes": "1000000",
        "memory.usage_in_bytes": "900000",
        "memory.stat": "cache 5\ntotal_inactive_file 100000\n",
    },
}


@pytest.mark.parametrize("files", VERSIONS.values(), ids=VERSIONS)
def test_cache_that_can_be_freed_does_not_count_in_a_cgroup(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert read_cgroup_memory(tmp_path) == (800_000, 1_000_000)
    assert read_cgroup_memory(None) is None and read_cgroup_memory(tmp_path / "none") is None


SHORTAGE = MemoryShortage(5, 51 * GIB, 64 * GIB, 40.2, 0.3 * GIB, (4, 5))
STACK = 'Current thread 0x1 (most recent call first):\n  File "/job/train.py", line 88 in save\n'


def test_the_line_names_host_ranks_and_place():
    both = [SHORTAGE, replace(SHORTAGE, growing=(7,), full_in_s=41.0)]
    assert format_shortage(both, "h2", {4: STACK, 5: STACK, 7: ""}) == (
        "the memory of h2 will be full in 40 s: 51 GiB of 64 GiB are used, "
        "ranks 4-5, 7 grow by 307 MiB/s at train.py:88 save"
    )
    assert format_shortage([replace(SHORTAGE, growing=())], "h2", {}).endswith(
        "51 GiB of 64 GiB are used, processes that are not ranks of this job grow by 307 MiB/s"
    )


TWO_HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}


def shortage(rank, **changes):
    return replace(SHORTAGE, rank=rank, growing=(rank,), **changes)


def test_the_head_tells_once_for_all_agents_of_a_host(simulate):
    job = simulate(4, hosts=TWO_HOSTS).run()
    job.stacks = dict.fromkeys(range(4), STACK)
    job.handle(shortage(2)).wait(0.8).handle(shortage(3)).wait(2)
    line = "the memory of h2 will be full in 40 s: 51 GiB of 64 GiB are used, "
    assert job.lines == [f"{line}ranks 2-3 grow by 307 MiB/s at train.py:88 save"]
    job.handle(shortage(2)).wait(10)
    assert len(job.lines) == 1
    job.handle(shortage(0)).wait(2)
    assert len(job.lines) == 2 and "of h1" in job.lines[1]
    job.wait(60).handle(shortage(2)).wait(2)
    assert len(job.lines) == 3


def test_no_line_about_a_job_that_is_ending(simulate):
    job = simulate(4, hosts=TWO_HOSTS).run()
    job.handle(shortage(2), job.failure(2)).wait(3).handle(shortage(3)).wait(3)
    assert not any("memory" in line for line in job.lines)
