"""--stage: contents and their names, copies on a disk, from host to host, and what the head orders."""

import contextlib
import os
import threading

import pytest
from simulation import HEAD_ADDRESS, make_registry, report

from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import JobPhase, TimeLimits
from jaxrun.controller.head.startup import Startup
from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.node.agent.host_probe import PeerServer
from jaxrun.node.forkserver import early
from jaxrun.node.staging import copies as copies_module
from jaxrun.node.staging.content import copy_files, list_directory, name_of, read_manifest
from jaxrun.node.staging.copies import Copies
from jaxrun.node.staging.transfer import Supply, Taker
from jaxrun.protocol.agent_messages import StartWorker
from jaxrun.protocol.stage_messages import CopyStaged, Stage, StagedContent, StagedCopied, staged_path
from jaxrun.records.event_log.actions import Finish, PrintLine
from jaxrun.records.event_log.events import Tick
from jaxrun.spec.job.staged import staged_argv, staged_variables

TOKEN = "a token that is long enough"


@pytest.fixture
def source(tmp_path):
    """A directory with all that there is in one."""
    folder = tmp_path / "source"
    (folder / "lib" / "empty").mkdir(parents=True)
    (folder / "lib" / "module.py").write_text("x = 1\n")
    (folder / "lib" / "large").write_bytes(os.urandom(3 * 2**20 + 5))
    (folder / "lib" / "nothing").touch()
    (folder / "tool").write_text("#!/bin/sh\n")
    (folder / "tool").chmod(0o755)
    (folder / "link").symlink_to("lib/module.py")
    os.utime(folder / "lib" / "module.py", ns=(1, 1_700_000_000_123_456_789))
    return folder


def copied(copies, folder):
    """A copy of the directory, and its name."""
    entries, _ = list_directory(str(folder))
    with copies.begin(entries) as draft:
        entries = copy_files(str(folder), draft.path, entries, lambda entry: None)
        name = name_of(entries)
        return copies.finish(draft, name, entries), name


