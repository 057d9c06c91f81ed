"""Compares what a program sees with `--preload none` and with `--preload auto`, for each package of the table.

A package is "same" if a program that imports and uses it sees the same process either way; see compare.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from compare import MOST_SHOWN, differences
from jobs import run
from uses import USES

from jaxrun.spec.job.preload_table import PRELOADABLE

_SAME, _DIFFERS, _NOT_PRELOADED, _NOT_TRIED = "same", "differs", "not preloaded", "not tried"


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/preload-check", allow_abbrev=False)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument("--look", action="store_true")
    parser.add_argument("--all", action="store_true")
    return parser.parse_args(argv)


def check(package: str, home: Path, most: int) -> tuple[str, list[str]]:
    """Check one package. Returns the result and the reasons."""
    entry, use = PRELOADABLE.get(package), USES.get(package)
    if entry is not None and not entry.safe:
        return _NOT_TRIED, [f"is never preloaded: {entry.reason}"]
    if use is None:
        return _NOT_TRIED, ["no program in uses.py imports it"]
    if not is_installed(package):
        return _NOT_TRIED, ["is not installed"]
    runs = [run(use, sys.executable, ("--preload", mode), home) for mode in ("none", "none", "auto")]
    if failed := [one.failed for one in runs if one.failed]:
        return _DIFFERS, failed[:1]
    if not any(re.match(rf"{re.escape(package)}\b", name) for name in runs[2].preloaded):
        return _NOT_PRELOADED, list(runs[2].left_out)
    found = differences([one.ranks for one in runs[:2]], runs[2].ranks, most)
    return (_DIFFERS, found) if found else (_SAME, [])


def is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False


def version(package: str) -> str:
    names = importlib.metadata.packages_distributions().get(package.partition(".")[0], [])
    return importlib.metadata.version(names[0]) if names else ""


def look(packages: Sequence[str]) -> int:
    """Print as JSON what an import changes in a process that has imported jax, for packages outside the table."""
    script = str(Path(__file__).with_name("look.py"))
    return max(subprocess.run([sys.executable, script, package]).returncode for package in packages)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    packages = options.packages or [name for name in PRELOADABLE if name != "jax"]
    if options.look:
        return look(packages)
    unknown = [name for name in options.packages if name not in PRELOADABLE]
    if unknown:
        print(
            f"scripts/preload-check: {unknown[0]} is not in the table; --look {unknown[0]} shows what its import does"
        )
        return 2
    differ = False
    with tempfile.TemporaryDirectory(prefix="preload-home-") as home:
        for package in packages:
            outcome, reasons = check(package, Path(home), sys.maxsize if options.all else MOST_SHOWN)
            differ = differ or outcome in (_DIFFERS, _NOT_PRELOADED)
            print(f"{package:18} {version(package):10} {outcome}", *reasons, sep="\n    ", flush=True)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
