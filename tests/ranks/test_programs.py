"""The programs that jaxrun ships prove themselves on every layout of four devices."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

pytestmark = pytest.mark.jax_version

LAYOUTS = [pytest.param(n, id=f"{n}x{4 // n}", marks=pytest.mark.processes(n, devices=4 // n)) for n in (1, 2, 4)]


@pytest.mark.parametrize("processes", LAYOUTS)
@pytest.mark.parametrize("program", ["selfcheck", "parallel_eval"])
def test_it_proves_itself_on_every_layout(gang: Any, capsys: Any, program: str, processes: int) -> None:
    import_module(f"jaxrun_runtime.programs.{program}").main()
    printed = capsys.readouterr().out
    assert printed.endswith(f"4 device(s) in {processes} process(es)\n") if gang.is_main else printed == ""
