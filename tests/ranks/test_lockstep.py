"""Programs that are in step, in whatever way their ranks differ: nothing is reported, however long they run.

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
# By mode, numbers of steps: a few always, and many for scripts/test --all. A thousand strict ones would take 70 s.
STEPS = {"record": (100, 1000), "strict": (20, 150)}
DEVICES = {"record": 1, "strict": 2}  # of each rank
OF_VERSIONS = ("replicated_on_rank_0", "unnamed_axis")  # what JAX says of them has changed
BY_FOUR = ("some_ranks_only", "local_on_rank_0")  # also over ranks whose groups are not all of them


def sized() -> list[Any]:
    pairs = [(2, program) for program in PROGRAMS]
    pairs += [(4, program) for program in PROGRAMS if program[1] in BY_FOUR]
    return [
        pytest.param(
            *(*program, number),
            id=f"{mode}-{program[1]}-{size}-{number}",
            marks=[
                pytest.mark.processes(size, devices=DEVICES[mode], lockstep=mode),
                *([] if number == min(STEPS[mode]) else [pytest.mark.extended]),
                *([pytest.mark.jax_version] if program[1] in OF_VERSIONS else []),
            ],
        )
        for mode in STEPS
        for number in STEPS[mode]
        for size, program in pairs
    ]


@pytest.mark.parametrize(("module", "name", "steps"), sized())
def test_ranks_that_are_in_step_are_not_reported(shared_tmp_path: Path, module: str, name: str, steps: int) -> None:
    from agreeing.world import world

    step = getattr(import_module(f"agreeing.{module}"), name)(world(shared_tmp_path, steps))
    for number in range(steps):
        step(number)
