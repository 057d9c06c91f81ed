"""`jaxrun debug`: an editor, played by a small client of its protocol, debugs ranks of jobs."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import jsonschema
import pytest
from dap_client import DapClient
from harness import started, wait_until
from msgspec import UNSET, to_builtins
from msgspec.structs import replace

from jaxrun.files import loopback
from jaxrun.frontends.debugger import session

SCHEMA = Path(__file__).parents[2] / "docs/schemas/debug.json"
# Rank 0 waits for rank 1 in a collective, and rank 1 in Python.
WAITS = """
import os, time, jax
from jax.experimental import multihost_utils
print("ready", flush=True)
turns = 0
while jax.process_index() == 1 and not os.path.exists("go"):
    turns += 1
    time.sleep(0.01)
multihost_utils.sync_global_devices("meet")
met = "met"
print(met, flush=True)
"""
LOOP, AFTER = 7, 11


class Debug:
    """`jaxrun debug` as a process; `port` is where an editor connects."""

    def __init__(self, *arguments: object, cwd: Path | None = None) -> None:
        command = [sys.executable, "-m", "jaxrun", "debug", "--json", *map(str, arguments)]
        self.process = subprocess.Popen(command, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    @property
    def configuration(self) -> dict[str, object]:
        document = json.loads(self.process.stdout.readline())
        jsonschema.validate(document, json.loads(SCHEMA.read_text()))
        self.port = document["configuration"]["connect"]["port"]
        return document["configuration"]

    def connect(self) -> DapClient:
        return DapClient(self.configuration["connect"]["port"])

    def end(self, status=0):
        out, err = self.process.communicate(timeout=60)
        assert self.process.returncode == status, (out, err)
        return out + err


@contextmanager
def debugging(*arguments: object, cwd: Path | None = None):
    debug = Debug(*arguments, cwd=cwd)
    try:
        yield debug
    finally:
        debug.process.kill()
        debug.process.communicate()


def top(run_dir):
    command = [sys.executable, "-m", "jaxrun", "top", "--json", run_dir]
    ranks = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["ranks"]
    return {one["rank"]: one["state"] for one in ranks}


def threads(pid):
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/comm"):
        with suppress(OSError):  # it has ended meanwhile
            found.add(path.read_text().strip())
    return found


def listening(pid):
    """The TCP ports at which a process listens."""
    found, inodes = set(), set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            inodes.add(path.readlink().name)
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        columns = line.split()
        if columns[3] == "0A" and f"socket:[{columns[9]}]" in inodes:
            found.add(columns[1])
    return found


def test_an_editor_debugs_two_ranks_of_a_running_job_and_nothing_is_left_of_it(tmp_path):
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    with started(tmp_path, "-n", "2", "--timeout", "60", "waits.py") as job:
        job.wait_for_output("ready", 2)
        pids = {event["rank"]: event["pid"] for event in job.events("WorkerSpawned")}
        ports = {rank: listening(pid) for rank, pid in pids.items()}
        with debugging(job.run_dir, "--rank", "1") as debug, debugging(job.run_dir, "--rank", "0") as other:
            editor = debug.connect()
            editor.attach(str(program), (LOOP,))
            thread, (frame, *_) = editor.stopped()
            assert (frame["line"], Path(frame["source"]["path"])) == (LOOP, program)
            assert int(editor.evaluate("turns", frame)) > 0
            assert editor.evaluate("jax.process_index()", frame) == "1"
            assert {rank: listening(pid) for rank, pid in pids.items()} == ports, "no port is open in a rank"

            refused = Debug(job.run_dir, "--rank", "1").end(2)
            assert "rank 1 is being debugged already" in refused and "there is no rank 7" in Debug(
                job.run_dir, "--rank", "7"
            ).end(2)

            blocked = other.connect()  # its main thread is in C++
            blocked.attach(str(program), (AFTER,))
            assert top(job.run_dir) == {0: "is debugged", 1: "is debugged"}
            (tmp_path / "go").touch()
            editor.break_at(str(program))
            editor.request("continue", threadId=thread)
            editor.request("disconnect", terminateDebuggee=False)
            editor.close()
            assert re.search("has let go of rank 1|the program of rank 1 has ended", debug.end())
            thread, (frame, *_) = blocked.stopped()
            assert frame["line"] == AFTER and blocked.evaluate("met", frame) == "'met'"
            blocked.close()  # the editor was killed
            assert re.search("has let go of rank 0|the program of rank 0 has ended", other.end())
        result = job.end()
    assert result.code == 0, result
    assert {event["rank"] for event in job.events("DebugpyStarted")} == {0, 1}
    assert "is over; how it went: jaxrun explain" in Debug(job.run_dir, "--rank", "0").end(2)


@pytest.mark.extended
def test_a_killed_jaxrun_debug_lets_the_rank_go_on_and_it_can_be_debugged_again(tmp_path):
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    with started(tmp_path, "-n", "2", "waits.py") as job:
        job.wait_for_output("ready", 2)
        pid = next(event["pid"] for event in job.events("WorkerSpawned") if event["rank"] == 1)
        before = threads(pid)
        for _ in range(2):
            with debugging(job.run_dir, "--rank", "1") as debug:
                editor = debug.connect()
                editor.attach(str(program), (LOOP,))
                editor.stopped()
                debug.process.kill()
            editor.close()
            wait_until(lambda: top(job.run_dir)[1] != "is debugged")
            wait_until(lambda: threads(pid) == before, "the threads of before")
        (tmp_path / "go").touch()
        assert job.end().code == 0


def connect_only(editor, program):
    """Phase 1: only the port is tried."""


def initialize(editor, program):
    editor.request("initialize", adapterID="debugpy", clientID="test", pathFormat="path")


def attach(editor, program):
    editor.attach(program)


def stop(editor, program):
    editor.attach(program, (LOOP,))
    editor.stopped()


def check_end_of_editor(job, program, phase, *, reset):
    """The rank continues after the end of an editor's connection in this phase, and can be debugged again."""
    with debugging(job.run_dir, "--rank", "1") as debug:
        editor = debug.connect()
        phase(editor, str(program))
        editor.close(reset=reset)
        if phase is connect_only:
            editor = DapClient(debug.port)
            editor.attach(str(program))
            editor.close()
        assert "has let go of rank 1" in debug.end()
    assert top(job.run_dir)[1] != "is debugged"


