"""Fixtures that start real workers; puts this directory on the path, for `troupe`."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from troupe import troupes


@pytest.fixture
def start(tmp_path):
    """start(argv, size, …) → a Troupe of workers."""
    with troupes(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def play_cases(tmp_path_factory):
    """play_cases({name: source}) → {name: Member}: each source is the program of one rank of a single job.

    Rank 0 has no case: its program ends at once, and it leaves when all others have ended. Each runs in a
    directory of its own, `member.folder`.
    """
    folder = tmp_path_factory.mktemp("cases")
    with troupes(folder) as begin:

        def play(cases, on_failed=None):
            for name, source in cases.items():
                (folder / name).mkdir()
                (folder / name / "program.py").write_text(source)
            names = ["", *cases]
            (folder / "program.py").write_text(_CASES.format(names=names, folder=str(folder)))
            troupe = begin([folder / "program.py"], len(names))
            members = dict(zip(cases, troupe.members[1:], strict=True))
            for name, member in members.items():
                member.folder = folder / name
            troupe.play(kill_on_failure=False, on_failed=on_failed)
            return members

        yield play


_CASES = """
import os, sys
import jaxrun_runtime as jr
name = {names}[jr.rank]
if name:
    os.chdir(os.path.join({folder!r}, name))
    exec(compile(open("program.py").read(), name, "exec"))
"""


@pytest.fixture
def script(tmp_path):
    """script(text) → the path of a program with that text."""
    numbers = itertools.count()

    def write(text, name=None):
        path = tmp_path / (name or f"program{next(numbers)}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write
