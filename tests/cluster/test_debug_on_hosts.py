"""`jaxrun debug` where the rank is on another host than the editor: the bytes go through the head."""

from __future__ import annotations

import os
from pathlib import Path

from cluster_fixture import JobRunner
from launch_modes import ANY, ATTACHED, PYTHON, row

WAITS = """\
import os, time, jax
from jax.experimental import multihost_utils
place = os.uname().nodename
print("ready", flush=True)
while jax.process_index() == 1 and not os.path.exists("go"):
    time.sleep(0.01)
multihost_utils.sync_global_devices("meet")
"""
LOOP = 6
# On the host of the head: what a person and the editor do.
EDITOR = """\
import json, subprocess, sys
from dap_client import DapClient

run_dir, program, line = sys.argv[1:]
command = [sys.executable, "-m", "jaxrun", "debug", run_dir, "--rank", "1", "--json"]
debug = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
editor = DapClient(json.loads(debug.stdout.readline())["configuration"]["connect"]["port"])
editor.attach(program, (int(line),))
thread, (frame, *_) = editor.stopped()
print(frame["line"], editor.evaluate("(jax.process_index(), place)", frame))
open("go", "w").close()
editor.break_at(program)
editor.request("continue", threadId=thread)
editor.request("disconnect", terminateDebuggee=False)
editor.close()
sys.exit(debug.wait())
"""


@row("`jaxrun debug` of a rank on another host", *ANY)
def test_an_editor_debugs_a_rank_of_another_host(runner: JobRunner, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    (tmp_path / "editor.py").write_text(EDITOR)
    helpers = str(Path(__file__).parents[1] / "process")
    head = "h1" if runner.mode.direction == ATTACHED else runner.mode.host
    with runner.started(str(tmp_path / "waits.py")) as job:
        job.wait_for_output("ready")
        words = ("env", "-C", str(tmp_path), f"PYTHONPATH={helpers}:{os.environ.get('PYTHONPATH', '')}", PYTHON)
        text = job.bed.inside(head, *words, "editor.py", str(job.run_dir), str(tmp_path / "waits.py"), str(LOOP))
        assert f"{LOOP} (1, 'h2')" in text, text
        result = job.result()
        job.gone()
    assert result.code == 0, result
