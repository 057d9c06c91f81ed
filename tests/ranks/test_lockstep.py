"""Programs that are in step, in whatever way their ranks differ: nothing is said of them, however long they go on.

A word of the launcher's that they disagree would fail the test: that is what the plugin does.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = re.compile(r"^def (\w+)\(world: World\)", re.MULTILINE)
PROGRAMS = [
    (path.stem, name)
    for path in sorted((Path(__file__).parent / "agreeing").glob("*.py"))
    for name in _PROGRAM.findall(path.read_text())
]
# A thousand take about 70 s in strict mode; and with two devices each half as long again.
STEPS = {"record": 1000, "strict": 150}
DEVICES = {"record": 1, "strict": 2}  # of each rank
BY_FOUR = ("some_ranks_only", "local_on_rank_0")  # also over ranks whose groups are not all of them


def ranks(size: int, mode: str) -> pytest.MarkDecorator:
    return pytest.mark.processes(size, devices=DEVICES[mode], lockstep=mode)


def sized() -> list[Any]:
    pairs = [(2, program) for program in PROGRAMS]
    pairs += [(4, program) for program in PROGRAMS if program[1] in BY_FOUR]
    return [
        pytest.param(*program, mode, id=f"{mode}-{program[1]}-{size}", marks=ranks(size, mode))
        for mode in STEPS
        for size, program in pairs
    ]


@pytest.mark.parametrize(("module", "name", "mode"), sized())
def test_nothing_is_said_of_ranks_that_are_in_step(shared_tmp_path: Path, module: str, name: str, mode: str) -> None:
    from agreeing.world import world

    step = getattr(import_module(f"agreeing.{module}"), name)(world(shared_tmp_path, STEPS[mode]))
    for number in range(STEPS[mode]):
        step(number)
