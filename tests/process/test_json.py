"""--json: each command prints one document, which its schema in docs/schemas describes whole."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from harness import Result, started

from jaxrun.cli.main import main
from jaxrun.records.document_schemas import make_schemas

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "docs" / "schemas"
WAITS = """
import time, jax
from jax.experimental.multihost_utils import sync_global_devices
sync_global_devices("one")
print("ready", flush=True)
if jax.process_index() == 1:
    time.sleep(600)
sync_global_devices("two")
"""


def check(text: str) -> dict[str, Any]:
    """Parse a document; it has all that its schema requires, and at its top nothing that the schema does not name."""
    document: dict[str, Any] = json.loads(text)
    schema = json.loads((SCHEMAS / f"{document['kind'].replace(' ', '-')}.json").read_text())
    jsonschema.validate(document, schema)
    assert document.keys() == schema["properties"].keys()
    return document


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, Any]:
    assert main(words) == code
    out, err = capsys.readouterr()
    assert err == ""
    return check(out)


def stacks_once_both_wait(folder: Path) -> subprocess.CompletedProcess[str] | None:
    """What `jaxrun stacks` says, once rank 1 sleeps and rank 0 has come to where it waits for it."""
    words = [sys.executable, "-m", "jaxrun", "stacks", "--json", "run"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ranks = {one["rank"]: one for one in json.loads(done.stdout)["ranks"]}
    return done if (ranks[1]["activity"], ranks[0]["waits_for"]) == ("sleep", [1]) else None


Ended = tuple[Path, dict[str, Any], list[dict[str, Any]], Result]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """A job that was looked at and stopped: its directory, its stacks, what --follow printed, how it ended."""
    folder = tmp_path_factory.mktemp("json")
    (folder / "waits.py").write_text(WAITS)
    jaxrun = [sys.executable, "-m", "jaxrun"]
    with started(folder, "-n", "2", "--tag", "t", "waits.py") as job:
        job.wait_for_output("ready", 2)
        done = job.wait_until(lambda: stacks_once_both_wait(folder), "ranks that sleep and wait")
        follow = [*jaxrun, "top", "--json", "--follow", "run"]
        with subprocess.Popen(follow, cwd=folder, stdout=subprocess.PIPE, text=True) as top:
            assert top.stdout is not None
            lines = [top.stdout.readline(), top.stdout.readline()]
            stopped = subprocess.run([*jaxrun, "stop", "--json", "run"], cwd=folder, capture_output=True, text=True)
            result = job.end()
            lines += top.stdout.readlines()
        assert top.returncode == 0
        assert stopped.returncode == 0 and check(stopped.stdout)["exit_code"] == result.code == 143
    yield folder, check(done.stdout), list(map(check, lines)), result


def test_stacks_say_where_each_rank_is_and_which_it_waits_for(ended: Ended) -> None:
    _, stacks, _, _ = ended
    by_rank = {one["rank"]: one for one in stacks["ranks"]}
    assert (by_rank[1]["activity"], by_rank[0]["waits_for"]) == ("sleep", [1])
    assert any(frame["file"].endswith("waits.py") and frame["line"] == 7 for frame in by_rank[1]["frames"])
    assert "sleep" in stacks["text"]


def test_top_follows_a_job_until_it_is_over(ended: Ended) -> None:
    _, _, views, _ = ended
    assert len(views) >= 2 and all(view["phase"] in ("running", "ending") for view in views)
    first = {one["rank"]: one for one in views[0]["ranks"]}
    assert first[0]["memory_bytes"] > 2**20 and first[0]["state"].startswith("waits")


def test_an_ended_job_is_listed_explained_and_cleaned(
    ended: Ended, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, _, result = ended
    monkeypatch.chdir(folder)
    job = check(Path("run", "job.json").read_text())
    assert job["launcher"]["pid"] > 0 and job["options"]["tag"] == "t"
    explained = printed(capsys, "explain", "--json", "run")
    assert explained["verdict"]["exit_code"] == result.code == 143
    (attempt,) = explained["attempts"]
    assert [one["rank"] for one in attempt["ranks"]] == [0, 1] and attempt["ranks"][0]["seconds"]["joined"] > 0
    (listed,) = printed(capsys, "list", "--json", ".")["jobs"]
    assert (listed["tag"], listed["exit_code"], listed["running"]) == ("t", 143, False)
    kept = printed(capsys, "clean", "--keep", "1", "--json", ".")
    assert kept["deleted"] == [] and kept["failed"] == {}
    over = printed(capsys, "stacks", "--json", "run", code=2)
    assert over["kind"] == "error" and "is over" in over["error"] and over["exit_code"] == 2


def test_what_would_be_started_the_version_and_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import flax\n")
    plan = printed(capsys, "--dry-run", "--json", "-n", "2", "--env", "API_TOKEN=hunter2", "train.py")
    assert plan["program"] == ["train.py"] and [one["rank"] for one in plan["workers"]] == [0, 1]
    assert plan["preloaded"] == ["flax"] and "hunter2" not in json.dumps(plan)
    assert printed(capsys, "--version", "--json")["jaxrun"]
    copies = printed(capsys, "clean", "--staged", "--stage-dir", str(tmp_path), "--json")
    assert (copies["kind"], copies["copies"]) == ("cleaned copies", 0)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("--dry-run", "--json", "nosuch.py"), "does not exist"),
        (("--dry-run", "--json", "-n", "many", "train.py"), "'many'"),
        (("explain", "--json", "nosuch"), "nosuch"),
        (("top", "--json", "--folow"), "--folow"),
    ],
)
def test_errors_are_documents_with_the_same_exit_code(
    words: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = printed(capsys, *words, code=2)
    assert found["kind"] == "error" and what in found["error"] and found["exit_code"] == 2


def test_json_without_dry_run_says_where_it_belongs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    assert main(["--json", str(tmp_path / "train.py")]) == 2
    assert "jaxrun explain --json" in capsys.readouterr().err


def test_the_schemas_are_those_of_the_classes() -> None:
    written = {path.name: path.read_text() for path in SCHEMAS.iterdir()}
    assert written == make_schemas(), "run scripts/schemas"


def test_the_page_names_all_schemas_and_no_other() -> None:
    page = (ROOT / "docs" / "json.md").read_text()
    assert set(re.findall(r"\(schemas/(.*?\.json)\)", page)) == {path.name for path in SCHEMAS.iterdir()}
