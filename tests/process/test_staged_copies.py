"""What --stage copies, the copies on a host's disk, and their way from host to host."""

import contextlib
import os
import re
import socket
import subprocess
import sysconfig
import threading
import venv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from jaxrun.controller.supervisor.launcher_staging import Staged
from jaxrun.errors import UnavailableError
from jaxrun.files.own_files import is_draft
from jaxrun.node.agent import host_staging
from jaxrun.node.agent.host_staging import HostStaging
from jaxrun.node.agent.spawn import WorkerSetup
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import Listener, listen_on_tcp
from jaxrun.node.staging import copies as copies_module
from jaxrun.node.staging.copies import Copies
from jaxrun.node.staging.directory_copy import copied_link, copy_directory, list_directory
from jaxrun.node.staging.interpreter import base_python, usable_environment
from jaxrun.node.staging.transfer import pass_on
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.blocking_connection import BlockingConnection
from jaxrun.protocol.staging_messages import CopyStaged, Stage, StagedContent, StagedCopied
from jaxrun.protocol.worker_command import worker_argv

TOKEN = "a token that is long enough"
NBYTES = 1_000


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
    """The name of a copy of the directory, made as the launcher makes it."""
    listed, listing = list_directory(str(folder))
    return copies.add(1, lambda draft: copy_directory(str(folder), draft, listed), listing)


