"""Which rank keeps which part of the state, what is left of it when hosts are lost, and the files that hold it."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket

import numpy as np
import pytest

from jaxrun.errors import UnavailableError
from jaxrun.files import shared_memory as directories
from jaxrun_runtime.state_snapshots import checks, host_memory, placement, structure, survey
from jaxrun_runtime.state_snapshots.checks import Check, CheckResult
from jaxrun_runtime.state_snapshots.host_memory import HostMemory, file_name, read_region
from jaxrun_runtime.state_snapshots.peers import PeerMemory, RankServer
from jaxrun_runtime.state_snapshots.placement import DESCRIPTION, KeptRegion, Region, Room, StateSnapshot
from jaxrun_runtime.state_snapshots.structure import Description, LeafFacts
from jaxrun_runtime.state_snapshots.survey import Listing, Survey

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


@pytest.mark.parametrize(
    ("room", "nbytes", "lack"),
    [
        (Room(80, [0, 0]), 40, None),
        (Room(79, [0, 0]), 40, (80, 79)),
        (Room(20, [40, 40]), 50, None),  # the slot that is written to gives back its own
        (Room(20, [10, 90]), 50, (50, 30)),  # of what the other one takes, nothing can be used yet
        (Room(0, [40, 40]), 40, None),
    ],
)
def test_there_is_room_for_a_snapshot_beside_the_one_that_is_kept_and_later_for_a_second_one(room, nbytes, lack):
    assert placement.lacks_room(room, 0, nbytes) == lack


def test_the_next_snapshot_leaves_the_slot_alone_that_is_kept():
    assert placement.next_number(-1, None) == 0 and placement.next_number(0, SNAPSHOT) == 1
    assert placement.next_number(1, SNAPSHOT) == 3  # number 1 is there, but is not the one to keep
    assert placement.next_number(-1, SNAPSHOT._replace(number=7)) == 0


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


# ---- what the ranks say before they write


def two(**second):
    return [Check(5, (), "layout", "values"), Check(**{"step": 5, "layout": "layout", "values": "values"} | second)]


ANSWERS = {
    "all is well": (two(), CheckResult("go on")),
    "what is wrong on all": (
        [Check(None, ["a", "b"])] * 2,
        CheckResult("usage", "snapshot cannot keep this state:\n  a\n  b"),
    ),
    "what is wrong on one": (
        two(wrong=["it is odd"]),
        CheckResult("usage", f"{checks.SNAPSHOT_START}: on rank 1 it is odd"),
    ),
    "other steps": (
        two(step=6),
        CheckResult("usage", "all ranks must call snapshot for the same step, not step 5 on rank 0, step 6 on rank 1"),
    ),
    "other leaves": (two(layout="x", values="x"), CheckResult("compare layouts")),
    "other values": (two(values="x"), CheckResult("compare values")),
    "enough room": (two(room=Room(2048, [0, 0])), CheckResult("go on")),
    "too little": (
        two(room=Room(1024, [0, 0])),
        CheckResult(
            "no memory",
            "snapshots of this state take 2 KiB of memory on h2, in /dev/shm, but 1 KiB are free there; "
            "use more hosts, or checkpoints on disk instead",
        ),
    ),
}


@pytest.mark.parametrize(("told", "expected"), ANSWERS.values(), ids=ANSWERS)
def test_the_ranks_get_one_answer(told, expected):
    sent = [Check.from_json(json.loads(json.dumps(check))) for check in told]
    assert checks.answer(sent, 0, {"h1": 1024, "h2": 1024}, ["h1", "h2"]) == expected


@pytest.mark.parametrize("step", [-1, 2**63, 10**4000, 1.0, "1", None])
def test_a_step_is_a_whole_number_that_a_file_can_hold(step):
    number, wrong = checks.step_number(step)
    assert number is None and len(wrong) == 1 and len(wrong[0]) < 100
    assert checks.step_number(np.int32(7)) == (7, []) and checks.step_number(True) == (1, [])


def test_a_list_is_cut_and_one_line_stands_in_the_sentence():
    assert structure.join_lines("wrong", ["a"]) == "wrong: a"
    assert structure.join_lines("wrong", map(str, range(25))).splitlines()[-2:] == ["  19", "  and 5 more"]


# ---- which snapshot fits

ARRAY = LeafFacts("state['x']", "jax.Array", (), "<f4")
KEY = LeafFacts("state['x']", "key", (), "key<fry>", "threefry2x32")
INT, FLOAT = (LeafFacts("state['x']", kind) for kind in ("int", "float"))
FITS = {
    "itself": (ARRAY, ARRAY, True),
    "another name": (ARRAY, ARRAY._replace(name="state['y']"), False),
    "another shape": (ARRAY, ARRAY._replace(shape=(1,)), False),
    "another type": (ARRAY, ARRAY._replace(dtype="<i4"), False),
    "a weak type": (ARRAY, ARRAY._replace(weak_type=True), True),
    "numpy's float64, which JAX makes a float32": (ARRAY._replace(kind="numpy.ndarray", dtype="<f8"), ARRAY, True),
    "a float": (FLOAT, ARRAY, True),
    "the array where `like` has a float": (ARRAY, FLOAT, True),
    "bfloat16 for a float": (ARRAY._replace(dtype="bfloat16"), FLOAT, True),
    "an int for an array of floats": (INT, ARRAY, False),
    "a float for an array that is no scalar": (FLOAT, ARRAY._replace(shape=(3,)), False),
    "an int for a float": (INT, FLOAT, False),
    "a key": (
        LeafFacts("state['x']", "key", (), "key<fry>", "fry"),
        LeafFacts("state['x']", "key", (), "key<fry>"),
        True,
    ),
    "another key": (
        LeafFacts("state['x']", "key", (), "key<fry>"),
        LeafFacts("state['x']", "key", (), "key<rbg>"),
        False,
    ),
    "a key for its words": (KEY, ARRAY._replace(dtype="<u4"), False),
    "a date": (ARRAY._replace(dtype="<M8[s]"), ARRAY._replace(dtype="<M8[s]"), True),
}


@pytest.mark.parametrize(("kept", "like", "fits"), FITS.values(), ids=FITS)
def test_a_leaf_fits_where_jax_would_take_the_one_for_the_other(kept, like, fits):
    assert structure.fits(kept, like) == fits
    assert (not structure.list_differences([kept], [like])) == fits


NUMBERS = [0, -(2**300), True, False, 0.1, -0.0, math.inf, complex(1, -0.0), complex(math.inf, math.nan)]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_python_number_comes_back(number):
    found = structure.parse_number(type(number).__name__, structure.number_text(number))
    assert type(found) is type(number) and repr(found) == repr(number)


def test_a_description_comes_back():
    described = Description([ARRAY, LeafFacts("state['n']", "int")], {1: "0x7"}, ["h1", "h2"])
    assert Description.from_text(described.to_bytes().decode()) == described


def surveyed(snapshots, descriptions, slots=(0, 1)):
    """What two ranks, on a and b, have found: each has the leaf 0 of these snapshots."""
    region = Region(0, ())
    listings = [Listing([(one, region) for one in snapshots], [*slots]), Listing([], [])]
    sent = [Listing.from_json(*json.loads(json.dumps(listing))) for listing in listings]
    assert sent == listings
    return Survey(sent, "ab", survey.gather(sent, "ab", "a"), descriptions)


def test_the_latest_whole_snapshot_that_fits_is_chosen_and_else_it_is_said_why_none_is():
    early, late = SNAPSHOT._replace(step=6), SNAPSHOT._replace(number=1)
    here, other = Description([ARRAY], {}, ["a"]), Description([ARRAY, ARRAY._replace(name="state['y']")], {}, ["a"])
    number = Description([FLOAT], {0: "0x0"}, ["a"])
    assert surveyed([early, late], {early: here, late: here}).choose([ARRAY]) == late
    assert surveyed([early, late], {early: here, late: other}).choose([ARRAY]) == early  # of late, a leaf is missing
    assert surveyed([early, late], {early: here, late: number}).choose([ARRAY]) == late
    assert surveyed([early], {early: here}).choose([]) is None

    def text(*given, **more):
        return surveyed(*given, **more).explain_none([ARRAY._replace(dtype="<i4")])

    assert text([], {}, slots=()) == ""
    begin, go_on = "no snapshot in memory is whole", "; continue from the checkpoint on disk"
    unfinished = f"{begin}: the attempt before ended while {{}} was written{go_on}"
    assert text([], {}) == unfinished.format("the first")
    assert text([early, late], {late: other}) == unfinished.format("that of step 7")
    assert text([late], {late: other._replace(hosts=["a", "b"])}) == (
        f"{begin}, because the parts of step 7 on b are lost{go_on}"
    )
    assert text([early, late], {early: here, late: here}) == (
        "the snapshot of step 7 in memory does not fit `like`: "
        "state['x'] is float32[] in the snapshot, int32[] in `like`; continue from the checkpoint on disk"
    )


def test_one_rank_speaks_for_each_description():
    later = SNAPSHOT._replace(number=1)
    listings = [Listing([(SNAPSHOT, Region(0, ()))], ()), Listing([(SNAPSHOT, Region(DESCRIPTION, ()))], ())]
    listings.append(Listing([(SNAPSHOT, Region(DESCRIPTION, ())), (later, Region(DESCRIPTION, ()))], ()))
    assert survey.description_owners(listings) == {SNAPSHOT: 1, later: 2}
    assert survey.slots_of(["0_1_2", "odd", "1", "2_0_0"]) == [0]


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
