"""How ranks find the head: addresses as they are written, interfaces that are offered, and the rendezvous file."""

import ipaddress
import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.controller.supervisor.attach import Rendezvous
from jaxrun.errors import UnavailableError, UsageError
from jaxrun.node.channel.host_addresses import HostAddress, describe_addresses, list_addresses, select_addresses
from jaxrun.node.channel.rendezvous import rendezvous_file
from jaxrun.protocol.addresses import Address, format_addresses, parse_addresses
from jaxrun.protocol.auth import read_given_token
from jaxrun.protocol.connect import HeadAddress, connect
from jaxrun.spec.engines.rank_info import RankInfo

HOST = (
    HostAddress("lo", "127.0.0.1"),
    HostAddress("lo", "::1"),
    HostAddress("docker0", "172.17.0.1"),
    HostAddress("eth0", "fd00::4"),
    HostAddress("eth0", "192.168.7.4"),
    HostAddress("ib0", "10.1.0.4"),
)
IPS = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
ADDRESSES = st.builds(Address, IPS, st.integers(1, 65535))


@given(st.lists(ADDRESSES, min_size=1, max_size=5).map(tuple))
def test_addresses_read_back_the_same(addresses):
    assert parse_addresses(format_addresses(addresses)) == addresses


def test_an_ipv6_address_is_written_in_brackets_and_a_name_may_stand_in_its_place():
    assert format_addresses([Address("10.1.0.4", 40), Address("fd00::4", 41)]) == "10.1.0.4:40,[fd00::4]:41"
    assert parse_addresses("login1:40, [::1]:41") == (Address("login1", 40), Address("::1", 41))


MALFORMED = ["", "h1", "h1:", ":40", "h1:0", "h1:65536", "h1:-1", "h1:x", "h1:\u0664", "[]:40", "h1:40,", "h1:4 0"]
WITHOUT_BRACKETS = ["::", "fd00::1", "::1", "[fd00::1:40", "fd00::1]:40"]


@pytest.mark.parametrize("text", MALFORMED + WITHOUT_BRACKETS)
def test_a_malformed_address_is_refused_as_it_was_typed(text):
    with pytest.raises(UsageError, match=r"written host:port or \[fd00::1\]:port, not"):
        parse_addresses(text)


@pytest.mark.parametrize(
    "host",
    [
        "a..b",
        ".a",
        "-a",
        "a-",
        "a b",
        "a/b",
        "a" * 64,
        "10.0.0.256",
        "1.2.3.4.5",
        "web.7",
        "a\n",
        "[fd00::g]",
        "[::1::]",
    ],
)
def test_what_can_never_be_a_host_is_refused_at_once(host):
    with pytest.raises(UsageError, match="is not a host: it is neither an address nor a name"):
        parse_addresses(f"{host}:7")


@pytest.mark.parametrize(
    "host",
    [
        "h1",
        "job-0.job.default.svc.cluster.local",
        "h1.",
        "node_7",
        "7up",
        "münchen.example",
        "10.1.0.4",
        "[fe80::1%eth0]",
    ],
)
def test_a_name_that_may_resolve_later_is_accepted(host):
    assert str(parse_addresses(f"{host}:7")[0]) == f"{host}:7"


def test_without_a_wish_all_are_offered_the_likeliest_first():
    names = [(address.interface, ":" in address.ip) for address in select_addresses(HOST)]
    assert names[:3] == [("eth0", False), ("ib0", False), ("eth0", True)]
    assert [name for name, _ in names[3:]] == ["docker0"]


def test_a_loopback_address_is_offered_to_other_hosts_only_if_there_is_no_other():
    loopback = [address for address in HOST if address.interface == "lo"]
    assert loopback and not set(loopback) & set(select_addresses(HOST))
    assert set(select_addresses(loopback)) == set(loopback)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("eth0", ["192.168.7.4", "fd00::4"]),
        ("192.168.7.4", ["192.168.7.4"]),
        ("10.1.0.0/16", ["10.1.0.4"]),
        ("10.1.9.9/16", ["10.1.0.4"]),
        ("fd00::/64", ["fd00::4"]),
        ("::1", ["::1"]),
        ("127.0.0.1", ["127.0.0.1"]),
        ("docker0", ["172.17.0.1"]),
    ],
)
def test_an_interface_is_chosen_by_its_name_address_or_network(wanted, found):
    assert [address.ip for address in select_addresses(HOST, wanted)] == found


