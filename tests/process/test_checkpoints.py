"""jaxrun learns of complete checkpoints: from orbax's CheckpointManager, or from the program."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import started

pytestmark = pytest.mark.jax_version
pytest.importorskip("orbax.checkpoint")


def test_what_orbax_saves_in_the_background_is_reported_once_it_is_complete(tmp_path: Path, script) -> None:
    program = script("""
import os, time
import numpy as np
import orbax.checkpoint as ocp
manager = ocp.CheckpointManager(os.path.abspath("state"))
manager.save(3, args=ocp.args.StandardSave({"x": np.arange(4.0)}))
while not os.path.exists("go-on"):
    time.sleep(0.01)
manager.save(5, args=ocp.args.StandardSave({"x": np.arange(4.0)}))
manager.close()
""")
    with started(tmp_path, "-n", "2", str(program)) as job:
        job.wait_for_event("saved")
        assert (tmp_path / "state" / "3").is_dir()
        (tmp_path / "go-on").touch()
        result = job.result()
    assert result.code == 0, result
    assert [(event["rank"], event["step"]) for event in result.events("saved")] == [(0, 3), (0, 5)]
