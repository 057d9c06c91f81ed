"""`jaxrun top --web` with a real job, and what the page makes of jobs of 1, 8 and 4,096 ranks in a browser."""

from __future__ import annotations

import functools
import http.client
import http.server
import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import TIME_LIMIT, Job, started, wait_until, write_fake_runtime

from jaxrun.frontends import live_page

BROWSER = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
KEEPS_RUNNING = "run(); print('ready <b>', rank, flush=True); time.sleep(600)"


class Page:
    """The page as somebody with its address sees it."""

    def __init__(self, address: str) -> None:
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{24})/", address)
        assert found is not None, address
        self.port, self.token = int(found[1]), found[2]

    def get(self, path: str, *, host: str = "") -> tuple[int, str, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIME_LIMIT)
        try:
            connection.request("GET", path, headers={"Host": host or f"127.0.0.1:{self.port}"})
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.headers
        finally:
            connection.close()

    def read(self, name: str) -> str:
        status, text, _ = self.get(f"/{self.token}/{name}")
        assert status == 200, text
        return text

    def data(self) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.read("data.json"))
        return content


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Page]]:
    folder = tmp_path_factory.mktemp("live")
    words = ("-n", "2", "by_hand.py", *[KEEPS_RUNNING.replace("rank,", f"{rank},") for rank in (0, 1)])
    with started(folder, *words, env=write_fake_runtime(folder)) as job:
        job.wait_for_output("ready", 2)
        command = [sys.executable, "-m", "jaxrun", "top", "--web", "run"]
        with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as top:
            try:
                assert top.stderr is not None
                line = top.stderr.readline()
                yield job, Page(line.split()[2])
            finally:
                top.send_signal(signal.SIGINT)
                _, rest = top.communicate(timeout=TIME_LIMIT)
        assert top.returncode == 130 and "Traceback" not in rest


def test_only_the_address_with_the_token_is_answered(served: tuple[Job, Page]) -> None:
    _, page = served
    assert page.get("/")[0] == page.get("/data.json")[0] == page.get(f"/{page.token[:-1]}x/")[0] == 404
    assert page.get(f"/{page.token}/data.json", host="evil.example")[0] == 403
    assert page.get(f"/{page.token}/../../etc/passwd")[0] == page.get(f"/{page.token}/output?rank=../x")[0] == 404
    assert page.get(f"/{page.token}")[0] == 302
    status, text, headers = page.get(f"/{page.token}/")
    assert status == 200 and 'src="live.js"' in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
    assert not re.search(r"https?://", text + page.read("live.css") + page.read("live.js"))


def test_it_has_what_top_knows_the_output_of_a_rank_and_the_end(served: tuple[Job, Page]) -> None:
    job, page = served
    seen = page.data()
    assert [one["rank"] for one in seen["top"]["ranks"]] == [0, 1] and not seen["is_over"]
    assert "ready <b> 1" in page.read("output?rank=1") and "ready <b> 0" not in page.read("output?rank=1")
    assert page.read("output?rank=77") == ""
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(TIME_LIMIT) == 130
    wait_until(lambda: page.data()["is_over"])
    assert "interrupted" in page.data()["verdict"]
    assert "<!doctype html>" in page.read("run")


def job_of(size: int) -> dict[str, Any]:
    """data.json of a job whose rank 3, if there is one, keeps all others waiting."""
    common = {"since_s": 3.0, "number": 12, "behind": 0, "late_s": None, "cpu_percent": 5.0, "memory_bytes": 2**30}
    common |= {"gpu_percent": None, "gpu_bytes": None, "standing_out": "like others"}
    ranks = [{"rank": rank, "host": f"h{rank // 8}", "state": "waits for rank 3", **common} for rank in range(size)]
    if size > 3:
        ranks[3] |= {"state": "sleeps <img src=x>", "standing_out": "late", "late_s": 9.0}
    top = {"run_dir": "/runs/1", "phase": "running", "attempt": 1, "seconds": 75.0, "calls_per_second": 2.0}
    top |= {"calls_per_step": 4, "note": "", "ranks": ranks}
    return {"top": top, "rates": [[0, 1.0], [1, 2.0]], "is_over": False, "verdict": ""}


@pytest.mark.extended
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; scripts/browser installs one")
@pytest.mark.parametrize(
    ("size", "hosts"), [(1, "1 rank on 1 host"), (8, "8 ranks on 1 host"), (4096, "4,096 ranks on 512 hosts")]
)
def test_a_browser_shows_each_rank_and_runs_no_text_of_the_job(tmp_path: Path, size: int, hosts: str) -> None:
    assert BROWSER is not None
    for name in ("live.html", "live.css", "live.js"):
        shutil.copy(Path(live_page.__file__).with_name(name), tmp_path)
    (tmp_path / "data.json").write_text(json.dumps(job_of(size)))
    (tmp_path / "output").write_text("loss <script>document.title = 'run'</script>\n")
    handler = functools.partial(QuietHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, tempfile.TemporaryDirectory() as profile:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
            command = [BROWSER, *flags, "--virtual-time-budget=3000", "--dump-dom"]
            address = f"http://127.0.0.1:{server.server_port}/live.html"
            shown = subprocess.run([*command, address], capture_output=True, text=True, timeout=TIME_LIMIT, check=True)
        finally:
            server.shutdown()
            thread.join()
    dom = shown.stdout
    assert len(re.findall(r'class="rank (?:like|late)"', dom)) == size
    assert f"attempt 1, running, 1 min 15 s · {hosts}" in dom
    assert "loss &lt;script&gt;" in dom and "<title>1 · jaxrun</title>" in dom
    if size > 3:
        assert len(re.findall(r'class="rank late"', dom)) == 1 and "sleeps &lt;img src=x&gt;" in dom
    assert ('class="dense"' in dom) == (size > 256)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""