def contents(folder):
    """What is below a folder, with modes, times and links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        status, is_file = path.lstat(), path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = kind, *((status.st_mode, status.st_mtime_ns) if is_file else ())
    return found


# ---- contents and their names


def test_a_name_is_a_hash_of_paths_modes_links_and_contents_but_not_of_times(source, tmp_path):
    copies = Copies(str(tmp_path))
    names = [copied(copies, source)[1]]
    for change in (
        lambda: (source / "lib" / "module.py").write_text("x = 2\n"),
        lambda: (source / "tool").chmod(0o644),
        lambda: ((source / "link").unlink(), (source / "link").symlink_to("tool")),
        lambda: (source / "lib" / "nothing").rename(source / "lib" / "renamed"),
    ):
        change()
        names.append(copied(copies, source)[1])
    assert len(set(names)) == 5
    os.utime(source / "tool", (5, 5))
    assert copied(copies, source)[1] == names[-1]


def test_what_is_no_file_and_what_grows_with_each_job_is_left_out(source):
    entries, seen = list_directory(str(source))
    (source / ".git").mkdir()
    (source / "jaxrun-runs" / "1").mkdir(parents=True)
    os.mkfifo(source / "fifo")
    assert list_directory(str(source)) == (entries, seen)
    assert [entry.path for entry in entries] == [
        "lib", "lib/empty", "lib/large", "lib/module.py", "lib/nothing", "link", "tool",
    ]  # fmt: skip


@pytest.mark.parametrize("path", ["lib/module.py", "tool"])
def test_what_a_file_system_says_tells_a_change(source, path):
    _, seen = list_directory(str(source))
    assert list_directory(str(source))[1] == seen
    (source / "new").write_bytes((source / path).read_bytes())
    (source / "new").replace(source / path)  # as pip does
    assert list_directory(str(source))[1] != seen


def test_a_file_that_changes_while_it_is_read_is_named_and_nothing_is_left(source, tmp_path):
    copies = Copies(str(tmp_path))
    entries, _ = list_directory(str(source))
    with open(source / "lib" / "large", "ab") as file:
        file.write(b"more")
    with (
        pytest.raises(UnavailableError, match=f"{source}/lib/large has changed while it was read"),
        copies.begin(entries) as draft,
    ):
        copy_files(str(source), draft.path, entries, lambda entry: None)
    assert os.listdir(copies.path) == []


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x"])
def test_a_manifest_leads_nowhere_else(path):
    with pytest.raises(ValueError, match="leads out"):
        read_manifest(f'[["{path}", 33188]]'.encode())


# ---- copies on a disk


def test_a_copy_is_as_the_directory_was(source, tmp_path):
    copies = Copies(str(tmp_path))
    copy, name = copied(copies, source)
    assert contents(tmp_path / copies.path / name / "copy") == contents(source)
    copy.note_source("seen")
    found = copies.find_source("seen")
    assert found and found[0] == name and found[1].path == copy.path
    assert copies.find_source("seen no more") is None
    assert os.stat(copies.path).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("harm", ["removed", "longer", "touched"])
def test_a_copy_of_which_something_is_gone_or_changed_is_none(source, tmp_path, harm):
    copies = Copies(str(tmp_path))
    copy, name = copied(copies, source)
    os.close(copy.lock)
    file = os.path.join(copy.path, "lib/module.py")
    {
        "removed": lambda: os.unlink(file),
        "longer": lambda: os.truncate(file, 100),
        "touched": lambda: os.utime(file),
    }[harm]()
    assert copies.find(name) is None
    assert os.listdir(copies.path) == []
    assert copied(copies, source)[1] == name


def test_compiled_modules_that_python_adds_to_a_copy_do_no_harm(source, tmp_path):
    copies = Copies(str(tmp_path))
    copy, name = copied(copies, source)
    os.mkdir(f"{copy.path}/lib/__pycache__")
    assert copies.find(name)


def test_a_copy_that_is_in_use_is_not_removed(source, tmp_path):
    copies = Copies(str(tmp_path))
    copy, name = copied(copies, source)
    assert copies.remove_unused(dry_run=False) == (1, 0) and not copies.remove(name)
    os.close(copy.lock)
    assert copies.remove_unused(dry_run=True) == (1, 1) and copies.find(name)


def test_what_was_left_unfinished_and_the_oldest_copies_make_room(source, tmp_path, monkeypatch):
    monkeypatch.setattr(copies_module, "_KEPT", 2)
    copies = Copies(str(tmp_path))
    os.mkdir(f"{copies.path}/.jaxrun-1.draft-unfinished", 0o700)
    os.mkdir(f"{copies.path}/.jaxrun-1.draft-unfinished/copy")
    names = []
    for text in "abcd":
        (source / "tool").write_text(text)
        copy, name = copied(copies, source)
        names.append(name)
        os.utime(copy.directory, (len(names), len(names)))
        if text != "a":  # which stays in use
            os.close(copy.lock)
    assert sorted(os.listdir(copies.path)) == sorted((names[0], names[2], names[3]))


def test_a_full_disk_has_the_unused_copies_removed(source, tmp_path, monkeypatch):
    copies = Copies(str(tmp_path))
    copy, _ = copied(copies, source)
    os.close(copy.lock)
    monkeypatch.setattr(copies_module, "_FREE_BYTES", 2**80)
    (source / "tool").write_text("another")
    _, name = copied(copies, source)
    assert os.listdir(copies.path) == [name]


def test_of_two_that_make_the_same_copy_both_have_it(source, tmp_path):
    one, other = Copies(str(tmp_path)), Copies(str(tmp_path))
    entries, _ = list_directory(str(source))
    with one.begin(entries) as draft:
        entries = copy_files(str(source), draft.path, entries, lambda entry: None)
        first, name = copied(other, source)
        assert one.finish(draft, name, entries).path == first.path
    assert os.listdir(one.path) == [name]


# ---- from host to host


@contextlib.contextmanager
def serving(supply):
    """A server of what is in `supply`; yields its address."""
    server = PeerServer(TOKEN, supply.serve, "127.0.0.1")
    server.start(0)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()
        supply.close()


@pytest.fixture
def root(source, tmp_path):
    """What the launcher has: its content, its copy and a supply of it."""
    (tmp_path / "root").mkdir()
    copy, name = copied(Copies(str(tmp_path / "root")), source)
    content = StagedContent((str(source),), name, sum(entry.size for entry in copy.entries))
    supply = Supply()
    supply.add(name, content.nbytes, lambda: copy)
    return content, copy, supply


def host(tmp_path, name):
    (tmp_path / name).mkdir()
    return Copies(str(tmp_path / name))


def test_a_content_goes_through_one_host_to_the_next_while_the_first_still_takes_it(root, source, tmp_path):
    content, _, supply = root
    middle, last = Supply(), Supply()
    copies = [host(tmp_path, "h1"), host(tmp_path, "h2")]
    takers = [Taker(middle, 0, TOKEN), Taker(last, 1, TOKEN)]
    with serving(supply) as from_root, serving(middle) as from_middle, serving(last):
        # The last one asks first, and waits for the one in the middle.
        waiting = threading.Thread(target=takers[1].take, args=(copies[1], content, [from_middle]))
        waiting.start()
        takers[0].take(copies[0], content, [from_root])
        waiting.join()
        for taken in copies:
            assert contents(tmp_path / taken.path / content.name / "copy") == contents(source)
            assert os.listdir(taken.path) == [content.name]
        assert [taker.received for taker in takers] == [content.nbytes] * 2


def test_a_host_that_has_it_takes_nothing(root, tmp_path):
    content, _, supply = root
    copies = host(tmp_path, "h1")
    with serving(supply) as giver:
        Taker(Supply(), 0, TOKEN).take(copies, content, [giver])
    again = Taker(Supply(), 0, TOKEN)
    again.take(copies, content, ["127.0.0.1:1"])
    assert again.received == 0


def test_where_one_host_gives_nothing_the_next_one_is_asked(root, tmp_path):
    content, _, supply = root
    closed = Supply()
    closed.close()
    with serving(closed) as gives_nothing, serving(supply) as giver:
        assert Taker(Supply(), 0, TOKEN).take(host(tmp_path, "h1"), content, [gives_nothing, giver])


def test_a_file_that_has_changed_on_the_giver_is_named_and_nothing_is_left(root, tmp_path):
    content, copy, supply = root
    with open(f"{copy.path}/lib/large", "r+b") as file:
        file.write(b"changed")
    copies = host(tmp_path, "h1")
    with serving(supply) as giver, pytest.raises(UnavailableError, match="sends lib/large with another content"):
        Taker(Supply(), 0, TOKEN).take(copies, content, [giver])
    assert os.listdir(copies.path) == []


def test_another_content_than_was_asked_for_is_refused(root, tmp_path):
    content, copy, _ = root
    supply = Supply()
    supply.add("0" * 32, content.nbytes, lambda: copy)
    wrong = StagedContent(("/x",), "0" * 32, content.nbytes)
    with serving(supply) as giver, pytest.raises(UnavailableError, match="sends another content"):
        Taker(Supply(), 0, TOKEN).take(host(tmp_path, "h1"), wrong, [giver])


def test_who_does_not_know_the_token_gets_nothing(root, tmp_path):
    content, _, supply = root
    with serving(supply) as giver, pytest.raises(UnavailableError, match="does not know"):
        Taker(Supply(), 0, "another token of the same size").take(host(tmp_path, "h1"), content, [giver])


def test_a_taker_that_is_stopped_ends_and_leaves_nothing(root, tmp_path):
    content, copy, _ = root
    supply = Supply()
    supply.add(content.name, 2**20, lambda: copy)  # of which no more will come
    copies, taker, failures = host(tmp_path, "h1"), Taker(Supply(), 0, TOKEN), []

    def take(giver):
        try:
            taker.take(copies, content, [giver])
        except UnavailableError as error:
            failures.append(error)

    with serving(supply) as giver:
        thread = threading.Thread(target=take, args=(giver,))
        thread.start()
        while not taker.received:
            assert thread.is_alive()
        taker.stop()
        thread.join()
    assert failures and os.listdir(copies.path) == []


def test_a_supply_that_is_closed_gives_nothing_more(root):
    _, _, supply = root
    supply.close()
    with pytest.raises(ProtocolError, match="nothing more is given"):
        supply._wait("unknown", 0)


# ---- what the head orders


STAGE = Stage("", (StagedContent(("/home/me/venv",), "ab" * 16, 1_288_490_188),))


def startup(hosts, *, ports=None, **changes):
    """The start-up of a job with an agent on each of `hosts`, on the first of which the launcher is."""
    registry = make_registry(len(hosts))
    registry.stage, registry.stage_port = STAGE, 7000
    start = Startup(dict.fromkeys(range(len(hosts)), "?"), Expected(len(hosts), "", "cpu", 1), "", registry)
    for rank, name in enumerate(hosts):
        port = 7000 + rank if name != hosts[0] else 0
        actions = start.handle(report(rank, name, len(hosts), stage_port=port, **changes))
    return start, actions


def test_hosts_take_along_a_tree_and_from_the_launcher_where_that_fails():
    _, actions = startup([f"h{number}" for number in (1, 1, 2, 3, 4, 5, 6, 7)])
    root = f"{HEAD_ADDRESS}:7000"
    assert {action.ranks: action.message for action in actions} == {
        (0,): CopyStaged((root,)),  # on the launcher's host: it gives nothing
        (2,): CopyStaged((root,)),
        (3,): CopyStaged((root,)),
        (4,): CopyStaged(("10.0.0.2:7002", root)),
        (5,): CopyStaged(("10.0.0.2:7002", root)),
        (6,): CopyStaged(("10.0.0.3:7003", root)),
        (7,): CopyStaged(("10.0.0.3:7003", root)),
    }


def test_workers_start_once_all_hosts_have_a_copy():
    start, _ = startup(["h1", "h2", "h3"])
    assert start.is_staging
    assert start.handle(StagedCopied(0, 0)) == [] == start.handle(StagedCopied(2, 1_288_490_188))
    assert start.describe_progress(4) == "staging 1.2 GiB to 3 hosts: 2 done after 4 s, waiting for h2"
    said, *starts = start.handle(StagedCopied(1, 1_288_490_188))
    assert said == PrintLine("staged 1.2 GiB on 2 hosts; 1 host had it already")
    assert [type(action.message) for action in starts] == [StartWorker] * 3 and not start.is_staging


def test_a_host_that_cannot_have_a_copy_is_named():
    start, _ = startup(["h1", "h2"])
    with pytest.raises(UnavailableError, match=r"h2 has no copy of what is staged: No space left on device \(/tmp/x\)"):
        start.handle(StagedCopied(1, 5, "No space left on device (/tmp/x)"))


def test_however_long_it_takes_the_job_is_not_given_up_for_it():
    registry = make_registry(2)
    registry.stage, registry.stage_port = STAGE, 7000
    limits = TimeLimits(init=10.0, job=None, grace=5.0, signal_grace=30.0)
    head = Head({0: "h1", 1: "h2"}, Expected(2, "", "cpu", 1), limits, "", 0.0, registry)
    for rank in (0, 1):
        head.handle(report(rank, f"h{rank + 1}", 2), 4.0)
    assert not any(isinstance(action, Finish) for action in head.handle(Tick(), 1000.0))
    head.handle(StagedCopied(0, 5), 2000.0)
    head.handle(StagedCopied(1, 5), 2000.0)
    assert head.phase is JobPhase.STARTING
    head.handle(Tick(), 2007.0)  # of the 10 s, 4 had passed before
    assert head.phase is not JobPhase.STARTING


def test_nobody_is_heard_who_was_not_asked():
    registry = make_registry(1)
    start = Startup({0: "?"}, Expected(1, "", "cpu", 1), "", registry)
    start.handle(report(0, "h1", 1))
    assert start.handle(StagedCopied(0, 5)) == []


# ---- what starts from a copy


def test_paths_below_a_source_lead_to_its_copy(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    staged = {"/home/me/venv": "/tmp/1/copy", str(tmp_path): "/tmp/2/copy"}
    assert staged_path("/home/me/venv/bin/python", staged) == "/tmp/1/copy/bin/python"
    assert staged_path("/home/me/venv2/bin/python", staged) == "/home/me/venv2/bin/python"
    assert staged_path("train.py", staged) == "/tmp/2/copy/train.py"
    assert staged_path("", staged) == "/tmp/2/copy"
    assert staged_path("train.py", {}) == "train.py"
    python = "/home/me/venv/bin/python"
    argv = staged_argv((python, "-m", "jaxrun_runtime", "train.py", "train.py"), staged)
    assert argv == ("/tmp/1/copy/bin/python", "-m", "jaxrun_runtime", "/tmp/2/copy/train.py", "train.py")
    assert staged_argv((python, "-m", "jaxrun_runtime", "-m", "train"), staged)[3:] == ("-m", "train")
    environ = {"PATH": "/home/me/venv/bin:/bin", "PYTHONPATH": f"/x:{tmp_path}/src", "HOME": "/home/me/venv"}
    assert staged_variables(environ, staged) == {"PATH": "/tmp/1/copy/bin:/bin", "PYTHONPATH": "/x:/tmp/2/copy/src"}


def test_a_fork_server_of_another_interpreter_is_not_used():
    class Server:
        closed = False

        def configure(self, program, environ):
            raise AssertionError("it has another interpreter")

        def close(self):
            self.closed = True

    server = Server()
    argv = ("/tmp/1/copy/bin/python", "-m", "jaxrun_runtime", "train.py")
    assert early.server_for(argv, {}, early.EarlyServer("ab" * 16, server)) is None and server.closed
