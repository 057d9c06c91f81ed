"""The file through which externally started ranks find rank 0, and what may be wrong with it."""

import json
import os
import stat
import threading

import pytest

from jaxrun.channel.event_loop import EventLoop
from jaxrun.channel.interfaces import Interface
from jaxrun.channel.listener import listen_on_tcp
from jaxrun.channel.reachability import check_reachable
from jaxrun.channel.rendezvous import rendezvous_file
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.job.cluster_env import RankInfo
from jaxrun.protocol.addresses import Address
from jaxrun.protocol.auth import read_given_token
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.supervisor.attach import prefer_given

TOKEN = "cd" * 32
CONTENT = json.dumps({"token": TOKEN, "head": "h1:40"})
STRANGER = 65534


def test_all_others_read_the_file_of_rank_0(tmp_path):
    at_0, at_3 = (rendezvous_file(RankInfo("slurm", rank, 4, "7.0"), tmp_path) for rank in (0, 3))
    assert at_3.read() is None
    at_0.write(TOKEN, "10.1.0.4:40,[fd00::4]:40")
    offer = at_3.read()
    assert offer.token == TOKEN
    assert offer.addresses == (Address("10.1.0.4", 40), Address("fd00::4", 40))
    at_0.remove()
    at_0.remove()
    assert at_3.read() is None and not list(tmp_path.iterdir())


@pytest.fixture
def file(tmp_path):
    return rendezvous_file(RankInfo("slurm", 0, 4, "7.0"), tmp_path)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_nobody_else_may_read_or_write_the_token(file, umask):
    before = os.umask(umask)
    try:
        file.write(TOKEN, "h1:40")
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600 and TOKEN not in file.path.name


@pytest.mark.parametrize(
    "other",
    [RankInfo("slurm", 0, 4, "7.1"), RankInfo("slurm", 0, 8, "7.0"), RankInfo("open-mpi", 0, 4, "7.0")],
    ids=["step", "size", "engine"],
)
def test_another_job_has_another_file(tmp_path, other):
    assert rendezvous_file(other, tmp_path).path != rendezvous_file(RankInfo("slurm", 0, 4, "7.0"), tmp_path).path


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"token": 1}',
        json.dumps({"token": "b", "head": "no address"}),
        "[" * 60_000,
        "\udcff",
    ],
    ids=["empty", "half", "list", "number", "no address", "deep", "no UTF-8"],
)
def test_what_rank_0_does_not_write_is_refused_in_words(file, text):
    file.path.write_text(text, errors="surrogateescape")
    file.path.chmod(0o600)
    with pytest.raises(UnavailableError, match="is not trusted: it does not say what rank 0 writes; remove it"):
        file.read()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_refused(file, mode):
    file.path.write_text(CONTENT)
    file.path.chmod(mode)
    with pytest.raises(UnavailableError, match=rf"others than you can write it \(mode {mode:04o}\)"):
        file.read()


def _make_link(path):
    (path.parent / "mine").write_text(CONTENT)
    (path.parent / "mine").chmod(0o600)
    path.symlink_to("mine")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (_make_link, "it is a symbolic link"),
        (lambda path: path.symlink_to(path), "it is a symbolic link"),
        (os.mkfifo, "it is no regular file"),
        (os.mkdir, "it is no regular file"),
        (lambda path: path.write_text(CONTENT + " " * 70_000), "it has 70[0-9]{3} bytes"),
    ],
    ids=["link", "loop", "FIFO", "directory", "large"],
)
def test_what_is_no_file_of_rank_0s_is_refused_at_once(file, make, why):
    make(file.path)
    with pytest.raises(UnavailableError, match=f"{file.path} is not trusted: {why}; remove it"):
        file.read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_refused_and_left_by_the_rename_of_rank_0(file):
    file.path.write_text(CONTENT)
    file.path.chmod(0o600)
    os.chown(file.path, STRANGER, STRANGER)
    with pytest.raises(UnavailableError, match=f"it belongs to user {STRANGER}, not to you"):
        file.read()
    file.write(TOKEN, "h1:40")
    assert file.read().token == TOKEN


def test_rank_0_writes_through_no_link(file, tmp_path):
    (tmp_path / "precious").write_text("mine")
    file.path.symlink_to("precious")
    file.write(TOKEN, "h1:40")
    assert (tmp_path / "precious").read_text() == "mine"
    assert file.read().token == TOKEN and len(list(tmp_path.iterdir())) == 2


def test_a_refusal_reaches_the_user_when_no_head_is_found(file):
    os.mkfifo(file.path)
    with pytest.raises(UnavailableError, match=r"found no head of the job within 0.1 s: .* it is no regular file"):
        connect(file.read, 1, 0.1, "not there")


def test_what_is_given_by_hand_wins_over_the_file():
    found = HeadAddress("file", (Address("h1", 40),))
    assert prefer_given(None, "given", ()) is None
    assert prefer_given(found, "", ()) == found
    assert prefer_given(found, "given", (Address("h2", 41),)) == HeadAddress("given", (Address("h2", 41),))


@pytest.mark.parametrize(
    ("token", "why"), [("short", "has 5 bytes, of at least 16"), ("é" * 7, "has 14 bytes"), ("\udcff" * 20, "UTF-8")]
)
def test_a_given_token_that_can_be_guessed_is_refused_and_not_shown(token, why):
    with pytest.raises(UsageError, match=why) as caught:
        read_given_token({"JAXRUN_TOKEN": token})
    assert token not in str(caught.value) and "openssl rand -hex 32" in str(caught.value)


def test_a_given_token_may_be_left_out():
    assert read_given_token({}) == read_given_token({"JAXRUN_TOKEN": ""}) == ""
    assert read_given_token({"JAXRUN_TOKEN": "sixteen letters!"}) == "sixteen letters!"


def test_a_directory_that_cannot_be_written_is_named_with_what_to_do(tmp_path):
    gone = rendezvous_file(RankInfo("slurm", 0, 4, "7.0"), tmp_path)
    tmp_path.rmdir()
    with pytest.raises(UnavailableError, match="--rendezvous"):
        gone.write(TOKEN, "h1:40")


def test_a_path_that_is_no_directory_is_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a directory on"):
        rendezvous_file(RankInfo("slurm", 0, 4, "7.0"), tmp_path / "none")


def test_a_check_distinguishes_a_head_from_nobody(capsys):
    listener, loop = listen_on_tcp([Interface("lo", "127.0.0.1")], TOKEN, everywhere=False), EventLoop()
    listener.attach(loop, 0, lambda peer: None)
    (address,) = listener.addresses
    server = threading.Thread(target=loop.run_once, args=(10,))
    server.start()
    try:
        assert check_reachable(str(address)) == 0
        server.join()
    finally:
        listener.close()
    assert f"a head of jaxrun answers at {address}, reached from 127.0.0.1" in capsys.readouterr().out
    with pytest.raises(UnavailableError, match="no head can be reached"):
        check_reachable(str(address))
