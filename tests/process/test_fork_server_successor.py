"""A fork server leaves a successor for the next attempt, with jax in it and of the same configuration."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from jaxrun.forkserver import client
from jaxrun.protocol.forkserver_messages import SuccessorForked


def test_a_successor_has_imported_jax_and_outlives_the_server_until_its_channel_is_closed(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "unit")]!r}
from test_fork_server_successor import succeed
succeed()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=90, cwd=tmp_path)


def succeed() -> None:
    """In a process of its own, which becomes a subreaper."""
    from harness_worker import environment

    from jaxrun.agent.subreaper import become_subreaper

    become_subreaper()
    environ = {**environment(), "JAXRUN_JOB_ID": "5eed" * 8}
    server = client.start([sys.executable], environ)
    assert server.configure(["program.py"], environ) and not server.has_gone
    for _ in range(2):
        server.request_successor()
        assert select.select([server.channel], [], [], 60)[0]
        (answer,) = server.receive()
        assert isinstance(answer, SuccessorForked)
        successor = server.take_successor(answer.pid)
        assert successor.pid == answer.pid
        server.close()
        os.waitpid(server.pid, 0)
        assert not successor.has_gone
        assert "jaxlib" in Path(f"/proc/{successor.pid}/maps").read_text()
        server = successor
    server.close()
    os.waitpid(server.pid, 0)  # as its new parent