def contents(folder):
    """What is below a folder, with modes, times (seconds) and links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        status, is_file = path.lstat(), path.is_file() and not path.is_symlink()
        found[str(path.relative_to(folder))] = kind, *((status.st_mode, int(status.st_mtime)) if is_file else ())
    return found


def copies_of(copies):
    return Path(copies.path)


@pytest.fixture
def copies(tmp_path):
    return Copies(str(tmp_path))


def next_job(tmp_path):
    """The same copies in another process, which uses none of them yet."""
    return Copies(str(tmp_path))


def test_a_copy_is_as_the_directory_was_and_is_found_as_long_as_that_is_the_same(source, copies, tmp_path):
    name = copied(copies, source)
    assert contents(tmp_path / copies.path / name / "copy") == contents(source)
    assert next_job(tmp_path).find_listing(list_directory(str(source))[1]) == name
    assert os.stat(copies.path).st_mode & 0o777 == 0o700
    (source / "new").write_bytes((source / "tool").read_bytes())
    (source / "new").replace(source / "tool")  # as pip does
    assert copies.find_listing(list_directory(str(source))[1]) is None


def test_a_name_is_a_hash_of_paths_modes_links_and_contents(source, copies):
    names = [copied(copies, source)]
    for change in (
        lambda: (source / "lib" / "module.py").write_text("x = 2\n"),
        lambda: (source / "tool").chmod(0o644),
        lambda: ((source / "link").unlink(), (source / "link").symlink_to("tool")),
        lambda: (source / "lib" / "nothing").rename(source / "lib" / "renamed"),
    ):
        change()
        names.append(copied(copies, source))
    assert len(set(names)) == 5 and copied(copies, source) == names[-1]


def test_an_edit_in_place_that_keeps_size_and_time_is_another_listing(source, copies):
    name = copied(copies, source)
    status = (source / "tool").stat()
    (source / "tool").write_text("#!/bin/ks\n")  # as an archive with fixed times that is unpacked over another
    os.utime(source / "tool", ns=(status.st_atime_ns, status.st_mtime_ns))
    now = (source / "tool").stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (status.st_ino, status.st_size, status.st_mtime_ns)
    assert copies.find_listing(list_directory(str(source))[1]) is None
    assert (copies_of(copies) / copied(copies, source) / "copy" / "tool").read_text() == "#!/bin/ks\n"
    assert copied(copies, source) != name


def test_a_file_that_is_written_while_it_is_read_is_noticed_even_if_its_time_is_set_back(source, copies, monkeypatch):
    listed, _ = list_directory(str(source))
    sendfile, large = os.sendfile, source / "lib" / "large"

    def write(*arguments):
        status = large.stat()
        with open(large, "r+b") as file:
            file.write(b"other bytes")
        os.utime(large, ns=(status.st_atime_ns, status.st_mtime_ns))
        return sendfile(*arguments)

    monkeypatch.setattr(os, "sendfile", write)
    with pytest.raises(UnavailableError, match="lib/large has changed while it was read"):
        copies.add(1, lambda draft: copy_directory(str(source), draft, listed))


def as_fifo(path):
    os.mkfifo(path)


def as_link(path):
    path.symlink_to("lib")


def as_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


@pytest.mark.parametrize("become", [as_fifo, as_link, as_socket])
def test_a_file_that_becomes_something_else_blocks_nothing_and_is_named(source, copies, become):
    listed, _ = list_directory(str(source))
    (source / "tool").unlink()
    become(source / "tool")
    with pytest.raises(UnavailableError, match=f"{source}/tool has changed while it was read"):
        copies.add(1, lambda draft: copy_directory(str(source), draft, listed))
    assert os.listdir(copies.path) == []


def test_copies_inside_a_staged_directory_are_left_out(source):
    names = set()
    for _ in range(3):
        (source / "local").mkdir(exist_ok=True)
        copies = Copies(str(source / "local"))
        _, listing = list_directory(str(source))
        names.add(copies.find_listing(listing) or copied(copies, source))
    assert len(names) == 1 and os.listdir(copies.path) == [*names]
    assert os.listdir(f"{copies.path}/{names.pop()}/copy/local") == []


@pytest.mark.parametrize(
    ("path", "target", "expected"),
    [
        ("link", "lib/module.py", "lib/module.py"),
        ("lib/link", "../tool", "../tool"),
        ("lib/link", "./.././tool", "./.././tool"),
        ("link", ".", "."),
        ("link", "../data/x", "{root}/../data/x"),
        ("lib/link", "../../data", "{root}/lib/../../data"),
        ("link", "/etc/hosts", "/etc/hosts"),
        ("link", "/nowhere/at/all", "/nowhere/at/all"),
        ("lib/link", "{root}/tool", "../tool"),
        ("lib/link", "{typed}/tool", "../tool"),
        ("link", "../source/lib/module.py", "lib/module.py"),
        ("lib/link", "../../source", ".."),
        ("link", "{root}", "."),
        ("link", "{root}x/tool", "{root}x/tool"),
    ],
)
def test_a_link_leads_where_it_led_or_to_the_copy_of_that(source, tmp_path, path, target, expected):
    (tmp_path / "typed").symlink_to(source)
    names = {"root": os.path.realpath(source), "typed": tmp_path / "typed"}
    assert copied_link(str(tmp_path / "typed"), path, target.format(**names)) == expected.format(**names)


def test_links_of_a_copy_can_be_followed(source, copies, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("outside")
    (source / "out").symlink_to("../data/x")
    (source / "lib" / "folder").symlink_to("../../data")
    (source / "lib" / "back").symlink_to(source / "tool")
    copy = copies_of(copies) / copied(copies, source) / "copy"
    assert (copy / "out").read_text() == (copy / "lib" / "folder" / "x").read_text() == "outside"
    assert (copy / "lib" / "back").resolve() == copy / "tool"


def test_a_copy_gives_nobody_the_rights_of_its_owner(source, copies):
    (source / "tool").chmod(0o6775)
    copy = copies_of(copies) / copied(copies, source) / "copy"
    assert (copy / "tool").stat().st_mode & 0o7777 == 0o755


def test_special_files_and_directories_that_grow_with_each_job_are_left_out(source):
    listed, seen = list_directory(str(source))
    (source / ".git").mkdir()
    (source / "jaxrun-runs" / "1").mkdir(parents=True)
    os.mkfifo(source / "fifo")
    assert list_directory(str(source))[1] == seen
    assert [path for path, _ in listed] == [
        "lib", "lib/empty", "lib/large", "lib/module.py", "lib/nothing", "link", "tool",
    ]  # fmt: skip


def test_a_file_that_changes_while_it_is_read_is_named_and_nothing_is_left(source, copies):
    listed, _ = list_directory(str(source))
    with open(source / "lib" / "large", "ab") as file:
        file.write(b"more")
    with pytest.raises(UnavailableError, match=f"{source}/lib/large has changed while it was read"):
        copies.add(1, lambda draft: copy_directory(str(source), draft, listed))
    assert os.listdir(copies.path) == []


def test_a_copy_that_is_in_use_is_not_removed(source, copies, tmp_path):
    name = copied(copies, source)
    assert next_job(tmp_path).remove_unused() == (1, 0) and copies.find(name)
    os.close(copies._locks[name])
    assert next_job(tmp_path).remove_unused() == (1, 1) and next_job(tmp_path).find(name) is None


def test_what_was_left_unfinished_and_the_oldest_copies_make_room(source, copies, tmp_path, monkeypatch):
    monkeypatch.setattr(copies_module, "_KEPT", 2)
    os.makedirs(f"{copies.path}/.jaxrun-1.draft/copy")
    os.chmod(f"{copies.path}/.jaxrun-1.draft", 0o700)
    names = []
    for text in "abcd":
        (source / "tool").write_text(text)
        names.append(copied(copies, source))
        os.utime(f"{copies.path}/{names[-1]}", (len(names), len(names)))
        if text != "a":  # which stays in use
            os.close(copies._locks.pop(names[-1]))
    assert sorted(os.listdir(copies.path)) == sorted((names[0], names[2], names[3]))
    monkeypatch.setattr(copies_module, "_FREE_BYTES", 2**80)  # a full disk
    (source / "tool").write_text("e")
    assert sorted(os.listdir(copies.path)) != sorted((names[0], copied(copies, source)))
    assert len(os.listdir(copies.path)) == 2


def test_of_two_that_make_the_same_copy_both_have_it(source, copies, tmp_path):
    other = next_job(tmp_path)

    def write(draft):
        (tmp_path / draft / "copy").mkdir()
        return copied(other, source)

    name = copies.add(1, write)
    assert os.listdir(copies.path) == [name] and copies.find(name) == other.find(name)
    assert contents(tmp_path / copies.path / name / "copy") == contents(source)


def test_no_other_job_takes_a_new_draft_for_one_that_was_left(source, copies, tmp_path, monkeypatch):
    lock, removed = Copies._lock, []

    def lock_late(self, name, how):
        if self is copies and is_draft(name):
            removed.append(next_job(tmp_path).remove_unused())  # between making a draft and locking it
        return lock(self, name, how)

    monkeypatch.setattr(copies_module, "_ALONE_TIMEOUT_S", 0.0)
    monkeypatch.setattr(Copies, "_lock", lock_late)
    assert copies.find(copied(copies, source)) and removed[0] == (1, 0)


def test_a_copy_that_is_being_removed_is_not_there(source, copies, tmp_path, monkeypatch):
    name = copied(copies, source)
    os.close(copies._locks.pop(name))
    found = []
    monkeypatch.setattr(copies_module, "remove_directory", lambda *_: found.append(next_job(tmp_path).find(name)))
    copies.remove_unused()
    assert found == [None]


def test_names_that_go_while_they_are_listed_are_no_names(copies, monkeypatch):
    for name in ("a", "b"):
        os.mkdir(f"{copies.path}/{name}", 0o700)
    first = []

    def remove_the_other(name):
        first.append(name)
        Path(copies.path, {"a": "b", "b": "a"}[name]).rmdir()
        return False

    monkeypatch.setattr(copies_module, "is_draft", remove_the_other)
    assert copies._names() == first[:1]


def test_a_job_that_is_stopped_in_the_wrong_moment_is_named_by_its_lock(source, copies, tmp_path, monkeypatch):
    monkeypatch.setattr(copies_module, "_ALONE_TIMEOUT_S", 0.1)
    with copies._alone(), pytest.raises(OSError, match=r"another jaxrun holds it for more than 0.1 s; is one"):
        copied(next_job(tmp_path), source)


def test_copies_that_cannot_be_used_are_an_error_and_not_missing(source, copies, tmp_path):
    name = copied(copies, source)
    os.chmod(f"{copies.path}/{name}", 0o755)
    with pytest.raises(OSError, match=rf"it is not this user's alone.*{name}"):
        next_job(tmp_path).find(name)


# ---- from host to host, through an agent's part in it


def port_of(listener):
    return listener.sockets[0].getsockname()[1]


@pytest.fixture
def launcher(source, tmp_path):
    """What is staged, the launcher's copies, and the port where it gives them."""
    (tmp_path / "root").mkdir()
    copies, loop, is_over = Copies(str(tmp_path / "root")), EventLoop(), threading.Event()
    content = StagedContent((str(source),), copied(copies, source), NBYTES)

    def serve():
        while not is_over.is_set():
            loop.run_once(0.02)

    with contextlib.closing(listen_on_tcp((), TOKEN, everywhere=True)) as listener, contextlib.closing(loop):
        acceptor = listener.accept(loop, 0, Staged(Stage("", (content,)), copies).give)
        thread = threading.Thread(target=serve)
        thread.start()
        yield content, copies, port_of(listener)
        is_over.set()
        thread.join()
        acceptor.close()


