"""Grid Engine on the hosts: its configuration, and the daemons sge_qmaster and sge_execd, each started on its hosts.

Grid Engine finds the processes of a job by a group id that it gives them, and kills whatever has that group. All hosts
of all testbeds share the machine's processes, so each host gets group ids of its own.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from xml.etree import ElementTree

import hosts
import processes
from state import CONTROLLER, Place, Refusal

SLOTS_PER_HOST = 4
# Seconds from SIGUSR2 to SIGKILL for a job that was submitted with -notify. Most sites have 60.
NOTIFY_S = 20
# Seconds without a report after which a host counts as lost.
MAX_UNHEARD_S = 10
GROUPS_PER_HOST = 100
FIRST_GROUP = 1_000_000
PATIENCE = 60.0
_DAEMONS = ("sge_qmaster", "sge_execd")
QUEUE = "all.q"
# Parallel environments: how they fill hosts, and whether jobs may start processes on other hosts by qrsh -inherit.
PARALLEL_ENVIRONMENTS = {
    "fill": ("$fill_up", "TRUE"),
    "spread": ("$round_robin", "TRUE"),
    "loose": ("$round_robin", "FALSE"),
}
_PROGRAMS = Path("/usr/lib/gridengine")
_SHARED = Path("/usr/share/gridengine")
_LIMITS = (
    "s_rt", "h_rt", "s_cpu", "h_cpu", "s_fsize", "h_fsize", "s_data", "h_data", "s_stack", "h_stack", "s_core",
    "h_core", "s_rss", "h_rss", "s_vmem", "h_vmem",
)  # fmt: skip


def bootstrap(place: Place) -> str:
    """Return the text of the file that says where everything else is."""
    root = place.grid_engine
    return f"""admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {root}/default/common;{root}/qmaster
binary_path {_PROGRAMS}
qmaster_spool_dir {root}/qmaster
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""


def configuration(place: Place, text: str) -> str:
    """Return the global configuration: Debian's default, changed so that root runs jobs and nothing takes long."""
    values = {
        "execd_spool_dir": f"{place.grid_engine}/execd",
        "min_uid": "0",
        "min_gid": "0",
        "mailer": "/bin/true",
        "load_report_time": "00:00:02",
        "max_unheard": f"00:00:{MAX_UNHEARD_S}",
        "reporting_params": "accounting=true reporting=false flush_time=00:00:01 accounting_flush_time=00:00:00 "
        "joblog=false sharelog=00:00:00",
    }
    return _with_values(text, values)


def queue(place: Place, names: Sequence[str]) -> str:
    """Return the definition of the queue on all hosts. Each host has its own directory for temporary files."""
    directories = ",".join(["/tmp", *(f"[{name}={place.host(name)}/tmp]" for name in names)])
    values = {
        "qname": QUEUE,
        "hostlist": " ".join(names),
        "seq_no": "0",
        "nsuspend": "1",
        "suspend_interval": "00:05:00",
        "priority": "0",
        "min_cpu_interval": "00:05:00",
        "processors": "UNDEFINED",
        "qtype": "BATCH INTERACTIVE",
        "pe_list": " ".join(PARALLEL_ENVIRONMENTS),
        "rerun": "TRUE",
        "slots": str(SLOTS_PER_HOST),
        "tmpdir": directories,
        "shell": "/bin/sh",
        "shell_start_mode": "unix_behavior",
        "notify": f"00:00:{NOTIFY_S}",
        "initial_state": "default",
    }
    empty = (
        "load_thresholds", "suspend_thresholds", "ckpt_list", "prolog", "epilog", "starter_method", "suspend_method",
        "resume_method", "terminate_method", "owner_list", "user_lists", "xuser_lists", "subordinate_list",
        "complex_values", "projects", "xprojects", "calendar",
    )  # fmt: skip
    values |= dict.fromkeys(empty, "NONE") | dict.fromkeys(_LIMITS, "INFINITY")
    return "".join(f"{name} {value}\n" for name, value in values.items())


