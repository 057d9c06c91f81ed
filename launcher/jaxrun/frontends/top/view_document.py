"""What `jaxrun top` shows, as a document."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import asdict

from jaxrun.analysis.lockstep.told_progress import seconds_left
from jaxrun.frontends.top.samples import RankSample
from jaxrun.frontends.top.view import View
from jaxrun.protocol.flight import ToldStep
from jaxrun.records.document_types import ToldProgress, TopDocument, TopHost, TopRank


def view_document(run_dir: Path, view: View) -> TopDocument:
    """Return how far each rank is, and what it uses."""
    return TopDocument(
        run_dir=str(run_dir.absolute()),
        phase=view.phase,
        attempt=view.attempt,
        seconds=view.seconds,
        calls_per_second=view.pace.rate,
        calls_per_step=view.pace.per_step,
        calls=view.pace.made,
        idle_s=view.pace.idle_s,
        note=view.note,
        progress=_progress(view.told) if view.told is not None else None,
        hosts=tuple(TopHost(**asdict(host)) for host in view.hosts),
        ranks=tuple(map(_rank, view.samples)),
    )


def _progress(told: ToldStep) -> ToldProgress:
    left = seconds_left(told)
    return ToldProgress(
        step=told.step,
        total=told.total or None,
        steps_per_second=round(told.per_second, 6) or None,
        seconds_left=round(left, 3) if left is not None else None,
    )


def _rank(sample: RankSample) -> TopRank:
    return TopRank(**{**asdict(sample), "standing_out": sample.standing_out.words})
