"""A program whose ranks diverge in the way that its argument names: `diverge.py static-argument`.

Of several ways each is tried, and its error printed under its name. Without an argument it lists them.
"""

from __future__ import annotations

import sys
import traceback

import diverging.inputs
import diverging.order  # noqa: F401
from diverging import KINDS, world

if __name__ == "__main__":
    if len(sys.argv) == 1:
        sys.exit("\n".join(f"{name:20} {(kind.__doc__ or '').strip()}" for name, kind in KINDS.items()))
    if len(sys.argv) == 2:
        KINDS[sys.argv[1]](world())
    for name in sys.argv[1:] if len(sys.argv) > 2 else []:
        try:
            KINDS[name](world())
        except Exception:
            print(f"=== {name} ===\n{traceback.format_exc()}", end="", file=sys.stderr, flush=True)
    print("the end", flush=True)
