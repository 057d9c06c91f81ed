"""A host: a network, a UTS and a mount namespace, held by one process, its keeper.

The keeper names the host, gives it its own boot id, /etc/hosts, /etc/passwd, /dev/shm and /sys, and then waits without
end. Nothing is mounted or named outside, so the kernel frees everything when the last process of the host has ended.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import processes
from processes import Process
from state import Place, Refusal

# Every process of a testbed inherits it, so processes that have lost their host's keeper can be found.
MARK = "JRTB_ROOT"
PATIENCE = 10.0
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# A fresh /sys shows the host's own devices. Slurm needs the machine's cgroups, which are mounted in the old /sys.
_KEEPER = """
set -e
home=$1
printf '%s\\n' "$2" >/proc/sys/kernel/hostname
if [ -d /sys/fs/cgroup ]; then
    mkdir -p "$home/cgroup"
    mount --rbind /sys/fs/cgroup "$home/cgroup"
    mount -t sysfs sysfs /sys
    mount --move "$home/cgroup" /sys/fs/cgroup
fi
mount --bind "$3/hosts" /etc/hosts
mount --bind "$3/passwd" /etc/passwd
mount --bind "$home/boot_id" /proc/sys/kernel/random/boot_id
mount -t tmpfs tmpfs /dev/shm
exec 3<>"$home/wait"
echo $$ >"$home/booted"
while :; do read -r _ <&3; done
"""
# Each host has temporary files of its own, which go with the testbed: a killed Open MPI leaves some behind, and refuses
# to start where it finds those of another with its process id.
_ENTER = """
read -r host </proc/sys/kernel/hostname
export TMPDIR="$JRTB_ROOT/hosts/$host/tmp"
unset host
cd "$0" || exit
exec "$@"
"""


def marker(place: Place, name: str) -> str:
    """Return the argument that identifies the keeper of a host."""
    return f"jrtb-{name}:{place.root}"


def environment(place: Place, base: Mapping[str, str]) -> dict[str, str]:
    """Return `base` with the variables that a process inside the testbed needs."""
    path = f"{place.commands}:{base.get('PATH') or SYSTEM_PATH}"
    added = {MARK: str(place.root), "SLURM_CONF": str(place.slurm_conf), "PATH": path}
    if place.grid_engine.exists():
        added |= {"SGE_ROOT": str(place.grid_engine), "SGE_CELL": "default"}
    return {key: value for key, value in base.items() if key != "HOSTNAME"} | added


def fresh_environment(place: Place) -> dict[str, str]:
    """What a login starts with: nothing of the caller's."""
    login = {"HOME": "/root", "USER": "root", "LOGNAME": "root", "SHELL": "/bin/sh", "LANG": "C.UTF-8"}
    return environment(place, login)


def enter(keeper: int, directory: str, command: Sequence[str]) -> list[str]:
    """Return the argv that runs `command` inside the host of this keeper, in this directory as the host sees it."""
    namespaces = ["nsenter", f"--target={keeper}", "--net", "--uts", "--mount", "--"]
    return [*namespaces, "/bin/sh", "-c", _ENTER, directory, *command]


def run_inside(place: Place, keeper: int, command: Sequence[str], text: str = "") -> str:
    """Run a command of the testbed in a host. Returns its output; raises Refusal with it if the command fails."""
    done = subprocess.run(
        enter(keeper, "/", command), input=text, env=fresh_environment(place), capture_output=True, text=True
    )
    if done.returncode:
        words = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise Refusal(f"{' '.join(command)} failed inside the testbed: {words}")
    return done.stdout


def keeper(place: Place, name: str, state: str = "on") -> Process | None:
    """Return the process that holds the host; None if the host is off or has no link yet (state "booted")."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        found = processes.inspect(int((place.host(name) / state).read_text()))
        if found and marker(place, name) in found.argv:
            return found
    return None


def boot(place: Place, names: Sequence[str]) -> dict[str, int]:
    """Start these hosts, which must be off, without links. Returns their keepers' process ids."""
    starting = {name: _start_keeper(place, name) for name in names}
    deadline = time.monotonic() + PATIENCE
    for name, starter in starting.items():
        while not keeper(place, name, "booted"):
            if starter.poll() is not None or time.monotonic() > deadline:
                raise Refusal(f"host {name} did not start: {(place.logs / f'{name}.log').read_text().strip()}")
            time.sleep(0.005)
    return {name: found.pid for name in names if (found := keeper(place, name, "booted"))}


def booted(place: Place, names: Sequence[str]) -> None:
    """Note that these hosts have links and are on."""
    for name in names:
        (place.host(name) / "booted").rename(place.host(name) / "on")


def members(place: Place, name: str) -> list[Process]:
    """Return the processes of a host, without its keeper."""
    holder = keeper(place, name)
    if not holder:
        return []
    return [process for process in processes.scan() if process.network == holder.network and process.pid != holder.pid]


def power_off(place: Place, name: str) -> None:
    """End all processes of one host, even if it has only half started."""
    holders = {found.network for state in ("on", "booted") if (found := keeper(place, name, state))}
    if holders:
        processes.end(lambda process: process.network in holders, name)
    for state in ("on", "booted"):
        (place.host(name) / state).unlink(missing_ok=True)


def power_off_all(place: Place) -> None:
    """End all processes of the testbed, whatever its files contain."""
    outside = os.stat("/proc/self/ns/net").st_ino
    # Twice: a process that a killed `up` has just started may not have its mark in the first round.
    for _ in range(2):
        networks: set[int] = set()

        def belongs(process: Process, networks: set[int] = networks) -> bool:
            if process.network in networks:
                return True
            if process.network == outside and process.command not in ("unshare", "nsenter"):
                return False
            if not processes.started_with(process.pid, MARK, str(place.root)):
                return False
            networks.update({process.network} - {outside})
            return True

        processes.end(belongs, "the testbed")
        time.sleep(0.03)


def start_daemon(
    place: Place, name: str, command: Sequence[str], variables: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Start a daemon in a host, with these variables besides the usual ones. What it prints goes to its log."""
    holder, program = keeper(place, name), os.path.basename(command[0])
    if not holder:
        raise Refusal(f"{program} cannot start: {name} is off")
    with open(place.logs / f"{program}-{name}.out", "ab") as log:
        subprocess.Popen(
            enter(holder.pid, "/", command),
            env={**fresh_environment(place), **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def last_words(place: Place, daemon: str) -> str:
    """Return the end of a daemon's log, and where the rest is."""
    logs = sorted(place.logs.glob(f"{daemon}*"))
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    return " / ".join(lines[-3:] or ["no word"]) + f" (logs: {place.logs})"


def _start_keeper(place: Place, name: str) -> subprocess.Popen[bytes]:
    home = place.host(name)
    home.mkdir(parents=True, exist_ok=True)
    (home / "tmp").mkdir(exist_ok=True)
    (home / "boot_id").write_text(f"{uuid.uuid4()}\n")
    with contextlib.suppress(FileExistsError):
        os.mkfifo(home / "wait")
    unshare = ["unshare", "--net", "--uts", "--mount", "--propagation", "slave", "--"]
    command = [*unshare, "/bin/sh", "-c", _KEEPER, marker(place, name), str(home), name, str(place.etc)]
    with open(place.logs / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            command,
            env=fresh_environment(place),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
