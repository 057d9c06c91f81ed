"""Addresses of the head: how they are written and read, and which of a host's interfaces are offered."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.channel.interfaces import Interface, describe_addresses, list_interfaces, select_interfaces
from jaxrun.errors import UsageError
from jaxrun.protocol.addresses import Address, format_addresses, parse_addresses

HOST = (
    Interface("lo", "127.0.0.1"),
    Interface("lo", "::1"),
    Interface("docker0", "172.17.0.1"),
    Interface("eth0", "fd00::4"),
    Interface("eth0", "192.168.7.4"),
    Interface("ib0", "10.1.0.4"),
)
IPS = st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str)
ADDRESSES = st.builds(Address, IPS, st.integers(1, 65535))


@given(st.lists(ADDRESSES, min_size=1, max_size=5).map(tuple))
def test_addresses_read_back_the_same(addresses):
    assert parse_addresses(format_addresses(addresses)) == addresses


def test_an_ipv6_address_is_written_in_brackets():
    assert format_addresses([Address("10.1.0.4", 40), Address("fd00::4", 41)]) == "10.1.0.4:40,[fd00::4]:41"


def test_a_name_may_stand_in_an_addresss_place():
    assert parse_addresses("login1:40, [::1]:41") == (Address("login1", 40), Address("::1", 41))


@pytest.mark.parametrize(
    "text",
    ["", "h1", "h1:", ":40", "h1:0", "h1:65536", "h1:-1", "h1:x", "h1:\u0664", "[]:40", "h1:40,", "h1:4 0", "::"],
)
def test_a_malformed_address_is_refused_as_it_was_typed(text):
    with pytest.raises(UsageError, match=r"written host:port or \[fd00::1\]:port, not"):
        parse_addresses(text)


@pytest.mark.parametrize("text", ["fd00::1", "::1", "[fd00::1:40", "fd00::1]:40"])
def test_an_ipv6_address_without_its_brackets_is_refused(text):
    with pytest.raises(UsageError):
        parse_addresses(text)


@given(st.text(max_size=30))
def test_any_text_is_addresses_or_a_usage_error(text):
    try:
        found = parse_addresses(text)
    except UsageError:
        return
    assert found and all(address.ip and 0 < address.port < 65536 for address in found)


def test_without_a_wish_all_are_offered_the_likeliest_first():
    names = [(interface.name, ":" in interface.ip) for interface in select_interfaces(HOST)]
    assert names[:3] == [("eth0", False), ("ib0", False), ("eth0", True)]
    assert [name for name, _ in names[3:]] == ["docker0"]


def test_an_address_at_which_somebody_else_may_listen_on_another_host_is_not_offered_unless_there_is_no_other():
    loopback = [interface for interface in HOST if interface.name == "lo"]
    assert loopback and not set(loopback) & set(select_interfaces(HOST))
    assert set(select_interfaces(loopback)) == set(loopback)


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
    assert [interface.ip for interface in select_interfaces(HOST, wanted)] == found


@pytest.mark.parametrize("wanted", ["eth1", "10.2.0.0/16", "192.168.7.5", "eth", "fd01::/64", "not a name"])
def test_the_error_for_a_wrong_interface_lists_the_interfaces(wanted):
    with pytest.raises(UsageError) as refused:
        select_interfaces(HOST, wanted)
    text = str(refused.value)
    assert text.startswith(f"--interface {wanted} is no interface, address or network of this host; it has: ")
    assert all(f"{interface.name} {interface.ip}" in text for interface in HOST)


def test_this_hosts_interfaces_are_addresses_that_others_can_use():
    found = list_interfaces()
    assert Interface("lo", "127.0.0.1") in found
    assert all(not ipaddress.ip_address(interface.ip).is_link_local for interface in found)
    assert set(select_interfaces(found)) <= set(found)


def test_addresses_are_described_by_their_interfaces():
    addresses = [Address("10.1.0.4", 40123), Address("fd00::4", 40124), Address("10.9.9.9", 1)]
    assert describe_addresses(addresses, HOST) == "ib0 10.1.0.4:40123, eth0 [fd00::4]:40124, 10.9.9.9:1"
