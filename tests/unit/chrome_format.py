"""The Chrome trace event format as Google documents it, as far as jaxrun writes it: anything else is an error."""

import math
from collections import defaultdict

METADATA = {
    "process_name": {"name": str},
    "process_labels": {"labels": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}
FIELDS = {
    "M": {"ph", "name", "pid", "args"},
    "X": {"ph", "name", "cat", "ts", "dur", "pid", "tid", "args"},
    "i": {"ph", "name", "cat", "ts", "s", "pid", "tid", "args"},
}


def check_trace(trace):
    """Fail where a file's content is not of that format; returns its events."""
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"} and trace["displayTimeUnit"] in ("ms", "ns")
    check_events(trace["traceEvents"])
    return trace["traceEvents"]


def check_events(events):
    for event in events:
        kind = event["ph"]
        assert FIELDS[kind] <= set(event) <= FIELDS[kind] | {"tid"}, event
        assert isinstance(event["name"], str) and event["name"] and type(event["pid"]) is int, event
        if kind == "M":
            assert {name: type(value) for name, value in event["args"].items()} == METADATA[event["name"]], event
            assert event["name"].startswith("thread") == ("tid" in event), event
            continue
        assert type(event["tid"]) is int and isinstance(event["cat"], str) and isinstance(event["args"], dict), event
        assert all(math.isfinite(event[name]) and event[name] >= 0 for name in ("ts", "dur") if name in event), event
        assert kind != "i" or event["s"] in ("g", "p", "t"), event
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in events if event["ph"] == "X"} <= named
    assert {event["pid"] for event in events} == {event["pid"] for event in events if event["name"] == "process_name"}
    _check_nesting(events)


def _check_nesting(events):
    """Two slices of a track lie beside or within each other."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            start = round(event["ts"] * 1e3)
            tracks[event["pid"], event["tid"]].append((start, start + round(event["dur"] * 1e3)))
    for slices in tracks.values():
        ends = []
        for start, end in sorted(slices, key=lambda times: (times[0], -times[1])):
            while ends and ends[-1] <= start:
                ends.pop()
            assert not ends or end <= ends[-1], (start, end, ends)
            ends.append(end)
