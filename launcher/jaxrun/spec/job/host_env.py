"""Reads which host of a job this is from variables of the pod or the cloud (--hosts auto): one table, tried in order.

These platforms number hosts, and each host runs one command; engines that number processes are in cluster_env.py.
jaxrun's own variables (JAXRUN_HOSTS, JAXRUN_HOST_RANK, JAXRUN_HEAD) override them, and add what a platform does not
set. Each entry stands before the entries whose variables its hosts have, too, so an indexed Job is last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

from msgspec import Struct

from jaxrun.errors import UsageError
from jaxrun.protocol.names import HEAD, HOST_RANK, HOSTS, RANK
from jaxrun.spec.job.options import HOSTS_AUTO
from jaxrun.text import format_columns

HEAD_PORT = 7777  # port of host 0 if the platform names no port
COUNT, INDEX = HOSTS, HOST_RANK
_NUMBER = re.compile(r"[0-9]{1,9}")
_NAMED_COUNTS = (HOSTS_AUTO, "gpu", "cpu")  # words for numbers of processes, as torchrun accepts them: jaxrun decides


class HostInfo(Struct, frozen=True):
    """The place of this host in its job.

    index:      the number of this host, from 0
    count:      the number of hosts in the job
    head:       "host:port" where host 0 listens; empty if there is only one host
    processes:  the number of processes per host; None if jaxrun decides
    """

    index: int
    count: int
    head: str = ""
    processes: int | None = None


class Source(Struct, frozen=True):
    """Variables that yield one value: `make` gets their values in the order of `names`.

    A `*` in a name stands for any text; exactly one variable must match.
    """

    names: tuple[str, ...]
    make: Callable[..., str] = lambda value: str(value)

    def read(self, environ: Mapping[str, str], title: str) -> str:
        """Return the value; empty if a variable is not set. Raises UsageError if the value makes no sense."""
        names = [_find_name(name, environ, title) for name in self.names]
        if not all(environ.get(name) for name in names):
            return ""
        try:
            return self.make(*(environ[name] for name in names))
        except (ValueError, LookupError, TypeError, AttributeError):
            shown = ", ".join(f"{name}={environ[name]!r}" for name in names)
            raise UsageError(f"--hosts auto: {shown}, as {title} has set it, makes no sense here") from None


class HostEnv(Struct, frozen=True):
    """A platform that numbers the hosts of a job, and the variables that it sets on each host.

    marker:    any of these variables shows that the platform has started this process
    index, count, head, port, processes:  the sources of these values; None if there is none
    excluded:  variables that show that the numbers do not mean hosts
    is_sure:   nobody else sets variables of these names, so that two such platforms must agree
    """

    title: str
    marker: tuple[str, ...]
    index: Source
    count: Source | None = None
    head: Source | None = None
    port: Source | None = None
    processes: Source | None = None
    excluded: tuple[str, ...] = ()
    is_sure: bool = False


def _of(*names: str, make: Callable[..., str] = lambda value: str(value)) -> Source:
    return Source(names, make)


def _xpk_index(job: str, processes_in_job: str, index: str) -> str:
    return str(int(job) * int(processes_in_job) + int(index))


HOST_ENVS = (
    HostEnv(
        "Kubeflow Trainer's torch runtime",
        ("PET_NODE_RANK", "PET_NNODES"),
        index=_of("PET_NODE_RANK"),
        count=_of("PET_NNODES"),
        head=_of("PET_MASTER_ADDR"),
        port=_of("PET_MASTER_PORT"),
        processes=_of("PET_NPROC_PER_NODE"),
        is_sure=True,
    ),
    HostEnv(
        "XPK on CPUs",
        ("JAX_PROCESS_COUNT", "PROCESSES_IN_JOB"),
        index=_of("JOB_INDEX", "PROCESSES_IN_JOB", "JOB_COMPLETION_INDEX", make=_xpk_index),
        count=_of("JAX_PROCESS_COUNT"),
        head=_of("JAX_COORDINATOR_ADDRESS"),
    ),
    HostEnv(
        "Kubeflow Trainer's JAX runtime",
        ("JAX_PROCESS_ID", "JAX_NUM_PROCESSES"),
        index=_of("JAX_PROCESS_ID"),
        count=_of("JAX_NUM_PROCESSES"),
        head=_of("JAX_COORDINATOR_ADDRESS"),
        is_sure=True,
    ),
    HostEnv(
        "AXLearn",
        ("DISTRIBUTED_COORDINATOR",),
        index=_of("PROCESS_ID"),
        count=_of("NUM_PROCESSES"),
        head=_of("DISTRIBUTED_COORDINATOR"),
    ),
    HostEnv(
        "LeaderWorkerSet",
        ("LWS_WORKER_INDEX", "LWS_LEADER_ADDRESS"),
        index=_of("LWS_WORKER_INDEX"),
        count=_of("LWS_GROUP_SIZE"),
        head=_of("LWS_LEADER_ADDRESS"),
        is_sure=True,
    ),
    HostEnv(
        "SkyPilot",
        ("SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"),
        index=_of("SKYPILOT_NODE_RANK"),
        count=_of("SKYPILOT_NUM_NODES"),
        head=_of("SKYPILOT_NODE_IPS", make=lambda ips: ips.split()[0]),
        is_sure=True,
    ),
    HostEnv(
        "dstack",
        ("DSTACK_NODE_RANK", "DSTACK_NODES_NUM"),
        index=_of("DSTACK_NODE_RANK"),
        count=_of("DSTACK_NODES_NUM"),
        head=_of("DSTACK_MASTER_NODE_IP"),
        is_sure=True,
    ),
    HostEnv(
        "Lepton",
        ("LEPTON_JOB_WORKER_INDEX", "LEPTON_JOB_TOTAL_WORKERS"),
        index=_of("LEPTON_JOB_WORKER_INDEX"),
        count=_of("LEPTON_JOB_TOTAL_WORKERS"),
        head=_of("LEPTON_JOB_SERVICE_PREFIX", "LEPTON_SUBDOMAIN", make=lambda prefix, domain: f"{prefix}-0.{domain}"),
        is_sure=True,
    ),
    HostEnv(
        "SageMaker",
        ("SM_HOSTS", "SM_CURRENT_HOST"),
        index=_of("SM_HOSTS", "SM_CURRENT_HOST", make=lambda hosts, own: str(json.loads(hosts).index(own))),
        count=_of("SM_HOSTS", make=lambda hosts: str(len(json.loads(hosts)))),
        head=_of("SM_HOSTS", make=lambda hosts: str(json.loads(hosts)[0])),
    ),
    HostEnv(
        "RunPod",
        ("PRIMARY_ADDR",),
        index=_of("NODE_RANK"),
        count=_of("NUM_NODES"),
        head=_of("PRIMARY_ADDR"),
        port=_of("PRIMARY_PORT"),
        processes=_of("NUM_TRAINERS"),
    ),
    HostEnv(
        "XPK on GPUs",
        ("NODE_RANK", "NNODES"),
        index=_of("NODE_RANK"),
        count=_of("NNODES"),
        head=_of("JAX_COORDINATOR_ADDRESS"),
        port=_of("JAX_COORDINATOR_PORT"),
    ),
    HostEnv(
        "Volcano's plugin pytorch, PAI or another platform with RANK for hosts",
        ("MASTER_ADDR",),
        index=_of("RANK"),
        count=_of("WORLD_SIZE"),
        head=_of("MASTER_ADDR"),
        port=_of("MASTER_PORT"),
        processes=_of("NPROC_PER_NODE"),
        excluded=("LOCAL_RANK", "TORCHELASTIC_RUN_ID"),
    ),
    HostEnv(
        "Volcano",
        ("VC_TASK_INDEX",),
        index=_of("VC_TASK_INDEX"),
        count=_of("VC_*_HOSTS", make=lambda hosts: str(len(hosts.split(",")))),
        head=_of("VC_*_HOSTS", make=lambda hosts: str(hosts.split(",")[0])),
    ),
    HostEnv("an indexed Job of Kubernetes", ("JOB_COMPLETION_INDEX",), index=_of("JOB_COMPLETION_INDEX")),
)


def find_host_info(environ: Mapping[str, str]) -> HostInfo:
    """Read the place of this host from the variables of the first platform that has set any.

    Raises UsageError if no platform has, or if variables are missing, contradict each other or make no sense.
    """
    if RANK in environ:
        raise UsageError(
            f"--hosts auto: this process is rank {environ[RANK]} of a jaxrun job already ({RANK} is set), and is not a "
            "host of another; leave out --hosts auto"
        )
    platform = find_platform(environ)
    if platform is None and not environ.get(INDEX):
        raise UsageError(_nothing_found())
    index, of_index = _read_number(platform, "index", INDEX, environ, "which host this is")
    title = f"this is host {index} by the variables of {platform.title}" if platform else f"{INDEX} is {index}"
    count, of_count = _read_number(platform, "count", COUNT, environ, f"{title}; how many hosts there are")
    if index >= count:
        names = " and ".join(dict.fromkeys((of_index, of_count)))
        raise UsageError(f"--hosts auto: {title}, but there are {count} hosts, numbered from 0; check {names}")
    if platform is not None and platform.is_sure and INDEX not in environ:
        _refuse_contradiction(platform, environ, f"host {index} of {count} by {of_index} and {of_count}", index, count)
    head = _read_head(platform, environ, title) if count > 1 else ""
    return HostInfo(index, count, head, _read_processes(platform, environ))


def find_platform(environ: Mapping[str, str]) -> HostEnv | None:
    """Return the first platform of the table that has set one of its variables; None if there is none."""
    found = next((each for each in HOST_ENVS if any(name in environ for name in each.marker)), None)
    wrong = next((name for name in found.excluded if name in environ), "") if found else ""
    if found and wrong:
        raise UsageError(
            f"--hosts auto: {wrong} is set, so {' and '.join(found.index.names)} numbers a torchrun process here, "
            "not a host; start jaxrun where torchrun was started"
        )
    return found


def _refuse_contradiction(platform: HostEnv, environ: Mapping[str, str], shown: str, index: int, count: int) -> None:
    """Raise UsageError if the variables of another platform say that this is another host."""
    for other in HOST_ENVS:
        if not other.is_sure or other is platform or other.count is None:
            continue
        theirs = other.index.read(environ, other.title), other.count.read(environ, other.title)
        if all(theirs) and theirs != (str(index), str(count)):
            names = " and ".join((*other.index.names, *other.count.names))
            raise UsageError(
                f"--hosts auto: this is {shown} ({platform.title}), but host {theirs[0]} of {theirs[1]} by {names} "
                f"({other.title}); unset the ones that are left over, or set {INDEX}, {COUNT} and {HEAD}"
            )


def _find_name(name: str, environ: Mapping[str, str], title: str) -> str:
    if "*" not in name:
        return name
    fitting = sorted(each for each in environ if fnmatchcase(each, name))
    if len(fitting) > 1:
        raise UsageError(
            f"--hosts auto: {title} has several groups of hosts ({', '.join(fitting)}), and does not number them "
            f"together; set {INDEX}, {COUNT} and {HEAD}"
        )
    return fitting[0] if fitting else name


def _read(platform: HostEnv | None, attribute: str, own: str, environ: Mapping[str, str], what: str) -> tuple[str, str]:
    """Return a value and the names of its variables. Raises UsageError that says where to set a missing `what`."""
    if environ.get(own, HOSTS_AUTO) not in ("", HOSTS_AUTO):
        return environ[own], own
    source: Source | None = getattr(platform, attribute) if platform else None
    if platform and source and (value := source.read(environ, platform.title)):
        return value, " and ".join(source.names)
    lacking = [name for name in source.names if not environ.get(name)] if source else []
    unset = f" ({', '.join(lacking)} of {platform.title})" if platform and lacking else ""
    raise UsageError(f"--hosts auto: {what} is not set{unset}; set {own} on all hosts, as in {_EXAMPLES[own]}")


_EXAMPLES = {COUNT: f"{COUNT}=4", INDEX: f"{INDEX}=2", HEAD: f"{HEAD}=train-0.train:{HEAD_PORT}"}


def _read_number(
    platform: HostEnv | None, attribute: str, own: str, environ: Mapping[str, str], what: str
) -> tuple[int, str]:
    """Return a number and the names of its variables. Raises the errors of `_read`."""
    value, names = _read(platform, attribute, own, environ, what)
    if not _NUMBER.fullmatch(value):
        raise UsageError(f"--hosts auto: {names} must be a whole number, not {value!r}")
    return int(value), names


def _read_head(platform: HostEnv | None, environ: Mapping[str, str], title: str) -> str:
    value, names = _read(platform, "head", HEAD, environ, f"{title}; the address of host 0")
    if "$(" in value:
        raise UsageError(f"--hosts auto: {names}={value!r} names a variable that was not replaced; is that one set?")
    host, _, port = value.rpartition(":")
    if host and port.isdecimal() and (":" not in host or host.endswith("]")):
        return value
    given = platform.port.read(environ, platform.title) if platform and platform.port and names != HEAD else ""
    if given and not given.isdecimal():
        assert platform is not None and platform.port is not None
        raise UsageError(f"--hosts auto: {platform.port.names[0]} must be the number of a port, not {given!r}")
    return f"{f'[{value}]' if ':' in value and not value.startswith('[') else value}:{given or HEAD_PORT}"


def _read_processes(platform: HostEnv | None, environ: Mapping[str, str]) -> int | None:
    value = platform.processes.read(environ, platform.title) if platform and platform.processes else ""
    if value in ("", *_NAMED_COUNTS):
        return None
    if not _NUMBER.fullmatch(value) or not int(value):
        assert platform is not None and platform.processes is not None
        raise UsageError(f"--hosts auto: {platform.processes.names[0]} must be a number of processes, not {value!r}")
    return int(value)


def _nothing_found() -> str:
    rows = [(f"  {each.title}", ", ".join(each.marker)) for each in HOST_ENVS]
    return "\n".join(
        [
            "--hosts auto: nothing says which host this is; looked for the variables of",
            *format_columns(rows),
            f"Set {INDEX}, {COUNT} and {HEAD}, or say it: jaxrun --hosts 4 --host-rank 2 --head h1:{HEAD_PORT} PROGRAM",
        ]
    )
