"""Which rank keeps which part of the state, what is left of it when hosts are lost, and the files that hold it."""

from __future__ import annotations

import itertools
import os
import socket

import pytest

from jaxrun.errors import ProtocolError, UnavailableError
from jaxrun.protocol import compiled_programs as directories
from jaxrun_runtime.state_snapshots import host_memory, layout
from jaxrun_runtime.state_snapshots.host_memory import COPY, OWN, HostMemory, checksums, chunks
from jaxrun_runtime.state_snapshots.layout import EVERYBODY, Manifest, Region, SnapshotFile
from jaxrun_runtime.state_snapshots.peers import RankServer, connect_to_rank

TOKEN = "ab" * 32


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.setattr(directories, "_MEMORY", str(tmp_path))
    return tmp_path / f"jaxrun-{os.geteuid()}"


# ---- who keeps what


def regions_of(cut, ranks):
    """Leaf 0 has a region for each rank, leaf 1 one of all, leaf 2 one for every `cut` ranks, leaf 3 one of its own."""
    for rank in range(ranks):
        yield Region(0, EVERYBODY, ((4 * rank, 4 * rank + 4),), 16, rank, (rank,))
        yield Region(3, rank, ((0, 2),), 8, 3, (rank,))
    yield Region(1, EVERYBODY, ((0, 10),), 40, 1, tuple(range(ranks)))
    for start in range(0, ranks, cut):
        yield Region(2, EVERYBODY, ((start, start + cut),), 4 * cut, 2, tuple(range(start, min(ranks, start + cut))))


def files_of(shares, hosts):
    """All files of a snapshot: each rank's own, and the copies."""
    for rank, share in enumerate(shares):
        manifest = Manifest(1, 7, "s", share.nbytes, share.pieces, ())
        yield SnapshotFile(hosts[rank], f"{rank}-own", manifest)
        if (keeper := layout.keeper_of_copy(rank, hosts)) is not None:
            yield SnapshotFile(hosts[keeper], f"{rank}-copy", manifest.of_copy(share.sole_bytes))


@pytest.mark.parametrize("hosts", ["a", "aa", "ab", "aabb", "abcd", "aabbc", "abcabc"])
def test_a_host_keeps_what_its_ranks_hold_once_and_a_copy_of_what_only_the_one_before_holds(hosts):
    regions = list(regions_of(2, len(hosts)))
    files = list(files_of(layout.share_out(regions, hosts), hosts))
    ring = sorted(set(hosts))
    for host in ring:
        kept = [(p.leaf, p.owner, p.bounds) for file in files if file.host == host for p in file.manifest.pieces]
        before = ring[ring.index(host) - 1]
        theirs = [r for r in regions if {hosts[rank] for rank in r.holders} == {before} and before != host]
        mine = [r for r in regions if host in {hosts[rank] for rank in r.holders}]
        assert sorted(kept) == sorted((r.leaf, r.owner, r.bounds) for r in (*mine, *theirs))


