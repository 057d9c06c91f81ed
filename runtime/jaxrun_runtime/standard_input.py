"""Tells a program whose input() finds nothing which rank has jaxrun's standard input."""

from __future__ import annotations

import builtins
import functools
import sys

from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.settings import STDIN_NONE, STDIN_RANK_0


def explain_missing_input(env: WorkerEnv) -> None:
    """On a rank without standard input, let the EOFError of input() say who has it."""
    owner = env.stdin or STDIN_RANK_0
    if owner == str(env.rank):
        return
    who = "no rank has" if owner == STDIN_NONE else f"rank {owner} has"
    text = f"rank {env.rank} has no standard input: {who} jaxrun's (--stdin RANK|none)"
    original = builtins.input

    @functools.wraps(original)
    def explained(prompt: object = "", /) -> str:
        try:
            return original(prompt)
        except EOFError:
            if sys.stdin is not sys.__stdin__:  # the program's own
                raise
            raise EOFError(text) from None

    builtins.input = explained
