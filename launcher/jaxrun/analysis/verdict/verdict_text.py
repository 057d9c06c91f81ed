"""Formats a verdict as the last screen of a job: what happened, where, and what to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxrun.analysis.diagnosis.consequences import Fate
from jaxrun.analysis.verdict.goodput_text import format_goodput, is_worth_a_line
from jaxrun.analysis.verdict.verdict import Verdict
from jaxrun.terminal import A_FILE, TerminalFormat, wrap_prose
from jaxrun.text import agree, format_ranks, format_seconds, format_sizes, group_alike, plural

_MAX_TRACEBACK = 8_000  # characters shown; the rank's log has the whole text


def format_report(
    verdict: Verdict, run_dir: Path | None, terminal: TerminalFormat = A_FILE, divergence_left: str | None = None
) -> str:
    """Return the report without a final newline.

    run_dir:          as people may type it; None if there is no run directory
    divergence_left:  the part of verdict.divergence that the screen has not shown yet; None for all of it
    """
    divergence = [*_divergence(verdict, divergence_left)]
    if verdict.is_ok:
        done = [terminal.dim(f"jaxrun: {_done(verdict)}")]
        more = (*verdict.details, *divergence, format_sizes(verdict.sizes), *_goodput(verdict))
        return "\n".join([*done, *(terminal.rewrap(line) for line in more if line)])
    lines = [terminal.red(terminal.rewrap(f"jaxrun: {verdict.headline}"))]
    if verdict.intro or verdict.traceback:
        traceback = _clip(verdict.traceback.rstrip("\n"), verdict, run_dir)
        headline = terminal.red(terminal.rewrap(verdict.headline))
        lines = ["", *filter(None, [verdict.intro]), traceback, "", headline]
    lines += (terminal.rewrap(text) for text in (*divergence, *_explanation(verdict), *verdict.details))
    lines += (terminal.dim(terminal.rewrap(text)) for text in _context(verdict, run_dir))
    return "\n".join(lines)


def headline_of(verdict: Verdict) -> str:
    """The first line of the report, or the line that says most."""
    return _done(verdict) if verdict.is_ok else verdict.headline


def _context(verdict: Verdict, run_dir: Path | None) -> Iterator[str]:
    """Yield the other ranks, where to read more, and the exit code."""
    if verdict.victims:
        yield _victims(verdict.victims, verdict.stopping)
    if verdict.reached:
        yield f"{verdict.reached}."
    if size := format_sizes(verdict.sizes):
        yield size
    yield from _goodput(verdict)
    if run_dir is not None:
        yield f"logs: {run_dir / verdict.log if verdict.log else run_dir}"
        yield f"details: jaxrun explain {run_dir}"
    if verdict.no_restart:
        yield f"not restarted: {verdict.no_restart}."
    yield f"exit {verdict.exit_code}"


def _goodput(verdict: Verdict) -> Iterator[str]:
    if verdict.goodput is not None and is_worth_a_line(verdict.goodput):
        yield format_goodput(verdict.goodput)


def _divergence(verdict: Verdict, left: str | None) -> Iterator[str]:
    if not verdict.divergence:
        return
    shown = left is not None and left != verdict.divergence
    left = verdict.divergence if left is None else left
    if verdict.is_ok:
        step, end = "step (above)" if shown else "step", ":" if left else "."
        yield f"but its ranks were not in {step}, so what they computed together may be wrong{end}"
    elif shown and verdict.outcome != "diverged":  # whose headline says so
        yield "the ranks were not in step (above)."
    if left:
        yield left


def _clip(traceback: str, verdict: Verdict, run_dir: Path | None) -> str:
    """Leave out the middle of a very long text."""
    if len(traceback) <= _MAX_TRACEBACK:
        return traceback
    half = _MAX_TRACEBACK // 2
    where = f", which {run_dir / verdict.log} holds" if run_dir is not None and verdict.log else ""
    left_out = f"… {len(traceback) - 2 * half:,} characters left out{where} …"
    return f"{traceback[:half]}\n{left_out}\n{traceback[-half:]}"


def _explanation(verdict: Verdict) -> Iterator[str]:
    """Yield what a known error means; the error itself is shown as well."""
    for name, text in (("what this means", verdict.means), ("try", verdict.advice)):
        if text:
            yield wrap_prose(f"{name}: {text}")
    if verdict.link:
        yield f"see: {verdict.link}"


def _victims(fates: Mapping[int, str], stopping: float | None) -> str:
    groups = group_alike(fates)
    others = plural(len(fates), "other")
    later = f" {format_seconds(stopping)} later" if stopping is not None else ""
    none = "it had no fault of its own" if len(fates) == 1 else "none of them had a fault of its own"
    if len(groups) == 1:
        ((fate, _),) = groups
        text = f"{others} {_agree(fate, len(fates))}"
        if fate == Fate.STOPPED:
            return f"{text}{later}; {none}."
        if fate == Fate.FINISHED:
            return f"{text}; {none}."
    else:
        text = f"{others}: {', '.join(f'{format_ranks(ranks)} {_agree(fate, len(ranks))}' for fate, ranks in groups)}"
    return f"{text}; all gone{later}." if later else f"{text}."


def _agree(fate: str, count: int) -> str:
    """Write a fate in the singular or plural; what follows the verb may quote the program, and is left alone."""
    verb, _, rest = fate.partition(" ")
    return agree(fate, count) if fate in tuple(Fate) else f"{agree(verb, count)} {rest}"


def _done(verdict: Verdict) -> str:
    if verdict.startup is None or verdict.run is None:
        return "done"
    restarts = f", {plural(len(verdict.earlier), 'restart')}" if verdict.earlier else ""
    return f"done in {format_seconds(verdict.seconds)} (start-up {format_seconds(verdict.startup)}{restarts})"
