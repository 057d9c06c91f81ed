"""Runs the checks of scripts/gpu, and prints a table of their results."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import sys
import time
from collections.abc import Sequence

from checks import CHECKS, Check
from machine import Failed, Machine, list_gpus


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/gpu", allow_abbrev=False)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--only", nargs="+", default=[], choices=[check.name for check in CHECKS], metavar="NAME")
    parser.add_argument("--platform", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    options = parse(argv)
    if options.list:
        for check in CHECKS:
            print(f"{check.name:18} {check.gpus} GPU{'s' if check.gpus != 1 else ' '}  {check.shows}")
        return 0
    gpus = list_gpus() if options.platform == "cuda" else ()
    if options.platform == "cuda" and not gpus:
        print("scripts/gpu: nvidia-smi shows no NVIDIA GPU here", file=sys.stderr)
        return 69
    machine = Machine(options.platform, gpus)
    rows = [run(check, machine) for check in CHECKS if not options.only or check.name in options.only]
    print(render(machine, rows))
    return int(any(result == "✗" for _, result, _, _ in rows))


def run(check: Check, machine: Machine) -> tuple[str, str, str, float]:
    """Run a check. Returns its line, result, what was seen, and seconds; "not run" if it needs more GPUs."""
    if check.gpus > len(machine.gpus) and not (check.on_cpus and machine.platform == "cpu"):
        have = f"{len(machine.gpus)} GPU{'s' if len(machine.gpus) != 1 else ''}"
        return check.shows, "not run", f"needs {check.gpus} GPUs, this machine has {have}", 0.0
    print(f"-- {check.name}: {check.shows}", file=sys.stderr, flush=True)
    began = time.monotonic()
    try:
        result, seen = "✓", check.run(machine)
    except Failed as failure:
        result, seen = "✗", str(failure)
        print(failure.output, file=sys.stderr, flush=True)
    return check.shows, result, seen, time.monotonic() - began


def render(machine: Machine, rows: Sequence[tuple[str, str, str, float]]) -> str:
    """Return the table, in Markdown."""
    versions = f"JAX {importlib.metadata.version('jax')} on Python {platform.python_version()}"
    lines = [f"On {machine}, with {versions}:", "", "| check | result | seen |", "| --- | --- | --- |"]
    lines += [f"| {shows} | {result} | {seen.replace('|', '/')} |" for shows, result, seen, _ in rows]
    lines += ["", f"{sum(seconds for *_, seconds in rows):.0f} s in all."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
