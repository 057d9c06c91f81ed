"""--metrics with a real job: it is served while the job runs, and nothing is left of it afterwards."""

from __future__ import annotations

import re
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

from harness import jaxrun, started, wait_until, write_fake_runtime
from prometheus_client.parser import text_string_to_metric_families


def read(address: str) -> dict[str, float]:
    """The samples without labels, and the number of ranks that run."""
    with urllib.request.urlopen(address, timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return {sample.labels.get("state", sample.name): sample.value for sample in samples}


def test_metrics_are_served_until_the_job_is_over(tmp_path: Path) -> None:
    with (tmp_path / "err").open("w+") as err:
        words = (
            "-n",
            "2",
            "--no-fork",
            "--metrics",
            "0",
            "by_hand.py",
            *["run(); print('ready', flush=True); time.sleep(600)"] * 2,
        )
        with started(tmp_path, *words, env=write_fake_runtime(tmp_path), stderr=err) as job:
            job.wait_for_output("ready", 2)
            (address,) = re.findall(
                r"^jaxrun: metrics at (http://127\.0\.0\.1:\d+/metrics)$", Path(err.name).read_text(), re.M
            )
            seen = read(address)
            job.process.send_signal(signal.SIGINT)
            assert job.process.wait(60) == 130
    assert seen["working"] + seen["idle"] == 2
    assert (seen["jaxrun_restarts_total"], seen["jaxrun_launcher_answers"]) == (0, 1)

    def is_gone() -> bool:
        try:
            read(address)
        except urllib.error.URLError:
            return True
        return False

    wait_until(is_gone)


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    environ = write_fake_runtime(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = jaxrun(tmp_path, "-n", "1", "--metrics", str(port), "by_hand.py", "run()", env=environ)
    assert result.code == 69 and f"--metrics {port} cannot listen there: Address already in use" in result.err
    assert not (tmp_path / "run").exists()