@dataclass(frozen=True)
class OnHost:
    """An agent's part in --stage, and where others take copies from it."""

    staging: HostStaging
    listener: Listener

    def copy(self, order, is_stopped):
        return self.staging.copy(order, is_stopped, self.listener)


@contextlib.contextmanager
def host(tmp_path, number, port, *contents, token=TOKEN):
    """An agent of a host with a disk of its own, and where others can take copies from it."""
    (tmp_path / f"h{number}").mkdir(exist_ok=True)
    staging = HostStaging(Stage(str(tmp_path / f"h{number}"), contents), number, token, Address("127.0.0.1", port), {})
    with contextlib.closing(staging.listen()) as listener:
        yield OnHost(staging, listener), f"127.0.0.1:{port_of(listener)}"


def disk(tmp_path, number):
    return tmp_path / f"h{number}" / f"jaxrun-stage-{os.geteuid()}"


def test_a_content_goes_through_one_host_to_the_next_and_no_further_than_it_must(launcher, source, tmp_path):
    content, _, port = launcher
    results = []
    for received in (NBYTES, 0):
        with host(tmp_path, 1, port, content) as (middle, address), host(tmp_path, 2, port, content) as (last, _):
            copy, order = last.copy, CopyStaged(address, 0)
            thread = threading.Thread(target=lambda copy=copy, order=order: results.append(copy(order, lambda: False)))
            thread.start()
            results.append(middle.copy(CopyStaged("", 1), lambda: False))
            thread.join()
        assert sorted(results, key=lambda one: one.agent) == [StagedCopied(1, received), StagedCopied(2, received)]
        for number in (1, 2):
            assert contents(disk(tmp_path, number) / content.name / "copy") == contents(source)
            assert os.listdir(disk(tmp_path, number)) == [content.name]
        results.clear()


