"""--compile-cache: what one job has compiled, all ranks of the next one load."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from harness import HERE, Result, jaxrun

pytestmark = pytest.mark.jax_version
COMPILED = str(HERE / "compiled.py")


def _run(folder: Path, *options: str) -> Result:
    folder.mkdir()
    result = jaxrun(folder, *options, COMPILED)
    assert result.code == 0, result
    return result


def _values(result: Result) -> set[str]:
    return set(re.findall(r"-?\d+\.\d{4} -?\d+\.\d{4}", result.out))


def test_the_second_job_finds_all_on_all_ranks_and_a_damaged_file_is_replaced(tmp_path: Path) -> None:
    cached = ("-n", "2", "-d", "2", "--simulate-hosts", "2", "--compile-cache", str(tmp_path / "cache"))
    first = _run(tmp_path / "1", *cached)
    assert first.out.count(" all") < 2, first
    entries = sorted((tmp_path / "cache").glob("*-cache"))
    assert len(entries) >= 2
    second = _run(tmp_path / "2", *cached)
    assert second.out.count(" all") == 2 and len(_values(first) | _values(second)) == 1, second
    whole = entries[0].read_bytes()
    entries[0].write_bytes(whole[:100])
    third = _run(tmp_path / "3", *cached)
    assert third.out.count(" all") < 2 and len(entries[0].read_bytes()) > 100, third


_BINDS_ITSELF = """
import os, sys
import jax
found = []
jax.monitoring.register_event_listener(lambda event, **_: event.endswith("/cache_hits") and found.append(event))
cores = os.sched_getaffinity(0)
assert len(cores) > 1
if sys.argv[1] == "bound":
    os.sched_setaffinity(0, {min(cores)})
jax.jit(lambda x: x * 2 + 1)(3)
print("hits", len(found))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_code_for_more_cores_is_not_loaded_where_the_program_has_bound_itself_to_fewer(tmp_path: Path, script) -> None:
    program, hits = str(script(_BINDS_ITSELF)), []
    for number, how in enumerate(("free", "bound", "free", "bound")):
        (tmp_path / str(number)).mkdir()
        result = jaxrun(tmp_path / str(number), "-n", "1", "--compile-cache", str(tmp_path / "cache"), program, how)
        assert result.code == 0, result
        hits += re.findall(r"hits (\d+)", result.out)
    assert hits[:2] == ["0", "0"] and "0" not in hits[2:], hits


def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    result = jaxrun(tmp_path, "-n", "1", "--compile-cache", "cache", COMPILED)
    assert result.code == 2 and not result.run_dir.exists()
    assert "others can write to it, and what is in it is executed; try chmod go-w; name another directory" in result.err
