"""Makes a Job from parsed options and from defaults, which the command line overrides."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxrun.cli.click_options import AUTOMATIC, PER_CORE, PER_GPU
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.protocol.flight_file import LOCKSTEP_FAIL, LOCKSTEP_STRICT
from jaxrun.protocol.names import GANG_ADDRESS, GANG_TOKEN, POD_MARKER
from jaxrun.protocol.settings import CACHE_AUTO, CACHE_OFF
from jaxrun.spec.backends import ATTACH, HOSTS, LOCAL, understands
from jaxrun.spec.job.combinations import check_backend, check_options, check_per_node, contradicted_defaults
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.option_declaration import options_of
from jaxrun.spec.job.options import HOSTS_AUTO, POD_WAIT_S, UNATTENDED_STALL_S
from jaxrun.spec.job.worker_options import POD_INIT_TIMEOUT_S

if TYPE_CHECKING:
    from pathlib import Path

_NAMED_HOSTS = {"host_list", "hostfile"}
# Options that only one of the backends for named hosts has.
_OPTIONS_OF = {"mpirun": {"mpirun", "mpi_args"}, "ssh": {"remote_python", "tunnel"}}


def make_job(
    values: Mapping[str, Any], environ: Mapping[str, str], default_env: Mapping[str, str] | None = None
) -> Job:
    """Make the Job of the parsed options; options that were not given keep their defaults. Raises UsageError.

    default_env:  variables for the workers, to which --env-file and --env add
    """
    given = _given(values)
    check_backend(given)
    if given.get("hosts") == HOSTS_AUTO:
        _resolve_hosts(given, environ)
    if "host_rank" in given:
        given["backend"] = HOSTS
    if "backend" not in given and (backend := _backend_for_hosts(given, environ)):
        given["backend"] = backend
    _resolve_processes_per_node(given)
    given["env"] = {
        **(default_env or {}),
        **read_variables(given.get("env_files", ()), given.get("assignments", ()), environ),
        **{name: environ[name] for name in (GANG_ADDRESS, GANG_TOKEN) if name in environ},
    }
    for field, option in options_of(Job):
        if given.get(field.name) is True:
            given[field.name] = option.kind.on
    if given.get("compile_cache", "") not in ("", CACHE_OFF, CACHE_AUTO):
        given["compile_cache"] = os.path.abspath(given["compile_cache"])
    unattended = environ.get("CI", "").lower() not in ("", "0", "false")
    if "stall_timeout" not in given and (unattended or given.get("lockstep") in (LOCKSTEP_FAIL, LOCKSTEP_STRICT)):
        given["stall_timeout"] = UNATTENDED_STALL_S
    if given.get("backend") in (HOSTS, ATTACH) and environ.get(POD_MARKER):
        given.setdefault("init_timeout", POD_INIT_TIMEOUT_S)
        if given.get("max_restarts"):
            given.setdefault("wait_hosts", POD_WAIT_S)
    job = Job(**given)
    check_options(job)
    return job


def without_effect(values: Mapping[str, Any], defaults: Collection[str], environ: Mapping[str, str]) -> set[str]:
    """Return those of `defaults` (names of values) that contradict other options or that the backend ignores."""
    given = _given(values)
    has_host_rank = "host_rank" in given or given.get("hosts") == HOSTS_AUTO
    backend = HOSTS if has_host_rank else given.get("backend", LOCAL)
    if "backend" not in given and not has_host_rank:
        typed = {name: value for name, value in given.items() if name not in defaults}
        backend = _backend_for_hosts(typed, environ) or backend
    ignored = {field.name for field, option in options_of(Job) if not understands(backend, option)}
    found = ignored & given.keys() & set(defaults)
    if "host_rank" in given and "host_rank" not in defaults:
        found |= {"backend"} & set(defaults)
    return found | contradicted_defaults(given, defaults)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _resolve_hosts(given: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Replace --hosts auto with values from the pod or the cloud. Raises UsageError if they contradict an option."""
    from jaxrun.spec.engines.host_info import find_host_info

    found = find_host_info(environ)
    if given.setdefault("host_rank", found.index) != found.index:
        raise UsageError(f"--host-rank {given['host_rank']}, but by its variables this is host {found.index}")
    given["hosts"] = found.count
    if found.head:
        given.setdefault("head", found.head)
    if found.processes and not given.keys() & {"processes", "processes_per_host", "processes_per_node"}:
        given["processes_per_host"] = found.processes


def _backend_for_hosts(given: Mapping[str, Any], environ: Mapping[str, str]) -> str:
    """Return the backend for hosts that people name: mpirun if there is one, else ssh; empty if they name none.

    An option that only one of the two has decides.
    """
    if not any(map(given.get, _NAMED_HOSTS)):
        return ""
    if own := [name for name, options in _OPTIONS_OF.items() if any(map(given.get, options))]:
        return own[0]
    from jaxrun.spec.backends.mpirun import find_mpirun

    try:
        find_mpirun("", environ)
    except UnavailableError:
        return "ssh"
    return "mpirun"


def _resolve_processes_per_node(given: dict[str, Any]) -> None:
    """Translate torchrun's --nproc-per-node: processes on each of several hosts, or on this machine."""
    count = given.pop("processes_per_node", None)
    if count == PER_GPU:
        given.setdefault("platform", PER_GPU)
    if count == PER_CORE:
        given.setdefault("platform", "cpu")
        count = len(os.sched_getaffinity(0))
    if count in (None, AUTOMATIC, PER_GPU):
        return
    several = given.get("hosts", 1) > 1 or given.get("backend", LOCAL) != LOCAL
    name = "processes_per_host" if several else "processes"
    check_per_node(count, name, given)
    given[name] = count


def read_variables(
    files: Sequence[Path | str], assignments: Sequence[str], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables of --env-file and --env. Raises UsageError."""
    from pathlib import Path

    from jaxrun.spec.job.env_options import parse_assignment, read_env_file

    env: dict[str, str] = {}
    for path in files:
        env |= read_env_file(Path(path))
    return env | dict(parse_assignment(text, environ) for text in assignments)
