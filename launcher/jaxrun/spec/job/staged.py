"""What of a worker's command and environment changes where --stage has copied directories to this host's disk."""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun import RUNTIME
from jaxrun.protocol.stage_messages import staged_path

_PATH_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")


def staged_argv(argv: tuple[str, ...], staged: Mapping[str, str]) -> tuple[str, ...]:
    """`python … -m jaxrun_runtime PROGRAM …` with the copies in place of their sources."""
    at = argv.index(RUNTIME) + 1
    program = argv[at] if argv[at] == "-m" else staged_path(argv[at], staged)
    return (staged_path(argv[0], staged), *argv[1:at], program, *argv[at + 1 :])


def staged_variables(environ: Mapping[str, str], staged: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that hold paths, with the copies in place of their sources."""
    lists = {name: environ[name].split(":") for name in _PATH_VARIABLES if environ.get(name)}
    return {name: ":".join(staged_path(part, staged) for part in parts) for name, parts in lists.items()}
