"""A plugin of pytest that is wrong on purpose: programs whose arguments and results have the same types are one."""

from __future__ import annotations

import os
import re

import pytest

from jaxrun.protocol.names import RANK


def pytest_configure(config: pytest.Config) -> None:
    if RANK in os.environ:
        from jaxrun_runtime.compile_cache import jax_hooks

        jax_hooks.lowered_code = lambda module: re.findall(r"func public @main.*", str(module))[0].encode()
