"""--compile once on several hosts: each compiles a program once, none has it from another, and nothing is left."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cluster_fixture import Bed, JobRunner
from harness import Result
from launch_modes import BASIC, LaunchMode

PROGRAM = str(Path(__file__).with_name("compiling.py"))
RANKS_ON = ("h1", "h1", "h2", "h2")


def engines(*always: LaunchMode) -> pytest.MarkDecorator:
    """All that are tried, of which the others are for scripts/test --all."""
    params = [pytest.param(mode, id=str(mode), marks=() if mode in always else pytest.mark.extended) for mode in BASIC]
    return pytest.mark.parametrize("run", params, indirect=True)


@pytest.fixture
def run(
    request: pytest.FixtureRequest, make_runner: Callable[[LaunchMode], JobRunner], tmp_path: Path
) -> Callable[..., Result]:
    """run(WORD…): `jaxrun --compile WORD…` on two ranks of each of two hosts; nothing of it is left in memory."""
    runner = make_runner(request.param)

    def run_job(how: str, *words: str) -> Result:
        (tmp_path / how).mkdir()
        own = replace(runner, directory=tmp_path / how)
        result = own.jaxrun("-d", "2", "--compile", how, "-v", *words, ranks_on=RANKS_ON)
        assert not [name for host in dict.fromkeys(RANKS_ON) for name in shared_on(runner.bed, host)]
        return result

    return run_job


def shared_on(bed: Bed, host: str) -> list[str]:
    return [name for name in bed.inside(host, "ls", "/dev/shm").split() if name.startswith("jaxrun")]


def outcomes(result: Result, attempt: int = 1) -> list[dict[str, Any]]:
    """What the ranks of an attempt have left (compiling.py)."""
    files = [result.run_dir.parent / f"attempt-{attempt}-rank-{rank}.json" for rank in range(len(RANKS_ON))]
    return [json.loads(file.read_text()) for file in files]


def check_one_compilation_per_host(ranks: list[dict[str, Any]]) -> None:
    for first, second in (ranks[:2], ranks[2:]):
        times = {name: {first["loaded"][name], second["loaded"][name]} for name in first["loaded"]}
        assert times == {name: {0, 1} for name in times}, (first, second)


@engines(*BASIC)
def test_each_host_compiles_once_what_each_rank_would_have_compiled(run: Callable[..., Result]) -> None:
    found = {}
    for how in ("each", "once"):
        result = run(how, "--compile-memory", "64", PROGRAM)
        assert result.code == 0 and "could not load" not in result.err, result
        found[how] = outcomes(result)
    assert {(*rank["loaded"].values(),) for rank in found["each"]} == {(0, 0, 0, 0)}
    check_one_compilation_per_host(found["once"])
    assert {rank["memory"] for rank in found["once"]} == {"64"}
    assert [rank["bits"] for rank in found["once"]] == [rank["bits"] for rank in found["each"]]


@engines(BASIC[0])
def test_nothing_is_left_where_a_rank_is_killed_while_it_compiles(run: Callable[..., Result]) -> None:
    result = run("once", PROGRAM, "kill")
    assert result.code == 137 and "on h2 was killed by SIGKILL (9)" in result.err, result


@engines(BASIC[1])
def test_a_restart_shares_nothing_with_the_attempt_before(run: Callable[..., Result]) -> None:
    result = run("once", "--max-restarts", "1", PROGRAM, "kill")
    assert result.code == 0 and "attempt 1 of 2 failed" in result.err, result
    ranks = outcomes(result, attempt=2)
    check_one_compilation_per_host(ranks)
    job_id = json.loads((result.run_dir / "job.json").read_text())["job_id"]
    for host, rank in zip(RANKS_ON, ranks, strict=True):
        own = rank["in_memory"]
        assert own == [f"{job_id}-2-{host}"]