def parallel_environment(name: str) -> str:
    rule, control = PARALLEL_ENVIRONMENTS[name]
    values = {
        "pe_name": name,
        "slots": "999",
        "user_lists": "NONE",
        "xuser_lists": "NONE",
        "start_proc_args": "NONE",
        "stop_proc_args": "NONE",
        "allocation_rule": rule,
        "control_slaves": control,
        "job_is_first_task": "FALSE",
        "urgency_slots": "min",
        "accounting_summary": "TRUE",
        "qsort_args": "NONE",
    }
    return "".join(f"{key} {value}\n" for key, value in values.items())


def architecture() -> str:
    """Return Grid Engine's name for this machine, which is part of the paths of its programs."""
    done = subprocess.run([_SHARED / "util" / "arch"], capture_output=True, text=True)
    return done.stdout.strip()


def start(place: Place, names: Sequence[str]) -> None:
    """Start the daemons that are missing on the controller and on these hosts, and wait until the queue has them."""
    is_new = not (place.grid_engine / "configured").exists()
    if is_new:
        _lay_out(place)
    if not _runs(place, CONTROLLER, "sge_qmaster"):
        _start_daemon(place, CONTROLLER, "sge_qmaster")
        _wait_for_qmaster(place)
    if is_new:
        _configure(place, names)
        (place.grid_engine / "configured").touch()
    missing = [name for name in names if not _runs(place, name, "sge_execd")]
    for name in missing:
        _set_groups(place, name)
        _start_daemon(place, name, "sge_execd")
    _wait_for_hosts(place, missing)


def restart(place: Place, names: Sequence[str]) -> None:
    """Start all daemons anew: sge_qmaster takes a host that has lost its power for one that is still connected."""
    _end(place, names, _DAEMONS)
    start(place, names)


def end(place: Place, names: Sequence[str]) -> None:
    """End Grid Engine, whose jobs are over, on the controller and on these hosts, and delete its files."""
    _end(place, names, (*_DAEMONS, "sge_shepherd"))
    shutil.rmtree(place.grid_engine, ignore_errors=True)


def _end(place: Place, names: Sequence[str], commands: Collection[str]) -> None:
    networks = {holder.network for name in (CONTROLLER, *names) if (holder := hosts.keeper(place, name))}
    processes.end(lambda process: process.network in networks and process.command in commands, "Grid Engine")