@pytest.mark.parametrize("wanted", ["eth1", "10.2.0.0/16", "192.168.7.5", "eth", "fd01::/64", "not a name"])
def test_the_error_for_a_wrong_interface_lists_the_interfaces(wanted):
    with pytest.raises(UsageError) as refused:
        select_addresses(HOST, wanted)
    text = str(refused.value)
    assert text.startswith(f"--interface {wanted} is not an interface, address or network of this host, which has: ")
    assert all(f"{address.interface} {address.ip}" in text for address in HOST)


def test_this_hosts_interfaces_are_addresses_that_others_can_use():
    found = list_addresses()
    assert HostAddress("lo", "127.0.0.1") in found
    assert all(not ipaddress.ip_address(address.ip).is_link_local for address in found)
    assert set(select_addresses(found)) <= set(found)


def test_addresses_are_described_by_their_interfaces():
    addresses = [Address("10.1.0.4", 40123), Address("fd00::4", 40124), Address("10.9.9.9", 1)]
    assert describe_addresses(addresses, HOST) == "ib0 10.1.0.4:40123, eth0 [fd00::4]:40124, 10.9.9.9:1"


# ---- the file through which externally started ranks find rank 0, and what may be wrong with it


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
    at_0.remove(offer.addresses)
    at_0.remove(offer.addresses)
    assert at_3.read() is None and not list(tmp_path.iterdir())


def test_a_head_that_ends_leaves_the_file_of_the_next_head_there(file):
    file.write(TOKEN, "10.1.0.4:40")
    own = file.read().addresses
    file.write(TOKEN, "10.1.0.4:41")
    file.remove(own)
    assert file.read().addresses == (Address("10.1.0.4", 41),)
    file.path.write_text("{")
    file.remove(own)
    assert file.path.exists()


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
    ["", "{", "[]", '{"token": 1}', json.dumps({"token": "b", "head": "no address"}), "[" * 60_000, "\udcff"],
    ids=["empty", "half", "list", "number", "no address", "deep", "no UTF-8"],
)
def test_what_rank_0_does_not_write_is_refused_in_words(file, text):
    file.path.write_text(text, errors="surrogateescape")
    file.path.chmod(0o600)
    with pytest.raises(UnavailableError, match="is not trusted: its content is not what rank 0 writes; remove it"):
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
        (os.mkfifo, "it is not a regular file"),
        (os.mkdir, "it is not a regular file"),
        (lambda path: path.write_text(CONTENT + " " * 70_000), "it has 70[0-9]{3} bytes"),
    ],
    ids=["link", "loop", "FIFO", "directory", "large"],
)
def test_a_file_that_rank_0_did_not_write_is_refused_at_once(file, make, why):
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
    with pytest.raises(UnavailableError, match=r"found no head of the job within 0.1 s: .* it is not a regular file"):
        connect(file.read, 1, 0.1, "not there")


def test_what_is_given_by_hand_wins_over_the_file(file):
    given = (Address("h2", 41),)
    assert Rendezvous("given", (), file).find_head() is None
    file.write(TOKEN, "h1:40")
    assert Rendezvous("", (), file).find_head() == HeadAddress(TOKEN, (Address("h1", 40),))
    assert Rendezvous("given", (), file).find_head() == HeadAddress("given", (Address("h1", 40),))
    assert Rendezvous("", given, file).find_head() == HeadAddress(TOKEN, given)
    assert Rendezvous("given", given, file).find_head() == HeadAddress("given", given)


@pytest.mark.parametrize(
    ("token", "why"), [("short", "has 5 bytes, but needs 16"), ("é" * 7, "has 14 bytes"), ("\udcff" * 20, "UTF-8")]
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