@pytest.mark.parametrize("hosts", ["ab", "abcd", "aabbcc", "abcde"])
def test_the_state_outlives_hosts_that_are_not_neighbours_and_nothing_is_said_to_be_there_that_is_not(hosts):
    ring = sorted(set(hosts))
    files = list(files_of(layout.share_out(regions_of(2, len(hosts)), hosts), hosts))
    for lost in itertools.chain.from_iterable(itertools.combinations(ring, count) for count in range(len(ring))):
        left = layout.gather([file for file in files if file.host not in lost], hosts[0])
        has_all = all(
            layout.cover(left, leaf, EVERYBODY, bounds) is not None
            for leaf, bounds in ((0, ((0, 4 * len(hosts)),)), (1, ((3, 9),)), (2, ((0, len(hosts) // 2 * 2),)))
        ) and all(layout.cover(left, 3, rank, ((0, 2),)) for rank in range(len(hosts)))
        neighbours = any({one, ring[(n + 1) % len(ring)]} <= set(lost) for n, one in enumerate(ring))
        assert has_all == (not neighbours), lost


def test_a_region_is_made_of_pieces_only_if_they_cover_it():
    files = list(files_of(layout.share_out(regions_of(2, 2), "ab"), "ab"))
    pieces = layout.gather(files, "b")
    assert [placed.file.host for placed in layout.cover(pieces, 0, EVERYBODY, ((2, 6),))] == ["b", "b"]
    assert layout.cover(pieces, 0, EVERYBODY, ((2, 9),)) is None
    assert layout.cover(pieces, 3, 2, ((0, 2),)) is None  # of a rank that was not there
    assert layout.cover(pieces, 1, 2, ((0, 2),))  # but what all have is any rank's
    assert layout.cover(pieces, 9, EVERYBODY, ((5, 5),)) == []  # nothing of nothing


def test_the_memory_of_a_host_is_at_most_the_state():
    for hosts in ("ab", "aabb", "abcd"):
        regions = list(regions_of(2, len(hosts)))
        whole = sum(-(-region.nbytes // layout.ALIGNMENT) * layout.ALIGNMENT for region in regions)
        by_host = layout.memory_by_host(layout.share_out(regions, hosts), hosts)
        assert by_host.keys() == set(hosts) and max(by_host.values()) <= whole


# ---- files


def write(memory, step, content=b"content", writer=0, kind=OWN):
    draft = memory.begin(writer, kind, len(content))
    draft.write(memoryview(content), 0)
    sums = checksums(draft.fd, chunks(len(content)))
    return memory.commit(draft, Manifest(1, step, "s", len(content), (), sums))


def test_two_files_are_kept_of_each_writer_and_a_draft_is_none(own):
    memory = HostMemory("job", "h1", 1)
    for step in (1, 2, 3):
        write(memory, step)
    write(memory, 1, writer=1, kind=COPY)
    memory.begin(2, OWN, 8)
    assert memory.names() == ["1-1-1-copy", "1-2-0-own", "1-3-0-own"]
    assert memory.verify("1-3-0-own").step == 3
    later = HostMemory("job", "h1", 2)
    later.remove(keep=(1, 3))
    assert later.names() == ["1-3-0-own"]
    later.remove(earlier=True)
    assert later.names() == []


def test_a_file_is_whole_or_not_there(own):
    memory = HostMemory("job", "h1", 1)
    name = write(memory, 1, b"x" * 40)
    path = own / "job-snapshots-h1" / name
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert memory.verify(name) is None, place
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert memory.verify(name) is None, size
    path.write_bytes(whole)
    assert memory.verify(name) is not None and memory.verify("1-2-0-own") is None


def test_chunks_end_where_the_copied_part_ends(monkeypatch):
    monkeypatch.setattr(host_memory, "CHUNK_BYTES", 10)
    assert chunks(15, 32) == [(0, 10), (10, 5), (15, 10), (25, 7)]
    assert chunks(0, 5) == [(0, 5)] and chunks(5, 5) == [(0, 5)] and chunks(0) == []


# ---- peers


def test_a_copy_arrives_and_is_read_and_strangers_are_refused(own):
    server = RankServer(HostMemory("job", "h2", 1), TOKEN, "127.0.0.1")
    peer = connect_to_rank(1, server.address, TOKEN, 0)
    peer.send({"keep": 6})
    memory = HostMemory("job", "h2", 1)
    draft = memory.begin(9, OWN, 6)
    draft.write(memoryview(b"abcdef"), 0)
    sums = checksums(draft.fd, [(0, 4), (4, 2)])
    for (offset, nbytes, checksum), data in zip(sums, (b"abcd", b"ef"), strict=True):
        assert len(data) == nbytes
        peer.send({"at": offset}, data, checksum)
    peer.send({"manifest": Manifest(1, 7, "s", 6, (), sums)})
    assert peer.receive()[0] == {} and memory.verify("1-7-0-copy").checksums == sums
    peer.send({"read": "1-7-0-copy", "offset": 2, "nbytes": 3})
    assert bytes(peer.receive()[1]) == b"cde"
    with socket.create_connection(server.address.split(":")) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        stranger.settimeout(60)
        with pytest.raises(ConnectionError):
            while stranger.recv(4096):
                pass
            raise ConnectionError  # it may also be closed in order
    peer.send({"read": "../1-7-0-copy", "offset": 0, "nbytes": 3})  # out of the directory leads no way
    with pytest.raises(ConnectionError, match="the connection to rank 1, for snapshots, was lost"):
        peer.receive()
    peer.connection.close()


def test_another_token_or_changed_chunk_is_refused(own, monkeypatch):
    server = RankServer(HostMemory("job", "h2", 1), TOKEN, "127.0.0.1")
    monkeypatch.setattr("jaxrun_runtime.state_snapshots.peers._CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(UnavailableError, match="does not know the token"):
        connect_to_rank(1, server.address, "cd" * 32, 0)
    peer = connect_to_rank(1, server.address, TOKEN, 0)
    peer.send({"keep": 4})
    peer.send({"at": 0}, b"abcd", bytes(32))  # not its digest
    with pytest.raises((ConnectionError, ProtocolError)):
        peer.receive()
    peer.connection.close()


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
