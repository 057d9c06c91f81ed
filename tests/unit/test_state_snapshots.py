"""Which rank keeps which part of the state, what is left of it when hosts are lost, and the files that hold it."""

from __future__ import annotations

import itertools
import os
import socket

import pytest

from jaxrun.errors import UnavailableError
from jaxrun.protocol import shared_memory as directories
from jaxrun_runtime.state_snapshots import host_memory, placement
from jaxrun_runtime.state_snapshots.host_memory import HostMemory, file_name, read_region
from jaxrun_runtime.state_snapshots.peers import PeerMemory, RankServer
from jaxrun_runtime.state_snapshots.placement import KeptRegion, Region, StateSnapshot

TOKEN = "ab" * 32


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "_MEMORY", str(tmp_path))
    return tmp_path / f"jaxrun-{os.geteuid()}"


# ---- who keeps what


SNAPSHOT = StateSnapshot(1, 0, 7, "0123456789abcdef")


def regions_of(cut, ranks):
    """Leaf 0 has a region for each rank, leaf 1 one of all, leaf 2 one for every `cut` ranks."""
    for rank in range(ranks):
        yield Region(0, ((4 * rank, 4 * rank + 4),)), 16, [rank]
    yield Region(1, ((0, 10),)), 40, range(ranks)
    for start in range(0, ranks, cut):
        yield Region(2, ((start, start + cut),)), 4 * cut, range(start, min(ranks, start + cut))


def kept_in(shares, hosts):
    """What each host has of a snapshot, found by the rank that keeps it."""
    for kept in shares:
        for rank in (*kept.keepers, *kept.copies):
            yield hosts[rank], (rank, SNAPSHOT, kept.region)


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aabb", "abcd", "aabbc", "abcabc"])
def test_a_host_keeps_what_its_ranks_hold_once_and_a_copy_of_what_only_the_one_before_holds(hosts):
    regions = list(regions_of(2, len(hosts)))
    kept = list(kept_in(placement.share_out(regions, hosts), hosts))
    ring = sorted(set(hosts))
    for host in ring:
        before = ring[ring.index(host) - 1]
        theirs = [r for r, _, holders in regions if {hosts[rank] for rank in holders} == {before} and before != host]
        mine = [r for r, _, holders in regions if host in {hosts[rank] for rank in holders}]
        assert sorted(region for where, (_, _, region) in kept if where == host) == sorted((*mine, *theirs))