def test_a_host_that_has_a_copy_gives_what_was_read_and_nothing_that_programs_have_added(launcher, source, tmp_path):
    content, copies, port = launcher
    (tmp_path / copies.path / content.name / "copy" / "lib" / "__pycache__").mkdir()
    with host(tmp_path, 1, port, content) as (taker, _):
        assert taker.copy(CopyStaged("", 0), lambda: False) == StagedCopied(1, NBYTES)
    assert contents(disk(tmp_path, 1) / content.name / "copy") == contents(source)


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        ("change", "the received copy is not what was read: it was changed; jaxrun clean --staged removes it"),
        ("remove", "the connection to 127.0.0.1:{port} was lost"),
    ],
)
def test_a_copy_that_was_changed_is_given_to_nobody(launcher, tmp_path, monkeypatch, harm, error):
    monkeypatch.setattr(host_staging, "_BLAME_S", 0.0)
    content, copies, port = launcher
    file = tmp_path / copies.path / content.name / "copy" / "lib" / "large"
    if harm == "change":
        file.write_bytes(os.urandom(file.stat().st_size))
    else:
        file.unlink()
    with host(tmp_path, 1, port, content) as (taker, _):
        assert taker.copy(CopyStaged("", 0), lambda: False) == StagedCopied(1, 0, error.format(port=port))
    assert os.listdir(disk(tmp_path, 1)) == []


