"""Reads what the kernel says of processes, of the host's memory and of memory cgroups: /proc and /sys/fs/cgroup.

A process may end at any moment, and a kernel may lack a file. Functions then return what their docstrings say, and
raise nothing. A process is named by its id in this process's namespace.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator

# Among the words of /proc/PID/stat after the process's name: its state, its parent and group, the time that it and its
# children have used, the time of its start since the machine's, both in ticks, and the status of one that has ended.
STATE, PARENT, GROUP, CPU_TIMES, START_TICKS, EXIT_CODE = 0, 1, 2, slice(11, 15), 19, 49
_ENDED = (b"Z", b"X")
MEMINFO = "/proc/meminfo"
_CGROUPS = "/sys/fs/cgroup"
# By version of the cgroup: the file with the bytes in use, and the line of memory.stat with the cache that the kernel
# frees first.
_USAGE_FILES = {"memory.current": "inactive_file", "memory.usage_in_bytes": "total_inactive_file"}
_LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")
_KILL_COUNT_FILES = ("memory.events", "memory.oom_control")
_UNLIMITED_BYTES = 2**60  # version 1 writes a huge number for no limit


def boot_id() -> str:
    """Return what identifies this start of this machine's kernel. Raises OSError."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def read_of(pid: int, name: str) -> bytes:
    """Return the content of a file of the process; empty if it has gone, or may not be read."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def process_ids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat_words(pid: int) -> list[bytes]:
    """Return the words of /proc/PID/stat after the process's name; empty if it has gone."""
    return read_of(pid, "stat").rpartition(b")")[2].split()


def has_ended(words: list[bytes]) -> bool:
    """Whether these words of a process say that it has ended and was not waited for; also if they are empty."""
    return not words or words[STATE] in _ENDED


def stat_of_living(pid: int, word: int) -> int:
    """Return one of the words of /proc/PID/stat; 0 for a process that has ended."""
    words = stat_words(pid)
    return 0 if has_ended(words) else int(words[word])


def started_at(pid: int) -> float:
    """Return when the process has started, in seconds since the epoch, a second early at most; infinity if it ended."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open("/proc/uptime", "rb") as file:
            booted = time.time() - float(file.read().split()[0])
        return booted + int(stat_words(pid)[START_TICKS]) / os.sysconf("SC_CLK_TCK") - 1
    return float("inf")


def pid_in_namespace(pid: int) -> int:
    """Return a process's id in its own namespace; in a container, for example, it is a different number."""
    for line in read_of(pid, "status").splitlines():
        if line.startswith(b"NSpid:"):
            return int(line.split()[-1])
    return pid


def children(pid: int) -> set[int]:
    """Return the direct children, as the kernel lists them; empty if it does not."""
    found: set[int] = set()
    for task in _tasks(pid):
        found.update(map(int, read_of(pid, f"task/{task}/children").split()))
    return found


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    todo = children(pid)
    while todo:
        found |= todo
        todo = {child for parent in todo for child in children(parent)} - found
    return found


def group_members(group: int) -> set[int]:
    """Return the living processes of a process group."""
    return {pid for pid in process_ids() if stat_of_living(pid, GROUP) == group}


def command_line(pid: int) -> list[bytes]:
    """Return the words with which the process was started; empty if it has gone."""
    text = read_of(pid, "cmdline")  # without a NUL at its end if the process has written it anew
    return text.removesuffix(b"\0").split(b"\0") if text else []