def _lay_out(place: Place) -> None:
    """Write the files that sge_qmaster reads when it starts, and initialize its spool directory."""
    root = place.grid_engine
    for folder in ("default/common", "qmaster", "execd", "bin", "utilbin", "etc"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    arch = architecture()
    for folder, target in ((f"bin/{arch}", _PROGRAMS), (f"utilbin/{arch}", _PROGRAMS), ("util", _SHARED / "util")):
        if not (root / folder).is_symlink():
            (root / folder).symlink_to(target)
    (root / "default/common/bootstrap").write_text(bootstrap(place))
    (root / "default/common/act_qmaster").write_text(f"{CONTROLLER}\n")
    default = (_SHARED / "default-configuration").read_text()
    (root / "etc/configuration").write_text(configuration(place, default))
    _run(place, str(_PROGRAMS / "spoolinit"), "classic", "libspoolc", f"{root}/default/common;{root}/qmaster", "init")
    for kind, source in (
        ("configuration", f"{root}/etc/configuration"),
        ("complexes", f"{_SHARED}/util/resources/centry"),
        ("usersets", f"{_SHARED}/util/resources/usersets"),
        ("managers", "root"),
    ):
        _run(place, str(_PROGRAMS / "spooldefaults"), kind, source)


def _configure(place: Place, names: Sequence[str]) -> None:
    """Tell sge_qmaster about hosts, parallel environments, the queue, and a scheduler that does not wait."""
    _run(place, "qconf", "-ah", ",".join(names))
    _run(place, "qconf", "-as", ",".join((CONTROLLER, *names)))
    for name in PARALLEL_ENVIRONMENTS:
        _run(place, "qconf", "-Ap", _file(place, name, parallel_environment(name)))
    _run(place, "qconf", "-Aq", _file(place, QUEUE, queue(place, names)))
    values = {
        "schedule_interval": "0:0:1",
        "flush_submit_sec": "1",
        "flush_finish_sec": "1",
        "job_load_adjustments": "NONE",
        "load_adjustment_decay_time": "0:0:0",
    }
    _run(place, "qconf", "-Msconf", _file(place, "scheduler", _with_values(_run(place, "qconf", "-ssconf"), values)))


def _set_groups(place: Place, name: str) -> None:
    """Give a host that is about to start group ids that no other running host of the machine has."""
    keeper = hosts.keeper(place, name)
    if not keeper:
        raise Refusal(f"sge_execd cannot start: {name} is off")
    first = FIRST_GROUP + keeper.pid * GROUPS_PER_HOST
    text = f"gid_range {first}-{first + GROUPS_PER_HOST - 1}\nmailer /bin/true\nxterm /bin/true\n"
    is_known = (place.grid_engine / "default/common/local_conf" / name).exists()
    (place.grid_engine / "etc/local").mkdir(exist_ok=True)
    _run(place, "qconf", "-Mconf" if is_known else "-Aconf", _file(place, f"local/{name}", text))


def _wait_for_qmaster(place: Place) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(Refusal):
            _run(place, "qconf", "-sh")
            return
        if time.monotonic() > deadline:
            raise Refusal(f"sge_qmaster did not start: {hosts.last_words(place, 'sge_qmaster')}")
        time.sleep(0.05)


def _wait_for_hosts(place: Place, names: Sequence[str]) -> None:
    """Wait until each host has reported its load: until then, its queue is in an unknown state."""
    deadline = time.monotonic() + PATIENCE
    while missing := [name for name in names if name not in ready_hosts(_run(place, "qstat", "-f", "-xml"))]:
        if time.monotonic() > deadline:
            words = hosts.last_words(place, f"sge_execd-{missing[0]}")
            raise Refusal(f"after {PATIENCE:g} s not all hosts are in {QUEUE} ({', '.join(missing)}): {words}")
        time.sleep(0.1)


def ready_hosts(text: str) -> set[str]:
    """Return the hosts in the output of `qstat -f -xml` whose queue accepts jobs."""
    found = ElementTree.fromstring(text).iter("Queue-List")
    queues = ((each.findtext("name", ""), each.findtext("state", ""), each.findtext("load_avg")) for each in found)
    return {name.rpartition("@")[2] for name, state, load in queues if not state and load is not None}


def _runs(place: Place, name: str, command: str) -> bool:
    return command in {process.command for process in hosts.members(place, name)}


def _start_daemon(place: Place, name: str, command: str) -> None:
    hosts.start_daemon(place, name, [str(_PROGRAMS / command)], {"SGE_ND": "1"})


def _run(place: Place, *command: str) -> str:
    keeper = hosts.keeper(place, CONTROLLER)
    if not keeper:
        raise Refusal("no testbed is up; start one with: scripts/testbed up")
    return hosts.run_inside(place, keeper.pid, command)


def _file(place: Place, name: str, text: str) -> str:
    path = place.grid_engine / "etc" / name
    path.write_text(text)
    return str(path)


def _with_values(text: str, values: dict[str, str]) -> str:
    """Return a configuration with these values; a value may continue in lines that begin with a space."""
    lines = text.replace("\\\n", " ").splitlines()
    kept = [line for line in lines if line.split()[:1] and line.split()[0] not in values]
    return "".join(f"{line}\n" for line in [*kept, *(f"{name} {value}" for name, value in values.items())])
