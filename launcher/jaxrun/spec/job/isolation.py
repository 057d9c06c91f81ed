"""Recognizes environments that hold jaxrun alone, as uvx and pipx make them: programs do not find their packages."""

from __future__ import annotations

import os

_UV_CACHE = "archive-v"  # uvx makes its environments in this directory of uv's cache; a number follows


def describe_isolation(prefix: str) -> str:
    """Return what to do if jaxrun runs in an environment made for it alone; empty for every other environment.

    prefix: the environment's directory, sys.prefix
    """
    if os.path.exists(f"{prefix}/uv-receipt.toml"):
        tool, add = "uv tool", "uv tool install jaxrun --with PACKAGE"
    elif os.path.exists(f"{prefix}/pipx_metadata.json"):
        tool, add = "pipx", "pipx inject jaxrun PACKAGE"
    elif os.path.basename(os.path.dirname(prefix)).startswith(_UV_CACHE):
        tool, add = "uvx", "uvx --with PACKAGE jaxrun …"
    else:
        return ""
    return (
        f"{tool} runs jaxrun in an environment of its own, where the program finds jaxrun's packages only; install "
        f"jaxrun in the program's environment (pip install jaxrun), or add the program's packages: {add}"
    )
