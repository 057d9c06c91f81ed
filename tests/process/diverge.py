"""A program whose ranks diverge in the way that its one argument names: `diverge.py static-argument`.

Without an argument it lists the ways. Each ends with "the end" on the ranks that come so far.
"""

from __future__ import annotations

import sys

import diverging.inputs
import diverging.order
import diverging.stuck  # noqa: F401
from diverging.world import KINDS, world

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("\n".join(f"{name:20} {(kind.__doc__ or '').strip()}" for name, kind in KINDS.items()))
    KINDS[sys.argv[1]](world())
    print("the end", flush=True)
