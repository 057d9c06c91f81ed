"""Host lists, hostfiles and Slurm's node lists as mpirun and Slurm read them, and which rank they put where."""

import re

import pytest

from jaxrun.errors import UsageError
from jaxrun.spec.backends.mpi_hosts import HostSlots, parse_host_list, parse_hostfile, place_ranks, read_hostfile
from jaxrun.spec.backends.slurm_allocation import expand_counts, expand_node_list


def slots(*pairs):
    return tuple(HostSlots(name, count) for name, count in pairs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h1", slots(("h1", None))),
        ("h1:4,h2:2", slots(("h1", 4), ("h2", 2))),
        ("h1,h2,h1,h1", slots(("h1", 3), ("h2", None))),
        ("h1:2,h2:1,h1:1", slots(("h1", 3), ("h2", 1))),
        ("h1,h1:3", slots(("h1", 4))),
        ("10.1.0.4:2,node-7.rack_2.example.org", slots(("10.1.0.4", 2), ("node-7.rack_2.example.org", None))),
        ("[fd00::2]:4,[fe80::1%eth0]", slots(("fd00::2", 4), ("fe80::1%eth0", None))),
    ],
)
def test_a_host_list_is_read_as_mpirun_reads_it(text, expected):
    assert parse_host_list(text) == expected


@pytest.mark.parametrize(
    ("text", "part", "hint"),
    [
        ("h1:4,,h2:4", "''", "h1:4,h2:4"),
        ("", "''", "h1:4,h2:4"),
        ("h1:x", "'h1:x'", "h1:4,h2:4"),
        ("h1:0", "'h1:0'", "leave the host out"),
        ("h1 h2", "'h1 h2'", "h1:4,h2:4"),
        ("h1:4:4", "'h1:4:4'", "h1:4,h2:4"),
        ("h1,fd00::2", "'fd00::2'", "brackets, [fd00::2]:4"),
        ("[h1]:2", "'[h1]:2'", "h1:4,h2:4"),
        ("me@h1", "'me@h1'", "~/.ssh/config"),
        ("h1:9999999", "'h1:9999999'", "h1:4,h2:4"),
    ],
)
def test_a_malformed_host_list_is_refused_with_the_part_and_a_hint(text, part, hint):
    with pytest.raises(UsageError) as refused:
        parse_host_list(text)
    assert str(refused.value).startswith(f"--host {text!r}: {part} ") and hint in str(refused.value)


def test_a_hostfile_may_mix_both_spellings():
    text = """# the first rack

h1 slots=4 max_slots=8   # two sockets\r
  h2   slots = 2\tmax-slots=2
h3:4
h4
h6 max_slots=3
h7
h7
h3:1"""
    assert parse_hostfile(text, "hosts") == slots(("h1", 4), ("h2", 2), ("h3", 5), ("h4", None), ("h6", 3), ("h7", 2))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("h1 slots=four", "'slots=four' is neither slots=NUMBER nor max_slots=NUMBER"),
        ("h1 slots=2 binding=user:1", "'binding=user:1' is neither"),
        ("h1 slots=0", "'slots=0' has no slot"),
        ("h1,h2", "'h1,h2' is not a host"),
        ("me@h1 slots=2", "'me@h1' names a user"),
    ],
)
def test_a_malformed_line_of_a_hostfile_is_refused_by_its_number(line, reason):
    with pytest.raises(UsageError) as refused:
        parse_hostfile(f"h0 slots=1\n# \n{line}   # why\nh9\n", "my hosts")
    message = str(refused.value)
    assert message.startswith(f"my hosts:3: {reason}")
    assert "expected 'h1 slots=4', 'h1:4' or 'h1', not " in message and line in message


def test_a_hostfile_is_read_from_disk_with_and_without_a_byte_order_mark(tmp_path):
    path = tmp_path / "hosts"
    for text in ("h1 slots=2\nh2\n", "\ufeffh1 slots=2\r\nh2\r\n"):
        path.write_bytes(text.encode())
        assert read_hostfile(path) == slots(("h1", 2), ("h2", None))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none", r"--hostfile .*/none cannot be read: No such file or directory"),
        (".", r"cannot be read: Is a directory"),
        ("binary", r"binary is not text"),
        ("empty", r"empty names no host; expected lines such as 'h1 slots=4'"),
    ],
)
def test_a_file_that_is_not_a_hostfile_is_refused_with_its_path(tmp_path, name, message):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00h")
    (tmp_path / "empty").write_text("# nothing\n\n")
    with pytest.raises(UsageError, match=message):
        read_hostfile(tmp_path / name)


