"""Copies of --stage from host to host, through an agent's part in it."""

import contextlib
import os
import threading

import pytest
from staged_directory import contents, copied, make_source

from jaxrun.controller.supervisor.staging import Staged
from jaxrun.node.agent import host_staging
from jaxrun.node.agent.host_probe import PeerServer
from jaxrun.node.agent.host_staging import HostStaging
from jaxrun.node.staging.copies import Copies
from jaxrun.protocol.auth import peer_token
from jaxrun.protocol.stage_messages import CopyStaged, Stage, StagedContent, StagedCopied

TOKEN = "a token that is long enough"
NBYTES = 1_000


@contextlib.contextmanager
def serving(server):
    with contextlib.closing(server):
        yield f"127.0.0.1:{server.port}"


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "source")


@pytest.fixture
def launcher(source, tmp_path):
    """What is staged, the launcher's copies, and where it gives them."""
    (tmp_path / "root").mkdir()
    copies = Copies(str(tmp_path / "root"))
    content = StagedContent((str(source),), copied(copies, source), NBYTES)
    server = PeerServer(peer_token(TOKEN), Staged(Stage("", (content,)), copies).give)
    server.start(0)
    with serving(server) as address:
        yield content, copies, address


def host(tmp_path, number, *contents, token=TOKEN):
    """An agent of a host with a disk of its own."""
    (tmp_path / f"h{number}").mkdir(exist_ok=True)
    return HostStaging(Stage(str(tmp_path / f"h{number}"), contents), number, token)


def disk(tmp_path, number):
    return tmp_path / f"h{number}" / f"jaxrun-stage-{os.geteuid()}"


def test_a_content_goes_through_one_host_to_the_next_and_no_further_than_it_must(launcher, source, tmp_path):
    content, _, address = launcher
    middle, last = host(tmp_path, 1, content), host(tmp_path, 2, content)
    results = []
    for received in (NBYTES, 0):
        with serving(middle.serve()) as give, serving(last.serve()):
            order = CopyStaged(give, 0)
            thread = threading.Thread(target=lambda order=order: results.append(last.copy(order, lambda: False)))
            thread.start()
            results.append(middle.copy(CopyStaged(address, 1), lambda: False))
            thread.join()
        assert sorted(results, key=lambda one: one.rank) == [StagedCopied(1, received), StagedCopied(2, received)]
        for number in (1, 2):
            assert contents(disk(tmp_path, number) / content.name / "copy") == contents(source)
            assert os.listdir(disk(tmp_path, number)) == [content.name]
        results.clear()


def test_a_host_that_has_a_copy_gives_what_was_read_and_nothing_that_programs_have_added(launcher, source, tmp_path):
    content, copies, address = launcher
    (tmp_path / copies.path / content.name / "copy" / "lib" / "__pycache__").mkdir()
    taker = host(tmp_path, 1, content)
    assert taker.copy(CopyStaged(address, 0), lambda: False) == StagedCopied(1, NBYTES)
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
    content, copies, address = launcher
    file = tmp_path / copies.path / content.name / "copy" / "lib" / "large"
    if harm == "change":
        file.write_bytes(os.urandom(file.stat().st_size))
    else:
        file.unlink()
    taker = host(tmp_path, 1, content)
    assert taker.copy(CopyStaged(address, 0), lambda: False) == StagedCopied(
        1, 0, error.format(port=address.partition(":")[2])
    )
    assert os.listdir(disk(tmp_path, 1)) == []


def test_who_does_not_know_the_token_gets_nothing(launcher, tmp_path, monkeypatch):
    monkeypatch.setattr(host_staging, "_CONNECT_S", 2.0)
    content, _, address = launcher
    stranger = host(tmp_path, 1, content, token="another token of the same size")
    assert "found no host that gives copies" in stranger.copy(CopyStaged(address, 0), lambda: False).error


@pytest.mark.parametrize("takers", [0, 1], ids=["waits for its giver", "waits for its taker"])
def test_a_host_that_is_stopped_ends_and_leaves_nothing(launcher, tmp_path, takers):
    content, _, address = launcher
    giver, waiting = host(tmp_path, 1, content), host(tmp_path, 2, content)
    asked = []
    with serving(giver.serve()) as silent:
        order = CopyStaged(address if takers else silent, takers)
        assert waiting.copy(order, lambda: asked.append(1) or len(asked) > 5) is None
        if not takers:
            giver._peers.get(timeout=60).connection.close()
    assert not disk(tmp_path, 2).exists() or os.listdir(disk(tmp_path, 2)) == []


def test_a_disk_that_cannot_be_written_is_named(launcher, tmp_path):
    content, _, address = launcher
    taker = host(tmp_path, 1, content)
    (tmp_path / "h1").rmdir()
    result = taker.copy(CopyStaged(address, 0), lambda: False)
    assert result.error == f"[Errno 2] No such file or directory: '{disk(tmp_path, 1)}'"
