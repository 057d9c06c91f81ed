"""The page of a job: served while it runs and after, written to a file, and in a browser with 1 to 4,096 ranks."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import BROWSER, FLAGS, needs_browser, run_page, with_probe
from harness import TIME_LIMIT, Job, jaxrun, started, wait_until, write_fake_runtime

from jaxrun.analysis.verdict.goodput_text import Goodput, Period
from jaxrun.cli.main import main
from jaxrun.frontends.job_page.document import read_outputs, whole_document
from jaxrun.frontends.job_page.page import format_page
from jaxrun.frontends.job_page.server import JobPage, find_job
from jaxrun.frontends.job_page.timeline import timeline_content
from jaxrun.records.history.job_trace import AttemptTrace, JobTrace, RankTrace

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

    def document(self, query: str = "") -> dict[str, Any]:
        content: dict[str, Any] = json.loads(self.read(f"document.json{query}"))
        return content


@contextmanager
def serving(folder: Path) -> Iterator[Page]:
    command = [sys.executable, "-m", "jaxrun", "top", "--web", "run"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as top:
        try:
            assert top.stderr is not None
            yield Page(top.stderr.readline().split()[2])
        finally:
            top.send_signal(signal.SIGINT)
            _, rest = top.communicate(timeout=TIME_LIMIT)
    assert (top.returncode, rest.strip()) == (130, "")


Served = tuple[Path, Job, Page]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    words = ("-n", "2", "by_hand.py", *[KEEPS_RUNNING.replace("rank,", f"{rank},") for rank in (0, 1)])
    with started(folder, *words, env=write_fake_runtime(folder)) as job:
        job.wait_for_output("ready", 2)
        with serving(folder) as page:
            yield folder, job, page


def test_only_the_address_with_the_token_is_answered(served: Served) -> None:
    _, _, page = served
    assert page.get("/")[0] == page.get("/document.json")[0] == page.get(f"/{page.token[:-1]}x/")[0] == 404
    assert page.get(f"/{page.token}/document.json", host="evil.example")[0] == 403
    assert page.get(f"/{page.token}/../../etc/passwd")[0] == page.get(f"/{page.token}/output?rank=../x")[0] == 404
    assert page.get(f"/{page.token}")[0] == 302
    assert page.get("document.json")[0] == 400, "a path without a slash"


def test_a_connection_that_is_reset_or_is_no_request_prints_nothing(served: Served) -> None:
    _, _, page = served
    with socket.create_connection(("127.0.0.1", page.port)) as link:
        link.sendall(b"GET /")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with socket.create_connection(("127.0.0.1", page.port), timeout=TIME_LIMIT) as link:
        link.sendall(b"GET http://[::1 HTTP/1.1\r\n\r\n")
        assert link.recv(100).startswith(b"HTTP/1.1 400 ")
    assert page.get(f"/{page.token}")[0] == 302, "and `serving` finds that nothing was printed"


def test_the_policy_lets_the_own_script_run_and_loads_nothing(served: Served) -> None:
    _, _, page = served
    status, text, headers = page.get(f"/{page.token}/")
    assert status == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    for kind, tag in (("script", "<script>"), ("style", "<style>")):
        (inside,) = re.findall(f"{tag}(.*?)</{kind}>", text, re.DOTALL)
        assert f"{kind}-src 'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'" in policy
    assert not re.search(r"""https?://|(?:src|href)\s*=|url\(|@import""", text)


