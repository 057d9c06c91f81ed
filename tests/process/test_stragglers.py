"""Jobs in which one rank comes to its calls later than the others, and jobs in which none does."""

import re
import sys

import pytest
from harness import jaxrun

pytestmark = pytest.mark.skipif(sys.version_info < (3, 13), reason="when calls are entered is not known")

DATA = """
import time
import jax

def load(seconds):
    time.sleep(seconds)
"""
TRAIN = """
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

for number in range(STEPS):
    load(0.05 if jax.process_index() == SLOW else 0.01)
    AFTER
"""


def write(directory, *, slow, steps=120, after="step(batch)"):
    (directory / "data.py").write_text(DATA)
    program = TRAIN.replace("STEPS", str(steps)).replace("SLOW", str(slow)).replace("AFTER", after)
    (directory / "train.py").write_text(program)
    return str(directory / "train.py")


def test_a_job_says_at_its_end_which_rank_the_others_waited_for_and_where_it_was(tmp_path):
    result = jaxrun(tmp_path, "-n", "2", write(tmp_path, slow=1))
    assert result.code == 0, result.err
    (line,) = (line for line in result.verdict()["details"] if "came last" in line)
    assert re.search(r"^rank 1 came last to \d+ % of calls, .*; it was in data.py:6 load\.$", line), line
    assert line in " ".join(result.err.split())
    told = result.events("Straggler")[-1]
    assert told["ranks"] == [1] and told["late_s"] >= 0.01 and told["last"] > 0.5 and 0.2 < told["share"] < 1.0


@pytest.mark.extended
def test_where_the_ranks_wait_outside_of_their_calls_one_is_seen_to_wait(tmp_path):
    program = write(tmp_path, slow=0, steps=260, after="step(batch).block_until_ready()")
    result = jaxrun(tmp_path, "-n", "2", "-d", "2", program)
    assert result.code == 0, result.err
    (first, *_) = result.events("Straggler")
    assert first["ranks"] == [0] and not first["is_proven"]
    assert "rank 0 came last" in result.err and "rank 1 waited" in result.err
