"""Memory: what the kernel says of processes that it killed for want of it."""

import pytest

from jaxrun.files.procfs import memory_cgroup
from jaxrun.node.agent import oom
from jaxrun.node.agent.oom import OomWatch

RECORDS = {
    "the whole machine": (
        "3,812,3514276391,-;Out of memory: Killed process 4711 (python) total-vm:739880kB, "
        "anon-rss:64172851kB, file-rss:5760kB, shmem-rss:0kB, UID:0 pgtables:184kB oom_score_adj:0\n",
        "the kernel's log names it as out of memory: it held 61.2 GiB",
    ),
    "a cgroup": (
        "3,812,3514276391,-;Memory cgroup out of memory: Killed process 4711 (a b) total-vm:73988kB, "
        "anon-rss:64256kB, file-rss:5760kB, shmem-rss:0kB, UID:0 pgtables:184kB oom_score_adj:0\n",
        "the kernel's log names it as out of memory: it held 62.8 MiB",
    ),
    "another process": (
        "3,812,3514276391,-;Out of memory: Killed process 47 (python) total-vm:7kB, anon-rss:6kB\n",
        "",
    ),
    "something else": ("6,813,3514276391,-;usb 1-1: new device number 4711\n", ""),
}
V2 = ("memory.events", "low 0\nhigh 0\nmax 5\noom 2\noom_kill {}\noom_group_kill 0\n", "memory.max")
V1 = ("memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n", "memory.limit_in_bytes")


@pytest.mark.parametrize(("record", "text"), RECORDS.values(), ids=RECORDS)
def test_the_kernels_log_is_read(tmp_path, record, text):
    log = tmp_path / "kmsg"
    log.write_text("3,1,1,-;Out of memory: Killed process 4711 (old) total-vm:1kB, anon-rss:1kB\n")
    watch = OomWatch(None, log)
    with log.open("a") as file:
        file.write(record)
    assert watch.explain(4711) == text
    assert watch.explain(4711) == ""
    watch.close()


def test_an_entry_about_another_process_is_kept_for_it(tmp_path):
    log = tmp_path / "kmsg"
    log.touch()
    watch = OomWatch(None, log)
    with log.open("ab", buffering=0) as file:
        for pid in (1, 2):
            line = f"3,1,1,-;Out of memory: Killed process {pid} (p) total-vm:9kB, anon-rss:{pid}024kB\n"
            file.write(line.encode().ljust(8192))
    assert watch.explain(2).endswith("it held 1.98 MiB") and watch.explain(1).endswith("it held 1 MiB")
    watch.close()


@pytest.mark.parametrize(("counter", "content", "limit"), [V2, V1], ids=["v2", "v1"])
def test_a_cgroup_counts_its_kills(tmp_path, counter, content, limit):
    (tmp_path / counter).write_text(content.format(3))
    (tmp_path / limit).write_text(f"{3 * 2**29}\n")
    watch = OomWatch(tmp_path, None)
    assert watch.explain(1) == ""
    (tmp_path / counter).write_text(content.format(5))
    answers = [watch.explain(pid) for pid in (1, 2, 3)]
    assert answers == [*["its memory cgroup ran out of memory (limit 1.5 GiB)"] * 2, ""]


def kill(folder, count, pid):
    """Another process of the cgroup is killed; returns the kernel's log, which tells of it."""
    (folder / "memory.events").write_text(f"oom_kill {count}\n")
    with (folder / "kmsg").open("a") as file:
        file.write(
            f"3,1,1,-;Memory cgroup out of memory: Killed process {pid} (loader) total-vm:9kB, anon-rss:1024kB\n"
        )
    return folder / "kmsg"


def test_a_kill_that_the_log_gives_to_another_process_explains_no_ranks_end(tmp_path):
    watch = OomWatch(tmp_path, kill(tmp_path, 0, 4711))
    kill(tmp_path, 1, 4712)
    assert watch.explain(9999) == ""
    (tmp_path / "memory.events").write_text("oom_kill 2\n")
    assert watch.explain(9999) == "its memory cgroup ran out of memory"
    watch.close()


@pytest.mark.parametrize("has_log", [False, True])
def test_a_kill_of_some_other_process_long_ago_explains_no_ranks_end(tmp_path, has_log):
    log = kill(tmp_path, 0, 4711)
    watch = OomWatch(tmp_path, log if has_log else None)
    watch.forget_old(0.0)
    kill(tmp_path, 1, 4712)
    for now in range(1, 60):
        watch.forget_old(float(now))
    assert [watch.explain(pid) for pid in (9999, 4712)] == ["", ""]
    kill(tmp_path, 2, 4713)
    for now in range(60, 70):  # its end takes a while
        watch.forget_old(float(now))
    text = (
        "the kernel's log names it as out of memory: it held 1 MiB"
        if has_log
        else "its memory cgroup ran out of memory"
    )
    assert [watch.explain(pid) for pid in (4713, 4714)] == [text, ""]
    watch.close()


@pytest.mark.parametrize("limit", ["max\n", f"{2**63 - 4096}\n", None])
def test_no_limit_is_not_shown(tmp_path, limit):
    (tmp_path / "memory.events").write_text("oom_kill 0\n")
    if limit:
        (tmp_path / "memory.max").write_text(limit)
    watch = OomWatch(tmp_path, None)
    (tmp_path / "memory.events").write_text("oom_kill 1\n")
    assert watch.explain(1) == "its memory cgroup ran out of memory"


@pytest.mark.parametrize(("namespace", "is_read"), [("pid:[4026531836]", True), ("pid:[4026532201]", False)])
def test_the_kernels_log_is_not_read_in_a_container_whose_process_ids_are_others(monkeypatch, namespace, is_read):
    monkeypatch.setattr(oom.os, "readlink", lambda path: namespace)
    assert (oom.kernel_log() is not None) == is_read


def test_without_log_and_cgroup_nothing_is_reported(tmp_path):
    watch = OomWatch(None, tmp_path / "missing")
    assert watch.explain(1) == ""
    watch.close()


MEMBERSHIPS = {
    "v2": ("0::/user.slice/a b\n", "user.slice/a b", "memory.events"),
    "v1": ("9:name=systemd:/x\n4:memory:/job/7\n0::/\n", "memory/job/7", "memory.oom_control"),
    "together": ("4:cpu,memory:/job\n", "memory/job", "memory.oom_control"),
    "a container": ("4:memory:/host/only\n", "memory", "memory.oom_control"),
    **{membership: (membership, "", "") for membership in ("", "1:cpu:/x\n", "0::/\n")},
}


@pytest.mark.parametrize(("membership", "directory", "counter"), MEMBERSHIPS.values(), ids=MEMBERSHIPS)
def test_the_memory_cgroup_is_found_where_there_is_one(tmp_path, membership, directory, counter):
    if directory:
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / counter).touch()
    assert memory_cgroup(membership, tmp_path) == (str(tmp_path / directory) if directory else None)
