"""The mark's arguments, and the errors for impossible ones."""

import pytest

from jaxrun.errors import UsageError
from jaxrun.pytest_plugin.mark import GangKey, MarkSpec, is_parametrized, parse_counts, parse_mark


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [((4,), {}, (4,)), ((), {"n": 2}, (2,)), (([2, 4],), {}, (2, 4)), ((), {"n": (3,)}, (3,))],
)
def test_the_mark_names_one_number_of_processes_or_several(args, kwargs, expected):
    assert parse_counts(args, kwargs) == expected
    assert is_parametrized(args, kwargs) == isinstance(args[0] if args else kwargs["n"], (list, tuple))


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((), {}, "needs a number"),
        ((0,), {}, "from 1"),
        ((True,), {}, "from 1"),
        (("4",), {}, "from 1"),
        (([],), {}, "from 1"),
        (([2, -1],), {}, "from 1"),
        ((2, 3), {}, "one number"),
        ((2,), {"n": 3}, "one number"),
    ],
)
def test_a_wrong_number_of_processes_is_refused(args, kwargs, message):
    with pytest.raises(UsageError, match=message):
        parse_counts(args, kwargs)


def test_all_arguments_of_the_mark_are_read():
    kwargs = {"devices": 2, "hosts": 2, "timeout": 1.5, "fresh": True, "env": {"B": "2", "A": "1"}, "dies": 1}
    gang = GangKey(4, 2, 2, (("A", "1"), ("B", "2")))
    assert parse_mark((4,), kwargs, 4) == MarkSpec(gang, 1.5, True, frozenset({1}))
    assert parse_mark((4,), {}, 4) == MarkSpec(GangKey(4))
    assert parse_mark((4,), {"lockstep": "off"}, 4) == MarkSpec(GangKey(4, lockstep="off"))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"tiemout": 3}, "does not know tiemout; it takes processes"),
        ({"devices": 0}, r"devices=0"),
        ({"hosts": "h1"}, r"hosts='h1'"),
        ({"timeout": 0}, "above 0"),
        ({"timeout": "3"}, "above 0"),
        ({"env": {"A": 1}}, "names of variables to strings"),
        ({"lockstep": "of"}, "lockstep='of'.*off, record, strict"),
        ({"dies": 2}, "of 0 to 1"),
        ({"dies": "1"}, "of 0 to 1"),
    ],
)
def test_a_wrong_value_is_refused_and_shown(kwargs, message):
    with pytest.raises(UsageError, match=message):
        parse_mark((2,), kwargs, 2)


@pytest.mark.parametrize(
    ("gang", "words", "label"),
    [
        (GangKey(1), "1 process", "1p"),
        (GangKey(4, 1), "4 processes x 1 device", "4p-1d"),
        (GangKey(4, 2, 2), "4 processes x 2 devices on 2 hosts", "4p-2d-2h"),
        (GangKey(2, lockstep="off"), "2 processes, lockstep off", "2p-off"),
        (GangKey(2, env=(("A", "1"),)), "2 processes with variables of its own", "2p-A=1"),
    ],
)
def test_a_gang_key_is_written_as_a_sentence_and_as_a_label(gang, words, label):
    assert (str(gang), gang.label) == (words, label)
