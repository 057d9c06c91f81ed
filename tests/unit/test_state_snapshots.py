"""Which rank keeps which part of the state, what is left of it when hosts are lost, and the files that hold it."""

from __future__ import annotations

import itertools
import json
import math

import jax
import numpy as np
import pytest

from jaxrun_runtime.state_snapshots import checks, leaves, placement, structure, survey
from jaxrun_runtime.state_snapshots.checks import Check, CheckResult
from jaxrun_runtime.state_snapshots.placement import DESCRIPTION, Region, Room, StateSnapshot
from jaxrun_runtime.state_snapshots.structure import Description, LeafFacts
from jaxrun_runtime.state_snapshots.survey import Listing, Survey

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
def test_a_host_keeps_the_regions_of_its_ranks_once_and_copies_of_regions_that_only_the_previous_host_holds(hosts):
    regions = list(regions_of(2, len(hosts)))
    kept = list(kept_in(placement.share_out(regions, hosts), hosts))
    ring = sorted(set(hosts))
    for host in ring:
        before = ring[ring.index(host) - 1]
        theirs = [r for r, _, holders in regions if {hosts[rank] for rank in holders} == {before} and before != host]
        mine = [r for r, _, holders in regions if host in {hosts[rank] for rank in holders}]
        assert sorted(region for where, (_, _, region) in kept if where == host) == sorted((*mine, *theirs))


@pytest.mark.parametrize("hosts", ["ab", "abcd", "aabbcc", "abcde"])
def test_the_state_survives_the_loss_of_hosts_that_are_not_neighbours_and_missing_parts_count_as_missing(hosts):
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
    "numpy's float64, for numpy's float32": (
        ARRAY._replace(kind="numpy.ndarray", dtype="<f8"),
        ARRAY._replace(kind="numpy.ndarray"),
        False,
    ),
    "a scalar of numpy, for an array of numpy": (
        ARRAY._replace(kind="numpy scalar", dtype=">f4"),
        ARRAY._replace(kind="numpy.ndarray"),
        True,
    ),
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


OF_NUMPY = {
    "another type, for JAX": ("<f8", jax.ShapeDtypeStruct((2,), np.float32), "=f4"),  # and not float64 in a step of JAX
    "a type of JAX": (">f4", jax.ShapeDtypeStruct((2,), np.float32), ">f4"),
    "for numpy": ("<f8", np.zeros(2), "<f8"),
    "for a number": ("<f8", 0.0, "<f8"),
}


@pytest.mark.parametrize(("kept", "like", "dtype"), OF_NUMPY.values(), ids=OF_NUMPY)
def test_an_array_of_numpy_comes_back_as_numpys_in_the_type_that_like_has(kept, like, dtype):
    facts, content = ARRAY._replace(kind="numpy.ndarray", dtype=kept), np.array([0.1, 2], kept)
    for kind, expected in (("numpy.ndarray", np.ndarray), ("numpy scalar", np.generic)):
        data = content if expected is np.ndarray else content[1:].reshape(())
        facts = facts._replace(kind=kind, shape=data.shape)
        found = leaves.make_leaf(facts, like, lambda bounds, data=data: data)
        assert isinstance(found, expected) and np.all(found == data.astype(dtype))
        assert found.dtype == (np.dtype(dtype) if expected is np.ndarray else np.dtype(dtype).newbyteorder("="))


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


def test_the_latest_whole_snapshot_that_fits_is_chosen_or_a_text_says_why_none_is():
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


# ---- how long the directories stay