def _tasks(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return os.listdir(f"/proc/{pid}/task")
    return []


# ---- what a process has used


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process and of all that it has started and that lives or was waited for."""
    return _cpu_ticks(pid) / os.sysconf("SC_CLK_TCK")


def _cpu_ticks(pid: int) -> int:
    words = stat_words(pid)
    return sum(map(int, words[CPU_TIMES])) + sum(_cpu_ticks(child) for child in children(pid)) if words else 0


def scheduled_seconds(pid: int) -> tuple[float, float] | None:
    """Return how long all threads of a process together have run, and waited for a core; None if it has gone."""
    ran_ns, waited_ns = 0, 0
    tasks = _tasks(pid)
    for task in tasks:
        with contextlib.suppress(IndexError, ValueError):
            ran, waited = map(int, read_of(pid, f"task/{task}/schedstat").split()[:2])
            ran_ns, waited_ns = ran_ns + ran, waited_ns + waited
    return (ran_ns / 1e9, waited_ns / 1e9) if tasks else None


def file_bytes(pid: int) -> int:
    """Return the bytes that a process has read and written so far, from and to files and pipes; 0 if unknown."""
    with contextlib.suppress(ValueError):
        counts = dict(line.split(b": ") for line in read_of(pid, "io").splitlines())
        return sum(int(counts.get(name, 0)) for name in (b"rchar", b"wchar", b"read_bytes"))  # the last for mmap
    return 0


def resident_bytes(pid: int) -> int:
    """Return the bytes of a process in memory; 0 if it has gone."""
    with contextlib.suppress(IndexError, ValueError):
        return int(read_of(pid, "statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def shared_bytes(pid: int) -> int:
    """Return how many resident bytes of a process count for others that share them (RSS less PSS); 0 if unknown.

    The kernel walks all pages of the process for this, which takes milliseconds.
    """
    with contextlib.suppress(KeyError, ValueError, IndexError):
        lines = read_of(pid, "smaps_rollup").splitlines()[1:]
        sizes = {line.split(b":")[0]: line.split() for line in lines}
        return max(0, int(sizes[b"Rss"][1]) - int(sizes[b"Pss"][1])) * 1024
    return 0


# ---- the memory of the host and of cgroups


def available_bytes(meminfo: str | os.PathLike[str] = MEMINFO) -> int | None:
    """Return the bytes of memory that new processes could use without swapping; None if the kernel does not say."""
    return _meminfo(meminfo).get("MemAvailable")


def total_bytes(meminfo: str | os.PathLike[str] = MEMINFO) -> int | None:
    """Return the bytes of memory that the host has; None if the kernel does not say."""
    return _meminfo(meminfo).get("MemTotal")


def read_host_memory(meminfo: str | os.PathLike[str] = MEMINFO) -> tuple[int, int] | None:
    """Return the bytes of memory and swap that are used and that there are; None if the kernel does not say."""
    facts = _meminfo(meminfo)
    if not facts.keys() >= {"MemTotal", "MemAvailable"}:
        return None
    total = facts["MemTotal"] + facts.get("SwapTotal", 0)
    return total - facts["MemAvailable"] - facts.get("SwapFree", 0), total


def _meminfo(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the sizes in /proc/meminfo in bytes; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        lines = (line.split() for line in file)
        return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) > 1}
    return {}


def memory_cgroup(membership: str, root: str | os.PathLike[str] = _CGROUPS) -> str | None:
    """Find the directory of a process's memory cgroup, version 1 or 2, by the text of its /proc/…/cgroup.

    In a container the path may be the host's; the cgroup is then the root that the container sees.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base = os.path.join(root, "memory")
        elif not controllers:
            base = os.fspath(root)
        else:
            continue
        for directory in (os.path.join(base, path.lstrip("/")).rstrip("/"), base):
            if any(os.path.exists(f"{directory}/{name}") for name in _KILL_COUNT_FILES):
                return directory
    return None


def own_memory_cgroup() -> str | None:
    with contextlib.suppress(ValueError):
        return memory_cgroup(read_of(os.getpid(), "cgroup").decode(errors="surrogateescape"))
    return None


def memory_limit(cgroup: str | os.PathLike[str] | None) -> int | None:
    """Return the bytes that the processes of this cgroup may use together; None for no limit."""
    for text in _read_files(cgroup, _LIMIT_FILES):
        with contextlib.suppress(ValueError):  # "max" means no limit
            limit = int(text)
            return limit if limit < _UNLIMITED_BYTES else None
    return None


def read_cgroup_memory(cgroup: str | os.PathLike[str] | None) -> tuple[int, int] | None:
    """Return the bytes that a memory cgroup uses, without cache that can be freed, and its limit; None without one."""
    limit = memory_limit(cgroup)
    if limit is None:
        return None
    for name, cache in _USAGE_FILES.items():
        for text in _read_files(cgroup, (name,)):
            with contextlib.suppress(ValueError):
                return max(0, int(text) - _memory_stat(cgroup).get(cache, 0)), limit
    return None


def bytes_left_in_cgroups() -> Iterator[int]:
    """Yield how much each memory cgroup (version 2) above this process allows beyond what cannot be reclaimed."""
    for line in read_of(os.getpid(), "cgroup").decode(errors="surrogateescape").splitlines():
        path = line.removeprefix("0::").rstrip("/") if line.startswith("0::") else None
        while path is not None:
            cgroup = f"{_CGROUPS}{path}"
            limit, facts = memory_limit(cgroup), _memory_stat(cgroup)
            if limit is not None and facts.keys() >= {"anon", "shmem"}:
                yield limit - facts["anon"] - facts["shmem"]
            path = path.rpartition("/")[0] if path else None


def count_oom_kills(cgroup: str | os.PathLike[str] | None) -> int:
    """Return how many processes of a cgroup the kernel has killed because its memory was full; 0 if unknown."""
    for text in _read_files(cgroup, _KILL_COUNT_FILES):
        for line in text.splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
    return 0


def _memory_stat(cgroup: str | os.PathLike[str] | None) -> dict[str, int]:
    for text in _read_files(cgroup, ("memory.stat",)):
        with contextlib.suppress(ValueError):
            return {name: int(size) for name, size in map(str.split, text.splitlines())}
    return {}


def _read_files(cgroup: str | os.PathLike[str] | None, names: Iterable[str]) -> Iterator[str]:
    if cgroup is None:
        return
    for name in names:
        with contextlib.suppress(OSError), open(os.path.join(cgroup, name), encoding="ascii") as file:
            yield file.read()
