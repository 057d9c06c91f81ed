"""scripts/testbed: what it refuses, and how it reads ssh's command line."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

SOURCES = Path(__file__).parents[2] / "scripts" / "testbed.d"
sys.path.insert(0, str(SOURCES))  # its files import each other by name
remote, requirements, state = map(import_module, ("remote", "requirements", "state"))
sys.path.remove(str(SOURCES))


def test_without_root_it_says_what_it_needs_and_why() -> None:
    with pytest.raises(state.Refusal, match="needs root, to make network, mount and UTS namespaces") as caught:
        requirements.require_root(1000)
    assert caught.value.status == 69


def test_missing_packages_are_named_once_with_the_way_to_install_them() -> None:
    missing = requirements.missing_packages({"ip": "/sbin/ip", "unshare": "u", "nsenter": "n"}.get)
    assert missing == ["munge", "slurm-wlm"]
    with pytest.raises(state.Refusal, match=r"apt-get install --no-install-recommends munge slurm-wlm$"):
        requirements.require_packages(missing)


@pytest.mark.parametrize("root", ["relative", "/with space", "/" + "x" * 80])
def test_a_directory_that_cannot_hold_a_testbed_is_refused(root: str) -> None:
    with pytest.raises(state.Refusal, match="must be an absolute path without spaces of at most 80"):
        state.Place(Path(root))


OPTION = st.sampled_from([["-x"], ["-tt"], ["-p", "22"], ["-p22"], ["-o", "A=b c"], ["-xl", "me"], ["-oA=b"]])
OPTIONS = st.lists(OPTION).map(lambda options: [word for option in options for word in option])


@settings(max_examples=40)
@given(OPTIONS, OPTIONS, st.lists(st.text()))
def test_ssh_options_are_dropped_and_the_command_is_kept(before: list[str], after: list[str], words: list[str]) -> None:
    assert remote.parse([*before, "me@h2", *after, "hostname", *words]) == remote.Remote("h2", ("hostname", *words))
    assert remote.parse(["h2", "--", "-x", *words]).words == ("-x", *words)


@pytest.mark.parametrize("arguments", [[], ["-x"], ["-p", "h1"], ["--"]])
def test_ssh_without_a_host_is_refused(arguments: list[str]) -> None:
    with pytest.raises(state.Refusal, match="no host was given"):
        remote.parse(arguments)
