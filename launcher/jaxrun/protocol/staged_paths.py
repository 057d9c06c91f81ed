"""Paths that lead to the copies of --stage, which `staged` has by source: {"/home/me/venv": "/tmp/…/copy"}."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

from jaxrun import RUNTIME

_STAGED = "JAXRUN_STAGED"
_PATH_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX")


def staged_path(path: str, staged: Mapping[str, str]) -> str:
    """Where `path` is in the copies; the path itself if it is in none."""
    full = os.path.abspath(path)
    for source, copy in staged.items():
        if full == source or full.startswith(f"{source}/"):
            return copy + full[len(source) :]
    return path


def use_copies(
    argv: tuple[str, ...], environ: Mapping[str, str], staged: Mapping[str, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return `python … -m jaxrun_runtime PROGRAM …`, and the variables that name files, with copies for sources."""
    at = argv.index(RUNTIME) + 1
    program = argv[at] if argv[at] == "-m" else staged_path(argv[at], staged)
    lists = {name: environ[name].split(":") for name in _PATH_VARIABLES if environ.get(name)}
    variables = {name: ":".join(staged_path(part, staged) for part in parts) for name, parts in lists.items()}
    argv = (staged_path(argv[0], staged), *argv[1:at], program, *argv[at + 1 :])
    return argv, {**variables, _STAGED: json.dumps(staged)}


def read_staged(environ: Mapping[str, str]) -> dict[str, str]:
    """The copies that the launcher or an agent has told this worker of."""
    return dict(json.loads(environ.get(_STAGED, "{}")))
