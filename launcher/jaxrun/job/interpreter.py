"""What every interpreter of a job starts with. Apart, because one is started before anything else is decided."""

from __future__ import annotations

from collections.abc import Mapping


def interpreter_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to set, where `environ` is what the user gives: no current directory on the path until the
    program runs, and, unless the user has chosen another, one hash seed for all ranks."""
    values = {"PYTHONSAFEPATH": "1"}
    if environ.get("PYTHONHASHSEED", "random") in ("random", ""):
        values["PYTHONHASHSEED"] = "0"
    return values
