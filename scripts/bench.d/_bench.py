"""Shared by the benchmarks: their command line, a description of the machine, tables, and samples kept as JSON."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import _against

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The result of a benchmark: the text that it prints, and dataclasses for the JSON file.

    wrong:  a line for each thing that did not work; makes the exit status 1
    """

    text: str
    samples: Sequence[Any]
    wrong: Sequence[str] = ()


class Bench:
    """A benchmark's command line. `mine`: options that leave other launchers out, for `--against`."""

    def __init__(self, name: str, doc: str | None, *, rounds: int, mine: Sequence[str] = ()) -> None:
        self.name = name
        self.mine = mine
        self._shared = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        add = self._shared.add_argument
        add("--rounds", "--repeat", type=int, default=rounds, metavar="N", help=f"runs of each (default: {rounds})")
        add("--out", type=Path, default=ROOT / "bench-results", metavar="DIR", help="where the samples are kept")
        add("--against", type=Path, metavar="DIR", help="another checkout: both in turn, and the ratio of the two")
        self._parser = argparse.ArgumentParser(
            prog=f"bench {name}",
            description=doc,
            parents=[self._shared],
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_option = self._parser.add_argument

    def main(self, run: Callable[[argparse.Namespace], Outcome], argv: Sequence[str] | None = None) -> int:
        """Parse the options, run the benchmark, print and keep the result. Returns the exit status."""
        options = self._parser.parse_args(argv)
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            print(this_machine(), flush=True)
            _against.compile_sources(ROOT)
            if options.against is not None:
                others = self._shared.parse_known_args(argv)[1]
                arguments = [*others, *(() if "--only" in others else self.mine)]
                print(_against.compare(self.name, ROOT, options.against.resolve(), options.rounds, arguments))
                return 0
            found = run(options)
        except KeyboardInterrupt:
            return 130
        print(f"\n{found.text}\n", *found.wrong, sep="\n")
        print(keep(options.out, self.name, found))
        return int(bool(found.wrong))


def this_machine() -> str:
    """Describe the machine, the versions and the time, with the load of the last minute."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    versions = f"Python {platform.python_version()}, JAX {importlib.metadata.version('jax')}"
    return f"{cores} cores, load {load:.2f} at the start, {versions}, {time.strftime('%Y-%m-%d %H:%M')}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Return aligned text: the first `left` columns are aligned to the left, the others to the right."""
    lines = [list(header), *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def keep(out: Path, name: str, found: Outcome) -> Path:
    """Write OUT/NAME.json."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"machine": this_machine(), "samples": [asdict(one) for one in found.samples]}
    path = out / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def grouped(samples: Iterable[T], key: Callable[[T], Hashable]) -> dict[Any, list[T]]:
    groups: dict[Any, list[T]] = {}
    for sample in samples:
        groups.setdefault(key(sample), []).append(sample)
    return groups


def median_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Return the median of the ratios within rounds that both have; None if there is no such round."""
    ratios = [value / theirs[number] for number, value in ours.items() if theirs.get(number, 0) > 0]
    return statistics.median(ratios) if ratios else None


def shown(value: float | None, spec: str = ".2f") -> str:
    return "-" if value is None else format(value, spec)


def numbers(text: str, least: int = 1) -> list[int]:
    """Parse "2,4,8"."""
    found = [int(part) for part in text.split(",")]
    if min(found) < least:
        raise ValueError
    return found