def test_an_editor_that_is_killed_before_it_attaches_lets_the_rank_go_on(tmp_path):
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    with started(tmp_path, "-n", "2", "--timeout", "15", "waits.py") as job:
        job.wait_for_output("ready", 2)
        check_end_of_editor(job, program, initialize, reset=True)
        (tmp_path / "go").touch()
        assert job.end().code == 0


@pytest.mark.extended
def test_the_end_of_an_editors_connection_in_any_phase_ends_the_session(tmp_path):
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    with started(tmp_path, "-n", "2", "--timeout", "90", "waits.py") as job:
        job.wait_for_output("ready", 2)
        for phase in (connect_only, initialize, attach, stop):
            for reset in (False, True):
                check_end_of_editor(job, program, phase, reset=reset)
        (tmp_path / "go").touch()
        assert job.end().code == 0


@pytest.mark.extended
def test_a_rank_without_debugpy_says_what_to_install_and_goes_on(tmp_path):
    (tmp_path / "waits.py").write_text("import sys; sys.modules['debugpy'] = None\n" + WAITS)
    with started(tmp_path, "-n", "2", "waits.py") as job:
        job.wait_for_output("ready", 2)
        assert "there has no debugpy; install it: pip install" in Debug(job.run_dir, "--rank", "1").end(2)
        (tmp_path / "go").touch()
        assert job.end().code == 0


