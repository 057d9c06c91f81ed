"""What `jaxrun top` shows, as a value for JSON: docs/schemas/top.json describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxrun.frontends.top.samples import RankSample
from jaxrun.frontends.top.view import View
from jaxrun.protocol.codec import field_values

_STANDING_OUT = ("like others", "slow", "late", "stopped", "failed")


def view_content(run_dir: Path, view: View) -> dict[str, Any]:
    """Return how far each rank is, and what it uses."""
    return {
        "run_dir": str(run_dir.absolute()),
        "phase": view.phase,
        "attempt": view.attempt,
        "seconds": view.seconds,
        "calls_per_second": view.pace,
        "calls_per_step": view.calls_per_step,
        "note": view.note,
        "hosts": [field_values(host) for host in view.hosts],
        "ranks": [_rank_content(sample) for sample in view.samples],
    }


def _rank_content(sample: RankSample) -> dict[str, Any]:
    return {
        **field_values(sample),
        "waits_for": list(sample.waits_for),
        "standing_out": _STANDING_OUT[sample.standing_out],
    }
