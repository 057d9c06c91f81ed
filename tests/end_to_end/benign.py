"""A program that is in step: `benign.py --steps 1000 speed garbage` takes a thousand steps of each program named.

Without names it takes all that fit the number of ranks. Each ends with "in step: NAME" and the time it took.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import agreeing.together
import agreeing.training
import agreeing.uneven  # noqa: F401
from agreeing.world import PROGRAMS, world


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--steps", type=int, default=1000, help="of each program, a multiple of ten")
    flags = parser.parse_args()
    ours = world(Path(os.environ["JAXRUN_RUN_DIR"]), flags.steps)
    even = ours.size % 2 == 0
    for name in flags.programs or [name for name in PROGRAMS if even or name != "some-ranks-only"]:
        began = time.monotonic()
        step = PROGRAMS[name](ours)
        for number in range(flags.steps):
            step(number)
        print(f"in step: {name} {time.monotonic() - began:.2f} s", flush=True)


if __name__ == "__main__":
    main()
