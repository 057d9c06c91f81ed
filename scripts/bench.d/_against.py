"""`--against DIR`: runs the same benchmark of another checkout in turn with this one, round by round.

Each checkout runs its own scripts/bench.d with its own .venv, one round at a time, so that even imports may differ. The
two take turns in going first. Measurements of the same name are compared: a ratio is taken within each round, and the
table has the median, the smallest and the largest ratio. A ratio above 1 means that this checkout takes longer (for
rates: that it is faster).
"""

from __future__ import annotations

import compileall
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Fields of a sample that name what was measured, and numbers that are not measurements.
NAMES = ("contender", "suite", "workload", "load", "kind", "fault", "mode", "size", "writers")
NO_MEASUREMENTS = ("round", "status", "blamed", "wrong", "items")

Measured = Mapping[str, float]  # name → the median over the samples of one round


def compare(name: str, here: Path, other: Path, rounds: int, arguments: Sequence[str]) -> str:
    """Run the benchmark `name` of both checkouts for `rounds` rounds; returns the table."""
    prepare(name, other)
    found: list[tuple[Measured, Measured]] = []
    for number in range(1, rounds + 1):
        order = (here, other) if number % 2 else (other, here)
        measured = {checkout: run_round(name, checkout, arguments) for checkout in order}
        found.append((measured[here], measured[other]))
        print(f"round {number} of {rounds} is done", file=sys.stderr, flush=True)
    return render(found)


def prepare(name: str, checkout: Path) -> None:
    """Make the environment of a checkout that has none yet. Raises SystemExit with a line where that does not work."""
    install = checkout / "scripts" / "install"
    if not (checkout / "scripts" / "bench.d" / f"{name}.py").exists() or not install.exists():
        raise SystemExit(
            f"--against {checkout}: no checkout with the benchmark {name!r}; name one, as of: git worktree"
        )
    if subprocess.run([install], stdout=sys.stderr).returncode:
        raise SystemExit(f"--against {checkout}: {install} failed, for the reason above")
    compile_sources(checkout)


def compile_sources(checkout: Path) -> None:
    """Measure what people install: pip compiles what it installs, and a checkout may be compiled at every start."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling takes a third of the CPU time of a small job
    for folder in ("launcher", "runtime"):
        compileall.compile_dir(checkout / folder, quiet=1)


def run_round(name: str, checkout: Path, arguments: Sequence[str]) -> Measured:
    """Run one round of the benchmark of one checkout. Raises SystemExit if it fails."""
    script = checkout / "scripts" / "bench.d" / f"{name}.py"
    one_round = "--rounds" if '"--rounds"' in script.read_text() + _shared_text(checkout) else "--repeat"
    with tempfile.TemporaryDirectory(prefix="bench-") as out:
        command = [str(checkout / ".venv/bin/python"), str(script), one_round, "1", "--out", out, *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        result = Path(out, f"{name}.json")
        if not result.exists():
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")
        return read(json.loads(result.read_text())["samples"])


def _shared_text(checkout: Path) -> str:
    shared = checkout / "scripts" / "bench.d" / "_bench.py"
    return shared.read_text() if shared.exists() else ""


def read(samples: Sequence[Mapping[str, Any]]) -> Measured:
    """Return the measurements of the samples without errors, by name."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        if sample.get("wrong"):
            continue
        names = [_text(sample[field]) for field in NAMES if field in sample]
        of = " ".join(["first", *names] if sample.get("round") == 0 else names)  # round 0 is a cold start
        for measure, value in _numbers(sample):
            values.setdefault(f"{of} {measure}".strip(), []).append(value)
    return {name: statistics.median(of) for name, of in values.items()}


def _text(value: Any) -> str:
    return " ".join(map(str, value.values())) if isinstance(value, Mapping) else str(value)


def _numbers(sample: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for field, value in sample.items():
        if field in NAMES or field in NO_MEASUREMENTS:
            continue
        if isinstance(value, Mapping):
            yield from ((f"{field} {inner}", number) for inner, number in _numbers(value))
        elif isinstance(value, int | float):
            yield field, float(value)


def render(rounds: Sequence[tuple[Measured, Measured]]) -> str:
    """Return a table with a line for each name that both have in a round, with values other than 0."""
    from _bench import table  # which imports this module

    lines = []
    for name in dict.fromkeys(name for ours, _ in rounds for name in ours):
        pairs = [(ours[name], theirs[name]) for ours, theirs in rounds if ours.get(name) and theirs.get(name)]
        if pairs:
            ratios = [one / other for one, other in pairs]
            middles = (f"{statistics.median(values):.4g}" for values in zip(*pairs, strict=True))
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            lines.append((name, *middles, f"{statistics.median(ratios):.2f}", spread, str(len(pairs))))
    return table(("measured", "here", "there", "ratio", "min-max", "rounds"), lines, left=1)
