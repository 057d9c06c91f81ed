"""The groups of devices that the collectives of a compiled program name, in each way in which XLA writes them."""

import pytest

from jaxrun_runtime.gloo.program_groups import find_groups

_ALL = [(0, 1, 2, 3)]


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,3},{1,2}}, use_global_device_ids=true", [(0, 3), (1, 2)]),
        ("replica_groups={}, to_apply=%add", _ALL),
        ("replica_groups=[2,2]<=[4], dimensions={1}", [(0, 1), (2, 3)]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={1}", [(0, 2), (1, 3)]),
        ("replica_groups=[1,4]<=[2,2]T(1,0), dimensions={1}", [(0, 2, 1, 3)]),
        ("replica_groups=mesh['x'=2,'y'=2] {'y'}, to_apply=%add", [(0, 1), (2, 3)]),
        ("replica_groups=mesh['x'=2,'y'=2] {'x'}, to_apply=%add", [(0, 2), (1, 3)]),
        ("replica_groups=mesh['x'=2,'y'=2] {'x','y'}", _ALL),
        ("replica_groups=mesh['x'=2,'y'=2] {'y', 'x'}", [(0, 2, 1, 3)]),
        ("source_target_pairs={{0,1},{1,0}}", _ALL),
    ],
)
def test_the_groups_of_an_operation(written, groups):
    assert find_groups(f"  ROOT %r = f32[4]{{0}} all-reduce(%p), channel_id=1, {written}\n", 4) == groups


@pytest.mark.parametrize("kind", ["all-gather", "all-reduce-start", "collective-permute", "ragged-all-to-all"])
def test_each_kind_of_collective_counts_and_each_group_once(kind):
    line = f"  %r = (f32[4]{{0}}, u32[]) {kind}(f32[4]{{0}} %p), replica_groups={{{{1,0}}}}\n"
    assert find_groups(f"HloModule jit_f, num_partitions=2\n  %c = f32[] copy(%p)\n{line}{line}", 2) == [(1, 0)]


@pytest.mark.parametrize(
    "written",
    [
        "replica_groups=mesh['x'=4] {'x':(1)2}",
        "replica_groups=mesh['x'=4, device_ids=(3,2,1,0)] {'x'}",
        "replica_groups=@another_way",
        "channel_id=1",
    ],
)
def test_a_collective_that_is_written_in_another_way_is_not_guessed(written):
    with pytest.raises(ValueError, match="cannot be read"):
        find_groups(f"  %r = f32[4]{{0}} all-reduce(%p), {written}\n", 4)
