"""torchrun's own options, so that command lines copied from the web run unchanged.

Each is translated to jaxrun's options. One that has no effect here is accepted, and a line says so. No page of help
shows these options, and `jaxrun attach` has none of them, because torchrun has no such command.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import click

from jaxrun.errors import UnavailableError, UsageError
from jaxrun.spec.backends import LOCAL
from jaxrun.spec.job.option_kinds import DIRECTORY, RANKS

_PREFIX = "torchrun_"  # prefix of the names of their values
_DEFAULT_PORTS = {"--rdzv-endpoint": 29400, "--master-addr": 29500}
_RECORDS = "the run directory keeps all output of all ranks"
_OWN_RENDEZVOUS = "jaxrun has a rendezvous of its own"
# Options without an effect here, and the reason.
_WITHOUT_MEANING = {
    "--standalone": "one machine is jaxrun's default",
    "--rdzv-backend": _OWN_RENDEZVOUS,
    "--rdzv-id": _OWN_RENDEZVOUS,
    "--rdzv-conf": _OWN_RENDEZVOUS,
    "--local-addr": _OWN_RENDEZVOUS,
    "-r/--redirects": _RECORDS,
    "-t/--tee": _RECORDS,
    "--monitor-interval": "jaxrun notices the end of a process at once",
    "--start-method": "jaxrun forks ranks where that is safe",
    "--role": "all ranks have one role",
    "--logs-specs": _RECORDS,
    "--duplicate-stdout-filters": _RECORDS,
    "--duplicate-stderr-filters": _RECORDS,
    "--event-log-handler": "events.jsonl in the run directory has all events",
    "--numa-binding": "--bind auto keeps each rank on the cores next to its GPUs",
    "--signals-to-handle": "jaxrun passes signals on by itself",
    "--virtual-local-rank": "each rank has its own devices alone",
    "--run-path": "a rank runs the program in its own interpreter",
}
_FLAGS = ("--standalone", "--no-python", "--module", "--virtual-local-rank", "--run-path")
_WITH_MEANING = (
    *("--rdzv-endpoint", "--master-addr", "--master-port", "--log-dir", "--local-ranks-filter", "--no-python"),
    "--module",
)
_STREAMS = re.compile(r"[0-3]|([0-9]+:[0-3],?)+")  # values of --redirects and --tee
_HOST_RANGE = re.compile(r"([0-9]+):([0-9]+)")


def parameters() -> list[click.Parameter]:
    """Return the options, which no page of help and no completion shows."""
    return [
        click.Option([*title.split("/"), _name(title)], is_flag=title in _FLAGS, hidden=True)
        for title in (*_WITHOUT_MEANING, *_WITH_MEANING)
    ]


def translate(values: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    """Translate torchrun's options to jaxrun's; returns all values, and a line about options without an effect.

    Raises UsageError if they are insufficient for jaxrun, or contradict its own options.
    """
    given = {title: values[_name(title)] for title in (*_WITHOUT_MEANING, *_WITH_MEANING) if values.get(_name(title))}
    own = {name: value for name, value in values.items() if not name.startswith(_PREFIX)}
    _check_streams(given)
    _resolve_host_range(own)
    ignored = {title: why for title, why in _WITHOUT_MEANING.items() if title in given}
    if "--module" in given:
        own["module"] = True
    if "--log-dir" in given:
        _set(own, "run_dir", DIRECTORY.parse(given["--log-dir"], "--log-dir"), "--log-dir", "--run-dir")
    if "--local-ranks-filter" in given:
        if _has_several_hosts(own):
            ignored["--local-ranks-filter"] = "on several hosts, --only-rank counts the ranks of the whole job"
        else:
            ranks = RANKS.parse(given["--local-ranks-filter"], "--local-ranks-filter")
            _set(own, "only_ranks", ranks, "--local-ranks-filter", "--only-rank")
    _resolve_address(own, given, ignored, environ)
    if "--no-python" in given:
        own["program"] = _without_python(own.get("program") or ())
    return own, _describe(ignored)


def _resolve_host_range(own: dict[str, Any]) -> None:
    """Turn `--nnodes MIN:MAX` into a number of hosts, and --min-hosts if fewer are acceptable."""
    found = _HOST_RANGE.fullmatch(str(own.get("hosts")))
    if found is None:
        return
    least, most = int(found[1]), int(found[2])
    if not 1 <= least <= most:
        raise UsageError(f"-N/--hosts {found[0]}: MIN:MAX is expected, with 1 or more, and no more than MAX")
    own["hosts"] = most
    if least < most:
        _set(own, "min_hosts", least, f"-N/--hosts {found[0]}", "--min-hosts")


def _check_streams(given: Mapping[str, str]) -> None:
    """Raise UsageError for srun's `-t 10`, and for other words that cannot be values of torchrun's -t and -r."""
    for title in ("-r/--redirects", "-t/--tee"):
        if title in given and _STREAMS.fullmatch(given[title]) is None:
            hint = "; Slurm's -t is --time here" if title.startswith("-t") else ""
            raise UsageError(f"{title} {given[title]}: torchrun takes 0 to 3, or such a number for each rank{hint}")


def _resolve_address(
    own: dict[str, Any], given: Mapping[str, str], ignored: dict[str, str], environ: Mapping[str, str]
) -> None:
    """Turn the address of torchrun's rendezvous into host 0's; one machine needs neither."""
    title = next((name for name in _DEFAULT_PORTS if name in given), "")
    if not title:
        if "--master-port" in given:
            ignored["--master-port"] = "the address needs --master-addr too"
        return
    if not _has_several_hosts(own) or (own.get("backend") or LOCAL) != LOCAL:
        ignored[title] = "jaxrun finds an address and a free port"
        return
    address = given[title]
    if not re.search(r":[0-9]+$", address):
        address = f"{address}:{given.get('--master-port', _DEFAULT_PORTS[title])}"
    if own.get("host_rank") is None:
        own["host_rank"] = _host_rank_of_task(own["hosts"], environ)
    if own["host_rank"] is None:
        raise UsageError(
            f"{title} {given[title]} says where the hosts meet, but not which of the {own['hosts']} this is; on each, "
            f"type --host-rank (torchrun's --node-rank), from 0, and --head {address}"
        )
    _set(own, "head", address, title, "--head")


def _host_rank_of_task(hosts: Any, environ: Mapping[str, str]) -> int | None:
    """Return this host's number if srun or mpirun has started one command on each of the `hosts`, else None.

    So `srun torchrun --nnodes 2 --rdzv-endpoint $HEAD:29500 …` runs, where torchrun numbers the hosts by itself.
    """
    from jaxrun.spec.engines.rank_info import find_rank_info

    try:
        found = find_rank_info(environ)
    except (UnavailableError, UsageError):  # broken variables, or a rank of another job
        return None
    return found.rank if found is not None and found.size == hosts else None


def _has_several_hosts(own: Mapping[str, Any]) -> bool:
    return own.get("host_rank") is not None or own.get("hosts") not in (None, 1)


def _without_python(program: tuple[str, ...]) -> tuple[str, ...]:
    """Remove `python` and its -u. Raises UsageError if the rest is no Python program: a rank is a Python process."""
    words = list(program)
    if words and words[0].endswith(".py"):
        return program
    if not words or re.fullmatch(r"python[0-9.]*", os.path.basename(words.pop(0))) is None:
        raise UsageError(
            "--no-python is for programs that are not Python's, which a rank must be; name the Python program itself, "
            "and a command around each rank with --wrap COMMAND"
        )
    while words and words[0] == "-u":  # ranks write each line at once
        words.pop(0)
    if not words or words[0].startswith("-"):
        raise UsageError("--no-python: leave it and python out: jaxrun [OPTIONS] PROGRAM, or jaxrun -m MODULE")
    return tuple(words)


def _set(own: dict[str, Any], name: str, value: Any, theirs: str, ours: str) -> None:
    if own.get(name) not in (None, (), "", value):
        raise UsageError(f"{theirs} and {ours} say the same; give one of them")
    own[name] = value


def _describe(ignored: Mapping[str, str]) -> str:
    """Write one line about all of these options, by reason."""
    by_reason: dict[str, list[str]] = {}
    for title, why in ignored.items():
        by_reason.setdefault(why, []).append(title.rpartition("/")[2])
    parts = [f"{', '.join(titles)} ({why})" for why, titles in by_reason.items()]
    return f"of torchrun's options these have no effect here: {'; '.join(parts)}" if parts else ""


def _name(title: str) -> str:
    return _PREFIX + title.rpartition("/")[2].lstrip("-").replace("-", "_")