@pytest.mark.extended
def test_the_example_of_the_page_prints_what_the_page_shows(tmp_path):
    page = (SCHEMA.parents[1] / "debugging.md").read_text().partition("\n## An editor's debugger\n")[2]
    program, shown = re.findall(r"^```(?:python|text)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[:2]
    (tmp_path / "count.py").write_text(program)
    words = ("-m", "jaxrun", "-n", "2", "count.py")
    with started(tmp_path, *words, command=(sys.executable,)):
        log = tmp_path / "jaxrun-runs/latest/events.jsonl"
        wait_until(lambda: log.exists() and log.read_text().count('"DeviceReport"') == 2)
        command = [sys.executable, "-m", "jaxrun", "debug", "--rank", "1"]
        with subprocess.Popen(
            command, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as debug:
            lines: list[str] = []
            while lines[-1:] != ["}\n"]:
                lines.append(debug.stdout.readline())
                assert lines[-1], lines
            port = re.search(r'"port": (\d+)', "".join(lines))[1]
            editor = DapClient(int(port))
            editor.attach(str(tmp_path / "count.py"), (6,))
            _, (frame, *_) = editor.stopped()
            assert int(editor.evaluate("total", frame)) >= 0
            editor.request("disconnect", terminateDebuggee=False)
            editor.close()
            text = "".join([*lines, *debug.stdout])
    assert text.replace(port, "41235") == shown.partition("RUN_DIR --rank 1\n")[2]


def test_what_is_missing_on_this_side_is_said_at_once(tmp_path):
    assert "--rank is missing; say which rank to debug" in Debug(tmp_path).end(2)
    hidden = "import sys; sys.modules['debugpy'] = None\nfrom jaxrun.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", hidden, "debug", "--rank", "0"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and re.fullmatch(r"jaxrun: jaxrun debug needs debugpy; .*\n", done.stderr), done


def test_the_configuration_says_where_staged_files_are_on_the_host_of_the_rank():
    plain = session.make_configuration(3, 5678, {})
    staged = session.make_configuration(3, 5678, {"/home/me/src": "/tmp/jaxrun-1000/ab"})
    assert to_builtins(staged)["pathMappings"] == ({"localRoot": "/home/me/src", "remoteRoot": "/tmp/jaxrun-1000/ab"},)
    assert plain == replace(staged, pathMappings=UNSET) and "pathMappings" not in to_builtins(plain)


def test_only_a_connection_of_the_same_user_is_accepted(monkeypatch):
    users = iter([None, 12345])
    real = loopback.find_peer_user
    monkeypatch.setattr(loopback, "find_peer_user", lambda link: next(users, real(link)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        links = [socket.create_connection(listener.getsockname()) for _ in range(3)]
        with loopback.accept_own(listener) as accepted:
            assert accepted.getpeername() == links[2].getsockname()
            assert links[0].recv(1) == links[1].recv(1) == b""
        for link in links:
            link.close()


def test_a_connection_that_its_owner_has_closed_or_reset_is_not_accepted():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed, reset, kept = (socket.create_connection(listener.getsockname()) for _ in range(3))
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        closed.sendall(b"orders of somebody whom the kernel does not know any more")
        closed.close()
        reset.close()
        with loopback.accept_own(listener) as accepted:
            assert accepted.getpeername() == kept.getsockname()
        kept.close()


def test_of_several_connections_the_first_that_says_something_is_accepted():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        closed, reset, silent, speaks = (socket.create_connection(listener.getsockname()) for _ in range(4))
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        closed.close()
        reset.close()
        speaks.sendall(b"Content-Length: 0")
        with loopback.accept_own_that_speaks(listener) as accepted:
            assert accepted.getpeername() == speaks.getsockname() and accepted.recv(99) == b"Content-Length: 0"
            assert silent.recv(1) == b""
            speaks.close()
            loopback.wait_until_closed(accepted)
        silent.close()


# ---- --debug and --debug-post-mortem

STARTS = """
import jax
rank = jax.process_index()

def load(shard):
    records = [shard, "bad"]
    raise ValueError(f"bad record in shard {shard}")

if rank == 1:
    load(2)
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("end")
"""
FIRST, RAISES = 2, 7


def test_ranks_wait_at_their_first_line_and_a_failed_one_keeps_its_frames(tmp_path):
    program = tmp_path / "starts.py"
    program.write_text(STARTS)
    with started(tmp_path, "-n", "2", "--debug", "--debug-post-mortem", "--stall-timeout", "60", "starts.py") as job:
        printed = iter(job.process.stderr.readline, "")
        assert any("wait for an editor before the first line (--debug)" in line for line in printed)
        assert top(job.run_dir) == {0: "is debugged", 1: "is debugged"}
        with debugging(job.run_dir, "--rank", "1") as debug:
            editor = debug.connect()
            editor.attach(str(program), (FIRST,))
            thread, (frame, *_) = editor.stopped()
            assert frame["line"] == FIRST
            editor.request("continue", threadId=thread)
            shown = next(line for line in printed if "rank 1 failed: ValueError: bad record in shard 2" in line)
            assert shown and any("kept for an editor: jaxrun debug --rank 1; Ctrl-C ends" in line for line in printed)
            editor.close()
            debug.end()
        with debugging(job.run_dir, "--rank", "1") as debug:
            editor = debug.connect()
            editor.attach()
            thread, (inner, outer, *_) = editor.stopped()
            assert (inner["line"], editor.evaluate("records", inner)) == (RAISES, "[2, 'bad']")
            assert editor.evaluate("rank", outer) == "1"
            editor.request("continue", threadId=thread)
            editor.close()
            debug.end()
        result = job.end()
    assert result.code == 1 and "rank 1 of 2 raised ValueError" in result.err and result.verdict()["culprits"] == [1]


@pytest.mark.extended
def test_an_editor_that_is_killed_leaves_ranks_that_wait_for_one_to_the_next(tmp_path):
    program = tmp_path / "waits.py"
    program.write_text(WAITS)
    (tmp_path / "go").touch()
    with started(tmp_path, "-n", "2", "--debug", "--timeout", "60", "waits.py") as job:
        assert any("wait for an editor" in line for line in iter(job.process.stderr.readline, ""))
        with debugging(job.run_dir, "--rank", "1") as debug:
            editor = debug.connect()
            initialize(editor, program)
            editor.close(reset=True)
            assert "has let go of rank 1" in debug.end()
        assert top(job.run_dir) == {0: "is debugged", 1: "is debugged"}
        with debugging(job.run_dir, "--rank", "1") as debug:
            editor = debug.connect()
            editor.attach(str(program))
            assert job.end().code == 0
            editor.close()


@pytest.mark.extended
def test_go_starts_the_programs_and_the_user_ends_a_job_that_keeps_frames(tmp_path):
    (tmp_path / "starts.py").write_text(STARTS)
    with started(tmp_path, "-n", "2", "--debug", "--debug-post-mortem", "starts.py") as job:
        printed = iter(job.process.stderr.readline, "")
        assert any("(--debug)" in line for line in printed)
        Debug(job.run_dir, "--go").end()
        assert any("kept for an editor" in line for line in printed)
        assert "does not wait for an editor" in Debug(job.run_dir, "--go").end(2)
        job.process.send_signal(signal.SIGINT)
        result = job.end()
    assert result.code == 1 and "rank 1 of 2 raised ValueError" in result.err
