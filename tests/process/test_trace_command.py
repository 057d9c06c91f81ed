"""What all ranks of a job did: `jaxrun explain --trace --html`, and who came to its calls later than the others."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from browser import needs_browser, run_page, with_probe
from chrome_format import check_trace
from harness import HERE, jaxrun

from jaxrun.errors import UsageError
from jaxrun.frontends.job_page.page import write_page
from jaxrun.records.history.explain import write_trace

# ---- jobs

# In its first attempt rank 1 fails, in its second one rank 1 is late to each step.
PROGRAM = """
import time, jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import jaxrun_runtime

rows = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
array = jax.make_array_from_process_local_data(rows, np.ones((2, 8), np.float32))

@jax.jit
def step(x):
    return x.sum()

for number in range(40):
    if jaxrun_runtime.attempt().number == 1 and jax.process_index() == 1 and number == 20:
        raise ValueError("bad record in shard 1")
    if jaxrun_runtime.attempt().number == 2 and jax.process_index() == 1:
        time.sleep(0.05)
    float(step(array))
print("done", flush=True)
"""
CALL_ENTRIES = sys.version_info >= (3, 12, 2)  # from which on Python tells when calls are entered
PROBE = (HERE / "page_probe.html").read_text()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The trace and the page of one job."""
    folder = tmp_path_factory.mktemp("traced")
    (folder / "traced.py").write_text(PROGRAM)
    result = jaxrun(folder, "-n", "2", "--max-restarts", "1", "traced.py")
    assert result.code == 0, result
    trace, page = folder / "trace.json", folder / "page.html"
    command = [sys.executable, "-m", "jaxrun", "explain", "--trace", trace, "--html", page, result.run_dir]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert written.splitlines() == [
        f"wrote {trace}; open it at https://ui.perfetto.dev",
        f"wrote {page}; open it in any browser",
    ]
    return trace, page


def names(events, rank, category):
    return [event["name"] for event in events if event.get("cat") == category and event["pid"] == rank + 1]


def test_the_trace_shows_both_attempts_and_what_each_rank_did(files):
    events = check_trace(json.loads(files[0].read_text()))
    assert names(events, -1, "attempts") == ["attempt 1", "attempt 2"]
    for rank in range(2):
        phases = ["start Python and import jax", "meet the other ranks, join", "find the devices", "program", "end"]
        assert [names(events, rank, "phases").count(name) for name in phases[:-1]] == [2] * 4
        assert names(events, rank, "compilations").count("compile jit(step)") == 2
        assert names(events, rank, "call").count("jit(step)") >= 20 + 40
    failed = [event for event in events if event.get("cat") == "mark" and event["name"] == "ValueError"]
    assert min(failed, key=lambda event: event["ts"])["args"] == {"detail": "bad record in shard 1"}


@pytest.mark.skipif(not CALL_ENTRIES, reason="this Python does not tell when calls are entered")
def test_the_trace_shows_who_waited_for_whom(files):
    events = json.loads(files[0].read_text())["traceEvents"]
    waits = [event for event in events if event.get("cat") == "wait" and event["dur"] > 10_000]
    of_rank_0 = [event["pid"] for event in waits if event["name"] == "waits for rank 1"]
    assert set(of_rank_0) == {1} and len(of_rank_0) > len(waits) / 2


def test_a_file_that_cannot_be_written_is_an_error(files, tmp_path):
    run_dir = files[0].parent / "run"
    with pytest.raises(UsageError, match=r"cannot write .*t.json: No such file or directory"):
        write_trace(run_dir, tmp_path / "no" / "t.json")
    with pytest.raises(UsageError, match=r"cannot write .*: Is a directory"):
        write_page(run_dir, tmp_path)
    (tmp_path / "events.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"has no events.jsonl, so its job cannot be shown"):
        write_trace(tmp_path, tmp_path / "t.json")


@pytest.mark.extended
@needs_browser
@pytest.mark.skipif(not CALL_ENTRIES, reason="this Python does not tell when calls are entered")
def test_the_page_shows_ranks_and_answers_a_pointer(files):
    page = with_probe(files[1].read_text(), PROBE)
    found = run_page("page.html", {"page.html": page.encode()})
    assert "error" not in found, found
    assert found["rows"] == ["rank 0", "rank 1"] and found["slow"] == "rank 1"
    assert found["costs"].startswith("rank 1") and "done in" in found["headline"]
    assert found["colour"] == found["wait"]
    assert re.search(r"jit\(step\) #\d+, traced.py:\d+ <module>", found["tip"]) and "for rank 1" in found["tip"]
    assert re.fullmatch(r"jit\(step\) #\d+", found["chosen"][0]) and found["chosen"][1] == "rank 1"
    assert 0 < found["zoom"] < 0.5 and abs(found["moved"]) < 3 and found["whole"] == [0, 0]


# ---- a rank that comes to its calls later than the others

knows_entries = pytest.mark.skipif(sys.version_info < (3, 13), reason="when calls are entered is not known")
DATA = """
import time
import jax

def load(seconds):
    time.sleep(seconds)
"""
TRAIN = """
import time
import jax
import jax.numpy as jnp
import numpy as np
from data import load
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((jax.device_count(),), ("data",))
rows = np.ones(jax.local_device_count(), np.float32)
batch = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), rows)

@jax.jit
def step(batch):
    return batch / batch.sum()

times = []
for number in range(STEPS):
    load(0.05 if jax.process_index() == SLOW else 0.01)
    AFTER
    times.append(time.monotonic())
print("longest", max(after - before for before, after in zip(times, times[1:])))
"""


def write(directory, *, slow, steps=120, after="step(batch)"):
    (directory / "data.py").write_text(DATA)
    program = TRAIN.replace("STEPS", str(steps)).replace("SLOW", str(slow)).replace("AFTER", after)
    (directory / "train.py").write_text(program)
    return str(directory / "train.py")


def has_stood_still(result):
    """Whether a step took so long that it may outweigh all others: then no rank is said to be late to most."""
    return max(map(float, re.findall(r"longest ([\d.]+)", result.out))) > 1.0


@pytest.mark.extended
@knows_entries
def test_a_job_says_at_its_end_which_rank_the_others_waited_for_and_where_it_was(tmp_path):
    result = jaxrun(tmp_path, "-n", "2", write(tmp_path, slow=1))
    assert result.code == 0, result.err
    if has_stood_still(result):
        return
    (line,) = (line for line in result.verdict()["details"] if "came last" in line)
    assert re.search(r"^rank 1 came last to \d+ % of calls, .*; it was in data.py:6 load\.$", line), line
    assert line in " ".join(result.err.split())
    told = result.events("Straggler")[-1]
    assert told["ranks"] == [1] and told["late_s"] >= 0.01 and told["last"] > 0.5 and 0.2 < told["share"] < 1.0


@knows_entries
@pytest.mark.extended
def test_where_the_ranks_wait_outside_of_their_calls_one_is_seen_to_wait(tmp_path):
    program = write(tmp_path, slow=0, steps=260, after="step(batch).block_until_ready()")
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", program)
    assert result.code == 0, result.err
    if has_stood_still(result):
        return
    (first, *_) = result.events("Straggler")
    assert first["ranks"] == [0] and not first["is_proven"]
    assert "rank 0 came last" in result.err and "rank 1 waited" in result.err
