"""A mapping by identity of what cannot be referenced weakly."""

from jaxrun_runtime.identity_dict import IdentityDict


class _Thing:
    __slots__ = ("__weakref__",)

    def __eq__(self, other):
        raise AssertionError("compared by value")

    __hash__ = None


def test_each_object_has_its_own_value():
    table, things = IdentityDict(), [_Thing() for _ in range(1000)]
    for number, thing in enumerate(things):
        table.set(thing, number)
    assert [table.get(thing) for thing in things] == list(range(1000)) and table.get(_Thing()) is None
    table.set(things[0], -1)
    assert table.get(things[0]) == -1 and len(table) == 1000


def test_objects_that_nobody_else_holds_are_dropped_and_their_ids_are_nobody_elses():
    table, held = IdentityDict(), [_Thing() for _ in range(100)]
    for number, thing in enumerate(held):
        table.set(thing, number)
    for _ in range(10_000):
        new = _Thing()
        assert table.get(new) is None
        table.set(new, "short-lived")
    assert len(table) <= 2 * len(held) + 3
    assert [table.get(thing) for thing in held] == list(range(100))