def test_one_page_has_the_running_job_and_then_its_end(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, job, page = served
    seen = page.document("?rank=1")
    assert [one["rank"] for one in seen["top"]["ranks"]] == [0, 1] and seen["is_live"]
    assert "ready <b> 1" in seen["outputs"]["1"] and "0" not in seen["outputs"]
    assert "ready <b> 0" in page.read("output?rank=0") and page.read("output?rank=77") == ""
    assert "ready <b> 0" in page.read("output?rank=0&attempt=1") and page.read("output?rank=0&attempt=2") == ""
    assert seen["timeline"] is None and page.document("?timeline")["timeline"]["ranks"] == [0, 1]
    wait_until(lambda: page.document()["top"]["hosts"])
    (memory,) = page.document()["top"]["hosts"]
    assert 0 < memory["used_bytes"] < memory["limit_bytes"]
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(TIME_LIMIT) == 130
    wait_until(lambda: not page.document()["is_live"])
    over = page.document()
    assert (
        "interrupted" in over["verdict"]["headline"] and over["attempts"][0]["outcome"] == over["verdict"]["headline"]
    )
    assert (over["timeline"]["ranks"] == [0, 1] and over["top"]["hosts"] == [memory]) or over["top"]["hosts"]
    assert all(one["memory_bytes"] > 2**20 and one["doing"] == "ended" for one in over["top"]["ranks"])
    monkeypatch.chdir(folder)
    assert main(["explain", "--html", "page.html", "run"]) == 0
    assert capsys.readouterr().out == "wrote page.html; open it in any browser\n"
    text = (folder / "page.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    written = json.loads(data)
    assert "connect-src" not in text.partition("<title>")[0] and "ready <b>" not in text
    for part in ("title", "attempts", "verdict", "timeline"):
        assert written[part] == over[part]
    assert "ready <b> 1" in written["outputs"]["1"]
    with serving(folder) as again:
        assert again.document() == {**written, "outputs": {}} and "<!doctype html>" in again.read("")
    # as if the launcher had been killed
    shutil.copytree(folder / "run", folder / "killed", ignore=shutil.ignore_patterns("verdict.json"))
    run_dir, running = find_job(folder / "killed")
    verdict = json.loads(JobPage(run_dir, running).document())["verdict"]
    assert running is None and verdict["outcome"] == "no verdict" and "was killed" in verdict["headline"]


def test_a_page_without_a_server_has_the_output_of_earlier_attempts_too(tmp_path: Path) -> None:
    first = (
        "run(); new = not os.path.exists('tried'); open('tried', 'w'); print('first' if new else 'second'); sys.exit(3)"
    )
    options = ("-n", "1", "--max-restarts", "1", "by_hand.py", f"import os, sys; {first}")
    assert jaxrun(tmp_path, *options, env=write_fake_runtime(tmp_path)).code == 3
    document = whole_document(tmp_path / "run", has_outputs=True)
    assert (document["outputs"], document["earlier_outputs"]) == ({"0": "second\n"}, {"1": {"0": "first\n"}})


def test_the_end_of_a_ranks_output_lacks_what_the_screen_hides(tmp_path: Path) -> None:
    gloo = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
    (tmp_path / "rank-0000.out").write_text(f"one\n{gloo}two")
    (tmp_path / "rank-0001.out").write_text(gloo)
    assert read_outputs(tmp_path, [0, 1, 2]) == {0: "one\ntwo", 1: "", 2: ""}


def job_of(size: int) -> dict[str, Any]:
    """The document of a running job whose rank 3, if there is one, keeps all others waiting."""
    common = {"since_s": 3.0, "number": 12, "behind": 0, "late_s": None, "cpu_percent": 5.0, "memory_bytes": 2**30}
    common |= {"gpu_percent": None, "gpu_bytes": None, "standing_out": "like others"}
    waits = {"state": "waits for rank 3", "doing": "waiting", "waits_for": [3]}
    ranks = [{"rank": rank, "host": f"h{rank // 8}", **waits, **common} for rank in range(size)]
    if size > 3:
        ranks[3] |= {"state": "sleeps <img src=x>", "doing": "idle", "waits_for": [], "standing_out": "late"}
    top = {"run_dir": "/runs/1", "phase": "running", "attempt": 1, "seconds": 75.0, "calls_per_second": 2.0}
    top |= {"calls_per_step": 4, "note": "", "ranks": ranks}
    top["hosts"] = [{"host": "h0", "used_bytes": 3 * 2**30, "limit_bytes": 4 * 2**30}]
    attempts = [{"number": 1, "start": 0.0, "seconds": 75.0, "hosts": 1, "outcome": ""}]
    document = {
        "is_live": True,
        "title": "train.py",
        "tag": "",
        "start": 1e9,
        "top": top,
        "rates": [[0, 1.0], [1, 2.0]],
    }
    outputs = {"0": "loss <script>document.title = 'run'</script>\n"}
    document |= {"outputs": outputs, "earlier_outputs": {}}
    return {**document, "attempts": attempts, "verdict": None, "timeline": None}


@pytest.mark.extended
@needs_browser
@pytest.mark.parametrize(
    ("size", "hosts"), [(1, "1 rank on 1 host"), (8, "8 ranks on 1 host"), (4096, "4,096 ranks on 512 hosts")]
)
def test_a_browser_shows_each_rank_and_runs_no_text_of_the_job(tmp_path: Path, size: int, hosts: str) -> None:
    assert BROWSER is not None
    (tmp_path / "page.html").write_text(format_page(job_of(size)))
    with tempfile.TemporaryDirectory() as profile:
        command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=3000", "--dump-dom"]
        address = (tmp_path / "page.html").as_uri()
        shown = subprocess.run([*command, address], capture_output=True, text=True, timeout=TIME_LIMIT, check=True)
    dom = shown.stdout
    assert len(re.findall(r'class="cell (?:waiting|late)', dom)) == size
    assert f"75.0 s · {hosts} · 0.5 steps/s" in dom
    assert "loss &lt;script&gt;" in dom and "<title>train.py · jaxrun</title>" in dom
    assert ("3 GiB of 4 GiB" in dom and "others wait for it: 1" in dom) or size == 1
    if size > 3:
        assert len(re.findall(r'class="cell late is-awaited"', dom)) == 1 and "sleeps &lt;img src=x&gt;" in dom
    assert ('class="dense"' in dom) == (size > 256)


KEYS_PROBE = """<script>
const report = found => fetch("/result", {method: "POST", body: JSON.stringify(found)});
addEventListener("error", event => report({error: event.message}));
const grid = ids("hosts"), press = key => grid.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
const at = () => [chosenRank, ids("rank-title").textContent];
const found = {start: at()};
press("ArrowRight");
found.right = at();
press("ArrowDown");
found.down = at();
press("End");
found.end = at();
press("Home");
found.home = at();
grid.focus();
found.outline = getComputedStyle(grid).outlineStyle;
found.active = grid.getAttribute("aria-activedescendant");
found.signs = [...document.querySelectorAll(".cell")].map(cell => cell.dataset.sign).join("");
found.wide = document.documentElement.scrollWidth <= innerWidth;
report(found);
</script>"""


@pytest.mark.extended
@needs_browser
def test_the_keyboard_chooses_ranks_and_signs_say_what_colours_say() -> None:
    found = run_page("page.html", {"page.html": with_probe(format_page(job_of(24)), KEYS_PROBE).encode()})
    assert "error" not in found, found
    ranks = [found[name] for name in ("start", "right", "down", "end", "home")]
    assert ranks == [[n, f"Rank {n} on h{n // 8}"] for n in (0, 1, 9, 23, 0)]
    assert found["outline"] == "solid" and found["active"] == "cell-0" and found["wide"]
    assert found["signs"] == "…" * 3 + "!" + "…" * 20


ATTEMPTS_PROBE = """<script>
const report = found => fetch("/result", {method: "POST", body: JSON.stringify(found)});
addEventListener("error", event => report({error: event.message}));
const look = () => [ids("output").textContent, [...ids("attempt").options].map(one => one.textContent)];
const found = {start: look(), hidden: ids("of-attempt").hidden};
ids("attempt").value = "2";
ids("attempt").dispatchEvent(new Event("change"));
found.earlier = look();
chooseRank(1);
found.other = look();
report(found);
</script>"""


@pytest.mark.extended
@needs_browser
def test_the_output_of_an_earlier_attempt_can_be_chosen() -> None:
    document = job_of(2)
    document["attempts"] = [{**document["attempts"][0], "number": number, "outcome": "failed"} for number in (1, 2, 3)]
    document |= {"outputs": {"0": "last"}, "earlier_outputs": {"2": {"0": "second", "1": "of 1"}}}
    found = run_page("page.html", {"page.html": with_probe(format_page(document), ATTEMPTS_PROBE).encode()})
    assert "error" not in found, found
    choices = ["attempt 2", "attempt 3, the last"]
    assert (found["start"], found["hidden"]) == (["last", choices], False)
    assert (found["earlier"], found["other"]) == (["second", choices], ["of 1", choices])


NAMES_PROBE = """<script>
const report = found => fetch("/result", {method: "POST", body: JSON.stringify(found)});
addEventListener("error", event => report({error: event.message}));
const drawn = [], nothing = () => {};
const pen = {fillRect: nothing, beginPath: nothing, arc: nothing, fill: nothing,
             measureText: text => ({width: 6 * text.length}), fillText: (text, left) => drawn.push([text, left])};
const saves = every => Array.from({length: Math.floor(10 / every)},
                                  (_, at) => [at * every, `saved step ${at}`, "", false]);
const names = marks => { drawn.length = 0; drawFlags(pen, marks, 0, 1000); return drawn.slice(); };
Object.assign(view, {from: 0, to: 10});
report({few: names(saves(2)), many: names(saves(0.1)), failed: names([...saves(0.1), [5, "ValueError", "", true]]),
        last: names([[9.9, "ValueError", "", true]])});
</script>"""


@pytest.mark.extended
@needs_browser
def test_names_of_marks_lie_neither_over_each_other_nor_over_other_marks() -> None:
    found = run_page("page.html", {"page.html": with_probe(format_page(job_of(2)), NAMES_PROBE).encode()})
    assert "error" not in found, found
    assert [name for name, _ in found["few"]] == [f"saved step {number}" for number in range(5)]
    assert found["many"] == [] and [name for name, _ in found["failed"]] == ["ValueError"]
    ((name, left),) = found["last"]
    assert name == "ValueError" and left + 6 * len(name) < 990, "on the left side, where it fits"


END_PROBE = """<script>
const report = found => fetch("/result", {method: "POST", body: JSON.stringify(found)});
addEventListener("error", event => report({error: event.message}));
const look = () => ({badge: ids("badge").textContent, isLive: shown.is_live, verdict: !ids("verdict").hidden,
                     report: ids("report").textContent, rows: labels.children.length, chart: chart.clientHeight > 0,
                     loads: !ids("load").hidden, title: ids("states-title").textContent,
                     worth: !ids("goodput").hidden});
const before = look();
const pointAt = share => {
  const box = band.getBoundingClientRect(), pen = band.getContext("2d");
  band.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + share * box.width, clientY: box.top + 5}));
  const [red, green, blue] = pen.getImageData(share * band.width, band.height / 2, 1, 1).data;
  return {tip: tip.innerText.split("\\n"), isGreen: green > red && green > blue};
};
const timer = setInterval(() => {
  if (shown.is_live) return;
  clearInterval(timer);
  const worth = [...ids("goodput").querySelectorAll("p, li")].map(part => part.innerText.replace(/\\s+/g, " "));
  requestAnimationFrame(() => report({before, after: look(), worth, start: pointAt(0.1), end: pointAt(0.9)}));
}, 50);
</script>"""


@pytest.mark.extended
@needs_browser
def test_when_the_job_ends_the_page_shows_verdict_and_timeline_in_place() -> None:
    live = job_of(2)
    ended = {**live, "is_live": False, "verdict": {"tone": "bad", "outcome": "failed", "headline": "rank 1 failed"}}
    ended["verdict"] |= {"report": "rank 1 failed\nexit 1", "ended": ""}
    attempt = AttemptTrace(1, 0.0, 9.0, {rank: RankTrace(rank) for rank in (0, 1)})
    spent = (Period(0.0, 3.0, {"python": 3_000_000}), Period(3.0, 9.0, {"steps": 4_500_000, "data": 1_500_000}))
    goodput = Goodput(9_000_000, {"steps": 4_500_000, "python": 3_000_000, "data": 1_500_000}, attempts=1)
    ended["timeline"] = timeline_content(JobTrace("train.py", (attempt,), goodput=goodput, band=spent))
    page = with_probe(format_page(live, is_served=True), END_PROBE)
    found = run_page("page.html", {"page.html": page.encode(), "document.json": json.dumps(ended).encode()})
    assert "error" not in found, found
    before, after = found["before"], found["after"]
    assert (before["badge"], before["verdict"], before["rows"], before["loads"]) == ("running", False, 0, True)
    assert (after["badge"], after["verdict"], after["rows"], after["loads"]) == ("failed", True, 2, False)
    assert (before["worth"], after["worth"]) == (False, True)
    line, *parts = found["worth"]
    assert line.startswith("goodput 50.0 % of 9.0 s: 33.3 % starting Python") and parts[0] == "steps 4.50 s 50 %"
    assert (found["start"]["isGreen"], found["end"]["isGreen"]) == (False, True)
    assert found["end"]["tip"] == ["3.00 s to 9.00 s", "75 % steps", "25 % waiting for a rank's data"]
    assert after["report"].endswith("exit 1") and after["chart"] and after["title"] == "How ranks ended"
