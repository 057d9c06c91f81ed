"""The files of snapshots in a host's memory, their copies on other hosts, and how long they stay."""

from __future__ import annotations

import os
import socket

import pytest

from jaxrun.errors import UnavailableError
from jaxrun.files import shared_memory as directories
from jaxrun_runtime.state_snapshots import host_memory
from jaxrun_runtime.state_snapshots.host_memory import HostMemory, file_name, read_region
from jaxrun_runtime.state_snapshots.peers import PeerMemory, RankServer
from jaxrun_runtime.state_snapshots.placement import KeptRegion, Region, StateSnapshot

TOKEN = "ab" * 32


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "_MEMORY", str(tmp_path))
    return tmp_path / f"jaxrun-{os.geteuid()}"


SNAPSHOT = StateSnapshot(1, 0, 7, "0123456789abcdef")


def keep(memory, snapshot, content=b"content", leaf=0, copies=()):
    kept = KeptRegion(Region(leaf, ((0, len(content)), (2, 3))), len(content), [0], [])
    memory.begin(snapshot, kept, memoryview(content))
    memory.complete(snapshot, kept, copies)
    return file_name(snapshot.slot, kept.region)


def test_two_snapshots_take_two_files_in_turn_over_all_attempts(own):
    memory = HostMemory("job", "h1")
    snapshots = [SNAPSHOT._replace(number=number, step=number) for number in range(3)]
    names = [keep(memory, snapshot) for snapshot in snapshots]
    assert names[0] == names[2] and names[0][:4] == "0_0_" and names[1] == f"1{names[0][1:]}"
    assert memory.names() == sorted(names[:2])
    assert [memory.find_whole(name) for name in names[1:]] == [
        (one, Region(0, ((0, 7), (2, 3)))) for one in snapshots[1:]
    ]
    assert keep(memory, SNAPSHOT._replace(attempt=2, number=4)) == names[0] and len(memory.names()) == 2


def test_what_is_old_in_a_slot_goes_and_the_other_slot_stays(own):
    memory, later = HostMemory("job", "h1"), SNAPSHOT._replace(number=1)
    names = [keep(memory, snapshot, leaf=leaf) for snapshot in (SNAPSHOT, later) for leaf in range(3)]
    (own / "job-snapshots-h1" / "odd").touch()
    memory.empty_slot(0, {names[1], "0_7_of this host, but not yet there"})
    assert memory.names() == [names[1], *names[3:]]
    assert memory.find_whole(names[1]) == (SNAPSHOT, Region(1, ((0, 7), (2, 3))))


def test_the_room_of_a_host_is_what_is_free_and_what_each_slot_takes(own):
    memory = HostMemory("job", "h1")
    keep(memory, SNAPSHOT, bytes(10_000))
    keep(memory, SNAPSHOT._replace(number=1), bytes(100))
    free, held = memory.room()
    assert free > 0 and [size // 4096 for size in held] == [3, 1]


def test_a_file_is_whole_or_not_there(own, monkeypatch):
    monkeypatch.setattr(host_memory, "_CHUNK_BYTES", 16)
    memory = HostMemory("job", "h1")
    name = keep(memory, SNAPSHOT, b"x" * 40)
    path = own / "job-snapshots-h1" / name
    whole, pad = path.read_bytes(), 12
    for place in {*range(len(whole))} - {*range(64 - pad, 64)}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert memory.find_whole(name) is None, place
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert memory.find_whole(name) is None, size
    path.write_bytes(whole)
    assert memory.find_whole(name) is not None and memory.find_whole("1_1_0_") is None
    path.with_name("0_1_0").write_bytes(whole)
    assert memory.find_whole("0_1_0") is None  # what the file says is not what its name says
    memory.write(name, len(whole), 98, b"xx")  # the same, but what is written makes it void
    assert memory.find_whole(name) is None


def test_a_copy_arrives_and_is_read_and_strangers_are_refused(own, monkeypatch):
    monkeypatch.setattr(host_memory, "_CHUNK_BYTES", 16)
    there = HostMemory("job", "h2")
    server = RankServer(there, TOKEN, "127.0.0.1")
    peer, content = PeerMemory(1, server.address, TOKEN, 0), bytes(range(40))
    name = keep(HostMemory("job", "h1"), SNAPSHOT, content, copies=[peer.write])
    found = there.find_whole(name)
    assert found == (SNAPSHOT, Region(0, ((0, 40), (2, 3))))
    assert read_region(peer.read, *found, len(content)) == content
    with socket.create_connection(server.address.split(":")) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        stranger.settimeout(60)
        with pytest.raises(ConnectionError):
            while stranger.recv(4096):
                pass
            raise ConnectionError  # it may also be closed in order
    with pytest.raises(OSError, match=r"rank 1: .*No such file"):  # out of the directory leads no way
        peer.read(f"../job-snapshots-h1/{name}", 0, 3)
    with pytest.raises(OSError, match=r"rank 1: .*ends early"):
        peer.read(name, 0, 1000)
    peer._connection.socket.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionError, match="the connection to rank 1, for snapshots, was lost"):
        peer.read(name, 0, 3)
    peer._connection.socket.close()


