"""Copies of --stage from host to host, through an agent's part in it."""

import contextlib
import os
import threading

import pytest
from staged_directory import contents, copied, make_source

from jaxrun.controller.supervisor.staging import Staged
from jaxrun.node.agent import host_staging
from jaxrun.node.agent.host_staging import HostStaging
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.node.staging.copies import Copies
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.staging import CopyStaged, Stage, StagedContent, StagedCopied

TOKEN = "a token that is long enough"
NBYTES = 1_000


def port_of(listener):
    return listener.sockets[0].getsockname()[1]


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "source")


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
        listener.attach(loop, 0, Staged(Stage("", (content,)), copies).give)
        thread = threading.Thread(target=serve)
        thread.start()
        yield content, copies, port_of(listener)
        is_over.set()
        thread.join()


@contextlib.contextmanager
def host(tmp_path, number, port, *contents, token=TOKEN):
    """An agent of a host with a disk of its own, and where others can take copies from it."""
    (tmp_path / f"h{number}").mkdir(exist_ok=True)
    staging = HostStaging(Stage(str(tmp_path / f"h{number}"), contents), number, token, Address("127.0.0.1", port))
    with contextlib.closing(staging.listen()) as listener:
        yield staging, f"127.0.0.1:{port_of(listener)}"


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
        assert sorted(results, key=lambda one: one.rank) == [StagedCopied(1, received), StagedCopied(2, received)]
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
        ("change", "what came is not what was read: a copy was changed; jaxrun clean --staged removes it"),
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
