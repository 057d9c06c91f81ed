"""Who keeps the output of ranks on other hosts: their agents, or the head."""

from types import SimpleNamespace

from jaxrun.controller.supervisor.remote_output import RemoteOutput
from jaxrun.protocol.agent_messages import OutputChunk, StartWorkers


def test_the_head_keeps_the_output_of_a_rank_once_it_is_started_on_a_host_without_the_run_directory():
    kept, shown = [], []
    output = SimpleNamespace(write=lambda *chunk: kept.append(chunk), show=lambda *chunk: shown.append(chunk))
    remote = RemoteOutput(output, SimpleNamespace())
    for log_dir in ("/shared/run", ""):
        start = SimpleNamespace(worker=SimpleNamespace(rank=1), log_dir=log_dir)
        remote.handle_start(StartWorkers((start,)))
        remote.handle(1, 0, OutputChunk(1, "out", log_dir.encode() or b"no directory"))
    assert shown == [(1, "out", b"/shared/run")] and kept == [(1, "out", b"no directory")]