@pytest.mark.parametrize(
    ("hosts", "processes", "per_host", "expected"),
    [
        (slots(("h1", 2), ("h2", 1)), None, None, "h1 h1 h2"),
        (slots(("h1", 2), ("h2", 2)), 3, None, "h1 h1 h2"),
        (slots(("h1", None), ("h2", None), ("h3", None)), 5, None, "h1 h1 h2 h2 h3"),
        (slots(("h1", None), ("h2", None), ("h3", None)), 2, None, "h1 h2"),
        (slots(("h1", None), ("h2", None)), 2, None, "h1 h2"),
        (slots(("h1", 2), ("h2", None)), None, None, "h1 h1 h2"),
        (slots(("h1", None), ("h2", None)), None, 2, "h1 h1 h2 h2"),
        (slots(("h1", 4), ("h2", 2)), None, 2, "h1 h1 h2 h2"),
        (slots(("h1", 4), ("h2", 4), ("h3", 4)), 4, 2, "h1 h1 h2 h2"),
    ],
)
def test_ranks_fill_the_hosts_block_by_block(hosts, processes, per_host, expected):
    assert " ".join(place_ranks(hosts, processes, per_host)) == expected


@pytest.mark.parametrize(
    ("hosts", "processes", "per_host", "message"),
    [
        ((), 2, None, "name hosts with -H or --hostfile"),
        (slots(("h1", 2), ("h2", 1)), 5, None, "-n 5, but 2 hosts have room for 3 (h1:2, h2:1); .* such as h1:4"),
        (slots(("h1", 2)), 3, None, "-n 3, but 1 host has room for 2 (h1:2)"),
        (slots(("h1", 2), ("h2", None)), 4, None, "have room for 3 (h1:2, h2:1)"),
        (slots(*((f"h{i}", 1) for i in range(20))), 21, None, "h7:1, ...); lower"),
        (slots(("h1", 4), ("h2", 2)), None, 4, "--processes-per-host 4, but h2 has 2 slots; lower it to 2, or give h2"),
        (slots(("h1", None)), 4, 2, "has room for 2 with --processes-per-host 2; lower -n, or name more"),
    ],
)
def test_processes_that_do_not_fit_are_refused_with_the_numbers_and_a_remedy(hosts, processes, per_host, message):
    with pytest.raises(UsageError) as refused:
        place_ranks(hosts, processes, per_host)
    for part in message.split(" .* "):
        assert part in str(refused.value)


NODE_LISTS = {
    "h1": "h1",
    "h[1-3]": "h1 h2 h3",
    "rack[1-2]n[01-02],login1": "rack1n01 rack1n02 rack2n01 rack2n02 login1",
    "a[1,3-5,07-11]b[2]": "a1b2 a3b2 a4b2 a5b2 a07b2 a08b2 a09b2 a10b2 a11b2",
    "n[099-101]": "n099 n100 n101",
    "n[9-011]": "n9 n10 n11",
    "n[1-2].hpc.example.org,m": "n1.hpc.example.org n2.hpc.example.org m",
    "[1-2]": "1 2",
    "n[1-2][3-4]": "n13 n14 n23 n24",
}


@pytest.mark.parametrize("text", NODE_LISTS)
def test_node_lists_are_expanded(text):
    assert expand_node_list(text) == tuple(NODE_LISTS[text].split())


MALFORMED = ["", "a,", "a,,b", "a[1-2", "a1]", "a[]", "a[1,]", "a[x]", "a[3-1]", "a[1--2]", "a[1[2]]", "a b", "(null)"]
TOO_MANY = ["a[0-65536]", "a[0-999]b[0-999]", "a[0-40000],b[0-40000]", "a[0-40000,1-40000]", f"a[1-{'9' * 18}]"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "'{}' is not a list of Slurm nodes") for text in (*MALFORMED, "a[1 - 2]", f"a[1-{'9' * 19}]")),
        *((text, "names more than 65536 nodes") for text in TOO_MANY),
    ],
)
def test_a_node_list_that_slurm_would_not_write_is_refused_at_once(text, message):
    with pytest.raises(UsageError, match=re.escape(message.format(text))):
        expand_node_list(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1,)), ("2(x3),1", (2, 2, 2, 1)), ("1,2,1", (1, 2, 1)), ("16(x2)", (16, 16))]
)
def test_counts_are_expanded(text, expected):
    assert expand_counts(text) == expected


@pytest.mark.parametrize("text", ["", "2(x3", "2x3", "2(x0)", "x", "2,", "-1", "2(x3)4", "1(x9999999)"])
def test_malformed_counts_are_refused_with_their_text(text):
    with pytest.raises(UsageError) as refused:
        expand_counts(text)
    assert str(refused.value).startswith(f"{text!r} is not a list of counts by Slurm")
