"""Programs that are in step, in whatever way their ranks differ: nothing is reported, however long they run.

A word of the launcher's that they disagree would fail the test: that is what the plugin does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest

_PROGRAM = re.compile(r"^def (\w+)\(world: World\)", re.MULTILINE)
PROGRAMS = [
    (path.stem, name)
    for path in sorted((Path(__file__).parent / "agreeing").glob("*.py"))
    for name in _PROGRAM.findall(path.read_text())
]
# By mode, numbers of steps: a few always, and in record mode many for scripts/test --all.
STEPS = {"record": (40, 400), "strict": (10,)}
DEVICES = {"record": 1, "strict": 2}  # of each rank
# Tried in record mode, with few steps: what of them is a call, JAX's versions may see in different ways.
BRIEF = ("prints", "ahead_of_time", "transformed", "static_arguments", "local_shapes", "persistent_cache", "forks")
OF_VERSIONS = (*BRIEF, "replicated_on_rank_0", "unnamed_axis")  # what JAX says of these has changed
RANKS = {"some_ranks_only": 4}  # two groups that are not all ranks; the others run over 2


def parameters() -> Iterator[Any]:
    for mode, (module, name) in product(STEPS, PROGRAMS):
        marks = [pytest.mark.processes(RANKS.get(name, 2), devices=DEVICES[mode], lockstep=mode)]
        marks += [pytest.mark.jax_version] * (name in OF_VERSIONS)
        for steps in STEPS[mode]:
            if name in BRIEF and (mode, steps) != ("record", 40):
                continue
            is_rare = steps > 40 or (mode == "strict" and name in RANKS)
            extended = [pytest.mark.extended] * is_rare
            yield pytest.param(module, name, steps, id=f"{mode}-{name}-{steps}", marks=[*marks, *extended])


@pytest.mark.parametrize(("module", "name", "steps"), [*parameters()])
def test_ranks_that_are_in_step_are_not_reported(shared_tmp_path: Path, module: str, name: str, steps: int) -> None:
    from agreeing import world

    step = getattr(import_module(f"agreeing.{module}"), name)(world(shared_tmp_path, steps))
    for number in range(steps):
        step(number)