def test_another_token_or_changed_chunk_is_refused(own, monkeypatch):
    memory = HostMemory("job", "h2")
    server = RankServer(memory, TOKEN, "127.0.0.1")
    with monkeypatch.context() as patch, pytest.raises(UnavailableError, match="does not know the token"):
        for name in ("_FIRST_ROUND_S", "_ROUND_PAUSE_S"):  # one round, until it is answered
            patch.setattr(f"jaxrun.protocol.connect.{name}", 60.0)
        PeerMemory(1, server.address, "cd" * 32, 0)
    peer = PeerMemory(1, server.address, TOKEN, 0)
    writer = peer._connection._writer
    flush = writer.flush

    def flush_another():
        assert writer._pieces[-2] == b"abcd"
        writer._pieces[-2] = memoryview(b"abcD")  # before its tag
        flush()

    monkeypatch.setattr(writer, "flush", flush_another)
    with pytest.raises(ConnectionError):
        peer.write("1_0_0_", 68, 64, b"abcd")
    assert memory.names() == []
    peer._connection.socket.close()


def test_snapshots_of_a_job_stay_while_other_jobs_clean_up_and_go_with_it(own):
    name = directories.snapshot_directory("a", "h/1")
    os.close(directories.open_shared_directory(name))
    (own / name / "0_0_").touch()
    os.utime(own / name, (0, 0))
    os.close(directories.open_shared_directory("b-1-h"))
    directories.remove_abandoned("b")  # the first of another job: a snapshot has just been written
    os.utime(own / name / "0_0_", (0, 0))
    os.close(directories.open_shared_directory("a-2-h"))
    directories.remove_abandoned("a")  # of the same job
    assert not (own / "b-1-h").exists() and (own / "a-2-h").exists()
    directories.hold_directory(name)
    os.utime(own / name, (0, 0))
    directories.remove_abandoned("c", snapshots_after=0)  # this process holds it
    os.close(directories._held.pop(name))
    directories.remove_all_of_job("a", snapshots=False)
    assert (own / name).exists() and not (own / "a-2-h").exists()
    (own / name / "1_0_").touch()
    directories.remove_abandoned(snapshots_after=0)
    assert not own.exists()


def test_where_another_user_was_faster_a_job_has_a_directory_of_its_own_and_it_is_removed_as_well(own, tmp_path):
    own.mkdir(mode=0o755)  # as that of another user it cannot be this user's alone
    name = directories.snapshot_directory("ab12", "h1")
    memory = HostMemory("ab12", "h1")
    keep(memory, SNAPSHOT)
    at = tmp_path / f"{own.name}-ab12"
    assert (at / name).is_dir() and at.stat().st_mode & 0o777 == 0o700 and not [*own.iterdir()]
    os.utime(at / name, (0, 0))
    directories.remove_abandoned("cd34")  # `memory` holds it
    assert HostMemory("ab12", "h1").names() == memory.names()
    directories.remove_all_of_job("ab12")
    assert not at.exists()
    os.close(directories.open_shared_directory(directories.snapshot_directory("ef56", "h1")))
    os.utime(tmp_path / f"{own.name}-ef56" / "ef56-snapshots-h1", (0, 0))
    directories.remove_abandoned("cd34")
    assert [*tmp_path.iterdir()] == [own]


def test_what_a_killed_agent_has_left_stays_only_if_another_one_comes(own, monkeypatch):
    name = directories.snapshot_directory("a", "h1")
    directories.remove_unless_held(name, 60)  # it is not there
    holder = directories.open_shared_directory(name)
    directories.remove_unless_held(name, 60)
    assert (own / name).exists()
    os.close(holder)
    now, looks = [0.0], []

    def sleep_while_another_job_cleans_up(seconds):
        directories.remove_abandoned(snapshots_after=0)
        looks.append((own / name).exists())
        now[0] += seconds

    monkeypatch.setattr(directories.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(directories.time, "sleep", sleep_while_another_job_cleans_up)
    directories.remove_unless_held(name, 0.5)  # as a guard does
    assert looks and all(looks)
    assert not own.exists()
