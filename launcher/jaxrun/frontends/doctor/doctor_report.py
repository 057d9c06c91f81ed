"""The findings of a doctor, for people and for programs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import asdict

from jaxrun.analysis.diagnosis.fabric import check_fabric
from jaxrun.analysis.diagnosis.findings import Finding, Level
from jaxrun.errors import EXIT_UNAVAILABLE
from jaxrun.frontends.doctor.hosts import check_cores, check_devices, check_limits, check_storage
from jaxrun.frontends.doctor.network import check_clocks, check_names, check_network, check_proxies
from jaxrun.frontends.doctor.observation import Observation
from jaxrun.frontends.doctor.start import check_slurm, check_start, check_versions
from jaxrun.protocol.codec import format_json
from jaxrun.records.document_types import CollectiveTiming, DoctorConnection, DoctorDocument, DoctorFinding
from jaxrun.terminal import PROSE_WIDTH, TerminalFormat
from jaxrun.text import format_rate, plural

_CHECKS: Mapping[str, Callable[[Observation], Iterator[Finding]]] = {
    "start": check_start,
    "Slurm": check_slurm,
    "versions": check_versions,
    "names": check_names,
    "proxies": check_proxies,
    "network": check_network,
    "fabric": lambda seen: check_fabric([(one.host, one.fabric) for _, one in sorted(seen.facts.items())]),
    "clocks": check_clocks,
    "storage": check_storage,
    "limits": check_limits,
    "cores": check_cores,
    "devices": check_devices,
}
_MARKS = {Level.OK: "ok", Level.WARNING: "warn", Level.FAILURE: "FAIL"}
_SMALL_BYTES = 2**16  # for smaller messages, time matters, not bandwidth

Findings = Sequence[tuple[str, Finding]]  # each with the name of its check


def judge(seen: Observation) -> Findings:
    """Return all findings, in the order of the checks."""
    return [(name, finding) for name, check in _CHECKS.items() for finding in check(seen)]


def exit_code(seen: Observation, findings: Findings) -> int:
    """Return 0 if a job can run, or the exit code of the signal if the doctor's job was interrupted."""
    if seen.verdict is not None and seen.verdict.outcome == "interrupted":
        return seen.verdict.exit_code
    return EXIT_UNAVAILABLE if any(finding.level is Level.FAILURE for _, finding in findings) else 0


def format_report(seen: Observation, findings: Findings, terminal: TerminalFormat) -> str:
    """Return the table for people: problems in full, everything else in a line each."""
    width = min(terminal.width or PROSE_WIDTH, PROSE_WIDTH)
    lines = [line for name, finding in findings for line in _format_finding(name, finding, width, terminal)]
    if seen.timings:
        lines += ["", *_format_timings(seen)]
    return "\n".join([*lines, "", _summary(findings)])


def to_json(seen: Observation, findings: Findings) -> str:
    found = DoctorDocument(
        exit_code=exit_code(seen, findings),
        findings=tuple(DoctorFinding(check=name, **asdict(finding)) for name, finding in findings),
        hosts=seen.hosts,
        connections=tuple(
            DoctorConnection(
                from_=one, to=to, interface=seen.interfaces.get((one, to)), error=seen.errors.get((one, to))
            )
            for one, to in (*seen.interfaces, *seen.errors)
        ),
        collectives=seen.timings,
    )
    return format_json(found)


def _format_finding(name: str, finding: Finding, width: int, terminal: TerminalFormat) -> Iterable[str]:
    head = f"{_MARKS[finding.level]:<6}{name:<10}"
    lines = _wrap(finding.text, width - len(head))
    if finding.advice:
        lines += _wrap(f"try: {finding.advice}", width - len(head))
    shown = [f"{head}{lines[0]}", *(f"{' ' * len(head)}{line}" for line in lines[1:])]
    paint = {Level.OK: terminal.dim, Level.FAILURE: terminal.red}.get(finding.level, str)
    return [paint(line) for line in shown]


def _wrap(text: str, width: int) -> list[str]:
    wrapped = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
    return [line for lines in wrapped for line in lines]


def _format_timings(seen: Observation) -> list[str]:
    """A line for each collective."""
    sizes = list(dict.fromkeys(_shown_size(timing) for timing in seen.timings))
    rows = [["collective", *sizes]]
    for name in dict.fromkeys(timing.collective for timing in seen.timings):
        rows.append([name, *(_cell(timing) for timing in seen.timings if timing.collective == name)])
    width = max(len(row[0]) for row in rows)
    return [row[0].ljust(width) + "".join(cell.rjust(13) for cell in row[1:]).rstrip() for row in rows]


def _cell(timing: CollectiveTiming) -> str:
    if timing.size < _SMALL_BYTES:
        return f"{1e3 * timing.seconds:.2f} ms"
    return format_rate(timing.bytes_per_s)


def _shown_size(timing: CollectiveTiming) -> str:
    return f"{timing.size >> 20} MiB" if timing.size >> 20 else f"{timing.size >> 10} KiB"


def _summary(findings: Findings) -> str:
    counts = Counter(finding.level for _, finding in findings)
    bad = [plural(counts[level], str(level)) for level in (Level.FAILURE, Level.WARNING) if counts[level]]
    return f"jaxrun doctor: {' and '.join(bad) or 'all is well'}"
