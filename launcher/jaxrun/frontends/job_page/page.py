"""Puts style, script and document into one page. Nothing of the job is read as HTML or as script."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from jaxrun.errors import JaxrunError, UsageError
from jaxrun.frontends.job_page.document import LiveJob, whole_document
from jaxrun.frontends.top.watch import read_once
from jaxrun.job_client.running_job import find_running_job
from jaxrun.records.rundir.rundir import VERDICT_FILE

_SCRIPTS = ("values", "ranks", "panels", "timeline_data", "timeline_draw", "timeline_input", "page")


def format_page(document: Mapping[str, Any], *, is_served: bool = False) -> str:
    """Return the page; if `is_served`, it asks the server that it comes from for news."""
    report = (document["verdict"] or {}).get("report", "")
    return Template(_read("page.html")).substitute(
        title=html.escape(document["title"]),
        served="yes" if is_served else "no",
        policy=policy(is_served=is_served),
        style=_style(),
        script=_script(),
        report=html.escape(report),
        data=to_json(document),
    )


@functools.cache
def policy(*, is_served: bool) -> str:
    """Return the Content-Security-Policy: the page's own style and script run, and nothing else is loaded."""
    connect = "connect-src 'self'; " if is_served else ""
    return (
        f"default-src 'none'; script-src '{_hash(_script())}'; style-src '{_hash(_style())}'; {connect}"
        "base-uri 'none'; form-action 'none'"
    )


def write_page(run_dir: Path, file: Path) -> str:
    """Write the page of a job, running or over; returns a line for people.

    Raises UsageError if there is no such job, or the file cannot be written.
    """
    run_dir = run_dir.resolve()  # the page may be opened anywhere
    live = None if (run_dir / VERDICT_FILE).exists() else _look(run_dir)
    document = whole_document(run_dir, live, is_over=live is None, has_outputs=True)
    try:
        file.write_text(format_page(document), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"cannot write {file}: {error.strerror}") from None
    return f"wrote {file}; open it in any browser"


def _look(run_dir: Path) -> LiveJob | None:
    try:
        return LiveJob("", read_once(find_running_job(run_dir, "jaxrun explain")))
    except JaxrunError:
        return None  # its launcher was killed, or runs on another host


def to_json(data: Any) -> str:
    """Return JSON that may be inside a script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c").encode("utf-8", "backslashreplace").decode()


@functools.cache
def _style() -> str:
    return _read("page.css")


@functools.cache
def _script() -> str:
    return "".join(_read(f"{name}.js") for name in _SCRIPTS)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _read(name: str) -> str:
    return files("jaxrun.frontends.job_page").joinpath(name).read_text(encoding="utf-8")