@pytest.mark.parametrize("place", range(3))
def test_a_copy_that_another_job_brings_after_the_giver_was_asked_for_it_is_received_too(copies, tmp_path, place):
    folders = [tmp_path / f"source {number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()
        (folder / "file").write_bytes(os.urandom(2**20))
    staged = [StagedContent((str(folder),), copied(copies, folder), NBYTES) for folder in folders]
    (tmp_path / "host").mkdir()
    own, others = Copies(str(tmp_path / "host")), Copies(str(tmp_path / "host"))

    class Giver(BlockingConnection):
        def send_bytes(self, data, note=b""):
            super().send_bytes(data, note)
            assert copied(others, folders[place]) == staged[place].name

    ends = socket.socketpair()
    with ThreadPoolExecutor(1) as pool, ends[0], ends[1]:
        given = pool.submit(pass_on, staged, copies, None, [BlockingConnection(ends[0], None, "the taker")])
        assert pass_on(staged, own, Giver(ends[1], None, "the giver"), []) == 3 * NBYTES
        assert given.result(60) == 0
    for folder, content in zip(folders, staged, strict=True):
        assert contents(copies_of(own) / content.name / "copy") == contents(folder)
    assert sorted(os.listdir(own.path)) == sorted(content.name for content in staged)


def test_who_does_not_know_the_token_gets_nothing(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(host_staging, "_CONNECT_S", 2.0)
    content, _, port = launcher
    with (
        host(tmp_path, 1, port, content) as (_, address),
        host(tmp_path, 2, port, content, token="another token of the same size") as (stranger, _),
    ):
        for giver in ("", address):
            error = stranger.copy(CopyStaged(giver, 0), lambda: False).error
            assert "found no host that gives copies" in error


@pytest.mark.parametrize(
    ("is_silent", "takers"),
    [(True, 0), (False, 1), (False, 0)],
    ids=["waits for its giver", "waits for its taker", "receives"],
)
def test_a_host_that_is_stopped_ends_and_leaves_nothing(launcher, tmp_path, is_silent, takers):
    content, _, port = launcher
    asked = []
    with host(tmp_path, 1, port, content) as (_, silent), host(tmp_path, 2, port, content) as (waiting, _):
        order = CopyStaged(silent if is_silent else "", takers)
        assert waiting.copy(order, lambda: asked.append(1) or len(asked) > 5) is None
    assert not disk(tmp_path, 2).exists() or os.listdir(disk(tmp_path, 2)) == []


def test_a_disk_that_cannot_be_written_is_named(launcher, tmp_path):
    content, _, port = launcher
    with host(tmp_path, 1, port, content) as (taker, _):
        (tmp_path / "h1").rmdir()
        result = taker.copy(CopyStaged("", 0), lambda: False)
    assert result.error == f"[Errno 2] No such file or directory: '{disk(tmp_path, 1)}'"


def test_a_host_whose_copy_has_gone_starts_no_worker_from_the_slow_file_system(launcher, tmp_path):
    content, _, port = launcher
    setup = WorkerSetup(worker_argv("python", ("train.py",)), {}, ())
    with host(tmp_path, 1, port, content) as (taker, _):
        taker.copy(CopyStaged("", 0), lambda: False)
        assert taker.staging.start_from_copies(setup).environ["JAXRUN_STAGED"] != "{}"
    with host(tmp_path, 3, port, content) as (other, _):
        with pytest.raises(UnavailableError, match=f"has no copy of {content.sources[0]} in .* any more; start again"):
            other.staging.start_from_copies(setup)


def test_a_copied_environment_runs_where_its_python_is_elsewhere(tmp_path):
    copy = tmp_path / "name" / "copy"
    venv.EnvBuilder(symlinks=True).create(copy)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(copy)}))
    (packages / "module.py").write_text("x = 1\n")
    base, beside = base_python(), str(tmp_path / "name")
    assert usable_environment(str(copy), "bin/python", base, beside) == str(copy)
    for interpreter in ("python", "python3"):
        (copy / "bin" / interpreter).unlink(missing_ok=True)
        (copy / "bin" / interpreter).symlink_to("/nowhere/bin/python3")
    (copy / "bin" / "tool").write_text("#!/bin/sh\n")
    config = (copy / "pyvenv.cfg").read_text()
    (copy / "pyvenv.cfg").write_text(re.sub("home = .*", "home = /nowhere/bin", config))
    made = usable_environment(str(copy), "bin/python", base, beside)
    assert made != str(copy) and usable_environment(str(copy), "bin/python", base, beside) == made
    code = "import module, sys; print(sys.prefix, sys.executable, module.x)"
    shown = subprocess.run([f"{made}/bin/python", "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == [made, f"{made}/bin/python", "1"]
    assert os.path.samefile(f"{made}/bin/tool", copy / "bin" / "tool") and len(os.listdir(beside)) == 2
