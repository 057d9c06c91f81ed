"""What users give the pytest plugin: its mark and options."""

import argparse

import cloudpickle
import pytest
from fakes import PytestConfig

from jaxrun.errors import UsageError
from jaxrun.frontends.pytest_plugin.mark import GangKey, MarkSpec, is_parametrized, parse_counts, parse_mark
from jaxrun.frontends.pytest_plugin.plugin import pytest_addoption, read_timeout
from jaxrun.frontends.pytest_plugin.rank_sessions import session_settings

# ---- the mark


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
        ({"timeout": float("nan")}, "above 0"),
        ({"env": {"A": 1}}, "names of variables to strings"),
        ({"lockstep": "of"}, "lockstep='of'.*off, record, check, fail, strict"),
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


# ---- options


class Parser(argparse.ArgumentParser):
    """pytest's, as far as the plugin uses it."""

    addoption = argparse.ArgumentParser.add_argument

    def getgroup(self, *_):
        return self

    def addini(self, *_, **__):
        pass


def parse(*words):
    parser = Parser(exit_on_error=False)
    pytest_addoption(parser)
    return parser.parse_args(words)


def test_more_words_for_jaxrun_may_be_given_several_times_and_quoted():
    assert parse().gang_options == []
    assert parse("--gang-options=-H 'h 1'", "--gang-options=--time 3").gang_options == ["-H", "h 1", "--time", "3"]
    with pytest.raises(argparse.ArgumentError, match="-H 'h1: No closing quotation"):
        parse("--gang-options=-H 'h1")


@pytest.mark.parametrize(("ini", "given", "seconds"), [("300", None, 300.0), ("7", None, 7.0), ("7", 2.5, 2.5)])
def test_a_timeout_of_the_command_line_goes_before_that_of_the_ini_file(ini, given, seconds):
    assert read_timeout(config(ini, given)) == seconds


def config(ini, given):
    return PytestConfig("gang_timeout", given, ini)


@pytest.mark.parametrize(
    ("ini", "given", "message"),
    [
        ("soon", None, "gang_timeout = 'soon' is not a number of seconds"),
        ("300", 0.0, "--gang-timeout 0: must be above 0 seconds"),
        ("nan", None, "--gang-timeout nan: must be above 0 seconds"),
    ],
)
def test_a_wrong_timeout_is_refused(ini, given, message):
    with pytest.raises(pytest.UsageError, match=message):
        read_timeout(config(ini, given))


def test_all_ranks_get_the_same_seed_for_the_examples_of_hypothesis(pytestconfig):
    pytest.importorskip("hypothesis")
    if pytestconfig.getoption("hypothesis_seed", 0) is not None:
        pytest.skip("this pytest has a seed, or no plugin of hypothesis")
    seeds = [session_settings(pytestconfig, (), "").options["hypothesis_seed"] for _ in range(2)]
    assert len({cloudpickle.loads(seed) for seed in seeds} - {None}) == 2
