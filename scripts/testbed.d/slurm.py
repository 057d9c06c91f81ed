"""Slurm on the hosts: its configuration, and the daemons munged, slurmctld and slurmd, each started on its hosts."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence

import hosts
from state import CONTROLLER, Place, Refusal, address

# More than a small machine has; with SlurmdParameters=config_overrides Slurm accepts it.
CPUS_PER_HOST = 4
# Seconds of silence after which Slurm counts a host as lost and ends its jobs; the default, 300, makes tests long.
SLURMD_TIMEOUT = 10
# Seconds that slurmctld waits for one answer; with Slurm's default of 10, a lost host is noticed after 28 s, not 18.
MESSAGE_TIMEOUT = 5
# Seconds from SIGTERM to SIGKILL for a step that Slurm ends; srun also waits this long for tasks of a lost host.
KILL_WAIT = 5
# Seconds that a preempted job has from Slurm's SIGTERM to its end: saving may take long on a busy machine.
PREEMPTION_GRACE = 60
# Seconds that a credential is valid: a requeued job waits for that time. The default is 120.
CREDENTIAL_LIFE = 5
PATIENCE = 90.0  # seconds; on a busy machine Slurm needs 40 to end what ran on a host that was cut off


def slurm_conf(place: Place, hosts_up: int, memory: int) -> str:
    """Return the text of slurm.conf. `memory`: of each host, in MB."""
    return f"""ClusterName=testbed
SlurmctldHost={CONTROLLER}({address(CONTROLLER)})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={place.munge}/socket,cred_expire={CREDENTIAL_LIFE}
StateSaveLocation={place.root}/slurm/state
SlurmdSpoolDir={place.root}/slurm/%n
SlurmctldPidFile={place.root}/slurm/slurmctld.pid
SlurmdPidFile={place.root}/slurm/slurmd-%n.pid
SlurmctldLogFile={place.logs}/slurmctld.log
SlurmdLogFile={place.logs}/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmdTimeout={SLURMD_TIMEOUT}
MessageTimeout={MESSAGE_TIMEOUT}
KillWait={KILL_WAIT}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=1
PropagateResourceLimits=NONE
ReturnToService=2
MpiDefault=none
MailProg=/bin/true
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=h[1-{hosts_up}] CPUs={CPUS_PER_HOST} RealMemory={memory}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={PREEMPTION_GRACE}
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


CGROUP_CONF = "CgroupPlugin=autodetect\n"


def configure(place: Place, hosts_up: int) -> None:
    """Write all files that the daemons read, with a new key for munge."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    for folder in (place.etc, place.munge, place.logs, place.root / "slurm"):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    place.slurm_conf.write_text(slurm_conf(place, hosts_up, memory))
    (place.etc / "cgroup.conf").write_text(CGROUP_CONF)
    key = place.munge / "key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))


def start(place: Place, names: Sequence[str]) -> None:
    """Start the daemons that are missing on the controller and on these hosts, and wait until their nodes are idle."""
    running = {process.command for process in hosts.members(place, CONTROLLER)}
    if "munged" not in running:
        _start_munged(place)
    if "slurmctld" not in running:
        hosts.start_daemon(place, CONTROLLER, ["slurmctld", "-D"])
    waiting = []
    for name in names:
        if "slurmd" not in {process.command for process in hosts.members(place, name)}:
            (place.root / "slurm" / name).mkdir(exist_ok=True)
            hosts.start_daemon(place, name, ["slurmd", "-D"])
            waiting.append(name)
    _wait(place, waiting)


def node_states(place: Place, controller: int) -> dict[str, str]:
    """Return slurmctld's state of each node ("idle", "mixed", "down*", ...); empty while it does not answer."""
    with contextlib.suppress(Refusal):
        lines = hosts.run_inside(place, controller, ["sinfo", "--noheader", "--Node", "--format=%N %T"]).splitlines()
        return {name: state for name, state in (line.split() for line in lines)}
    return {}


def _start_munged(place: Place) -> None:
    files = [f"--{name}-file={place.munge / name}" for name in ("key", "pid", "seed")]
    options = [*files, f"--socket={place.munge / 'socket'}", f"--log-file={place.logs / 'munged.log'}"]
    hosts.start_daemon(place, CONTROLLER, ["munged", "--foreground", "--force", "--num-threads=2", *options])
    deadline = time.monotonic() + PATIENCE
    while not (place.munge / "socket").is_socket():
        if time.monotonic() > deadline:
            raise Refusal(f"munged did not start: {hosts.last_words(place, 'munged')}")
        time.sleep(0.01)


def _wait(place: Place, names: Sequence[str]) -> None:
    controller = hosts.keeper(place, CONTROLLER)
    deadline = time.monotonic() + PATIENCE
    while names and controller:
        states = node_states(place, controller.pid)
        missing = [name for name in names if states.get(name) not in ("idle", "mixed", "allocated")]
        if not missing:
            return
        if time.monotonic() > deadline:
            seen = ", ".join(f"{name} {states.get(name, 'unknown')}" for name in missing)
            words = hosts.last_words(place, f"slurmd-{missing[0]}" if states else "slurmctld")
            raise Refusal(f"after {PATIENCE:g} s not all hosts are idle in Slurm ({seen}): {words}")
        time.sleep(0.05)