@pytest.mark.parametrize("hosts", ["ab", "abcd", "aabbcc", "abcde"])
def test_the_state_outlives_hosts_that_are_not_neighbours_and_nothing_is_said_to_be_there_that_is_not(hosts):
    ring = sorted(set(hosts))
    kept = list(kept_in(placement.share_out(regions_of(2, len(hosts)), hosts), hosts))
    for lost in itertools.chain.from_iterable(itertools.combinations(ring, count) for count in range(len(ring))):
        left = placement.gather([found for host, found in kept if host not in lost], hosts, hosts[0]).get(SNAPSHOT, {})
        has_all = all(
            placement.cover(left, leaf, bounds) is not None
            for leaf, bounds in ((0, ((0, 4 * len(hosts)),)), (1, ((3, 9),)), (2, ((0, len(hosts) // 2 * 2),)))
        )
        neighbours = any({one, ring[(n + 1) % len(ring)]} <= set(lost) for n, one in enumerate(ring))
        assert has_all == (not neighbours), lost


def test_a_region_is_made_of_others_only_if_they_cover_it_here_where_they_are():
    found = [one for _, one in kept_in(placement.share_out(regions_of(2, 2), "ab"), "ab")]
    places = placement.gather(found, "ab", "b")[SNAPSHOT]
    assert placement.cover(places, 0, ((2, 6),)) == {((0, 4),): 1, ((4, 8),): 1}  # a copy of the first is on b, too
    assert placement.cover(places, 0, ((2, 9),)) is None
    assert placement.cover(places, 9, ((5, 5),)) == {}  # nothing of nothing
    assert placement.cover({0: {(): 0}}, 0, ()) == {(): 0} and placement.cover({}, 0, ()) is None


def test_the_ranks_of_a_host_take_turns():
    shares = placement.share_out([(Region(leaf, ()), 4, [0, 1]) for leaf in range(4)], "aabb")
    assert [(*kept.keepers, *kept.copies) for kept in shares] == [(0, 2), (1, 3), (0, 2), (1, 3)]


def test_the_memory_of_a_host_is_at_most_the_state_in_pages():
    for hosts in ("ab", "aabb", "abcd"):
        regions = list(regions_of(2, len(hosts)))
        by_host = placement.memory_by_host(placement.share_out(regions, hosts), hosts)
        assert by_host.keys() == set(hosts) and max(by_host.values()) <= 4096 * len(regions)


# ---- files


def keep(memory, snapshot, content=b"content", leaf=0, copies=()):
    kept = KeptRegion(Region(leaf, ((0, len(content)), (2, 3))), len(content), [0], [])
    memory.begin(snapshot, kept, memoryview(content))
    memory.complete(snapshot, kept, copies)
    return file_name(snapshot, kept.region)


def test_two_snapshots_take_two_files_in_turn_and_earlier_attempts_go(own):
    memory = HostMemory("job", "h1")
    snapshots = [SNAPSHOT._replace(number=number, step=number) for number in range(3)]
    names = [keep(memory, snapshot) for snapshot in snapshots]
    assert names[0] == names[2] == "1_0_0_0:7,2:3" and memory.names() == sorted(names[:2])
    assert [memory.find_whole(name) for name in names[1:]] == [
        (one, Region(0, ((0, 7), (2, 3)))) for one in snapshots[1:]
    ]
    keep(memory, SNAPSHOT._replace(attempt=2))
    memory.remove_before(2, but=snapshots[1])
    assert memory.names() == [names[1], "2_0_0_0:7,2:3"]
    memory.remove_before(2)
    assert memory.names() == ["2_0_0_0:7,2:3"]


def test_a_file_is_whole_or_not_there(own, monkeypatch):
    monkeypatch.setattr(host_memory, "_CHUNK_BYTES", 16)
    memory = HostMemory("job", "h1")
    name = keep(memory, SNAPSHOT, b"x" * 40)
    path = own / "job-snapshots-h1" / name
    whole, pad = path.read_bytes(), 64 - 36
    for place in {*range(len(whole))} - {*range(64 - pad, 64)}:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert memory.find_whole(name) is None, place
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert memory.find_whole(name) is None, size
    path.write_bytes(whole)
    assert memory.find_whole(name) is not None and memory.find_whole("1_1_0_") is None
    memory.write(name, len(whole), 70, b"xx")  # the same, but what is written makes it void
    assert memory.find_whole(name) is None


# ---- peers


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
    monkeypatch.setattr("jaxrun_runtime.state_snapshots.peers._CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(UnavailableError, match="does not know the token"):
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


# ---- how long the directories stay


def test_snapshots_of_a_job_stay_while_other_jobs_clean_up_and_go_with_it(own):
    name = directories.snapshot_directory("a", "h/1")
    os.close(directories.open_shared_directory(name))
    os.close(directories.open_shared_directory("b-1-h"))  # the first of another job: it is younger than ten minutes
    os.utime(own / name, (0, 0))
    os.close(directories.open_shared_directory("a-2-h"))  # of the same job
    directories.hold_directory(name)
    os.utime(own / name, (0, 0))
    os.close(directories.open_shared_directory("c-1-h"))  # this process holds it
    os.close(directories._held.pop(name))
    directories.remove_all_of_job("a", snapshots=False)
    assert (own / name).exists() and not (own / "a-2-h").exists()
    os.close(directories.open_shared_directory("d-1-h"))
    assert not (own / name).exists()  # it was abandoned


def test_what_a_killed_agent_has_left_stays_only_if_another_one_comes(own):
    name = directories.snapshot_directory("a", "h1")
    directories.remove_unless_held(name, 60)  # it is not there
    holder = directories.open_shared_directory(name)
    directories.remove_unless_held(name, 60)
    assert (own / name).exists()
    os.close(holder)
    directories.remove_unless_held(name, 0)
    assert not own.exists()
