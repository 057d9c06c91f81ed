"""One sentence of advice for each way of being out of step."""

from __future__ import annotations

from jaxrun.lockstep.differences import DifferenceKind

_SAME_CALLS = "every rank must make the same cross-process calls in the same order"
ADVICE = {
    DifferenceKind.ABSENT: f"{_SAME_CALLS}, and equally many: pad or drop the uneven tail of the data on every rank "
    "alike (jaxrun_runtime.batches does); make a call that stands under a condition on every rank, or on none.",
    DifferenceKind.FUNCTION: f"{_SAME_CALLS}: make one that stands under a condition (as of jax.process_index()) on "
    "every rank, or on none.",
    DifferenceKind.NAMESAKE: f"{_SAME_CALLS}, of the same functions: broadcast rank 0's choice if the data decides "
    "(jax.experimental.multihost_utils.broadcast_one_to_all).",
    DifferenceKind.MESH: "make the mesh from the same devices in the same order on every rank (jax.make_mesh does).",
    DifferenceKind.COUNT: "call it with as many arrays, in the same structure, on every rank.",
    DifferenceKind.TAIL: 'this is the "last batch" pitfall: pad or drop the uneven tail on every rank alike '
    "(jaxrun_runtime.shard does).",
    DifferenceKind.SHAPE: "the global shapes must be the same on every rank: pad or cut uneven data alike "
    "(jaxrun_runtime.shard does), and sort what comes out of a set.",
    DifferenceKind.DTYPE: "convert it to the same dtype on every rank (x.astype).",
    DifferenceKind.SHARDING: "give it the same sharding on every rank (jax.device_put, in_shardings).",
    DifferenceKind.WEAK: "a Python number is weakly typed, an array is not: make it an array of one dtype on every "
    "rank (jnp.asarray(value, dtype)).",
    DifferenceKind.RESULT: "ask for the same results on every rank, with the same dtypes and out_shardings.",
    DifferenceKind.DONATION: "donate the same arguments on every rank (donate_argnums, donate_argnames).",
    DifferenceKind.ATTRIBUTE: "compile it with the same options on every rank.",
    DifferenceKind.SPECS: "give shard_map the same in_specs and out_specs on every rank.",
    DifferenceKind.CONSTANT: "pass the array as an argument instead, or broadcast rank 0's first "
    "(jax.experimental.multihost_utils.broadcast_one_to_all).",
    DifferenceKind.CODE: "pass the value as an argument instead, or broadcast rank 0's first "
    "(jax.experimental.multihost_utils.broadcast_one_to_all).",
    DifferenceKind.UNKNOWN: "the recorders do not hold what differs; jaxrun --lockstep strict stops before the call.",
}
SAME_LINE = (
    "the same line made different calls: where a set, or a dict made from one, gives the order, sort it; where a value "
    "decides, let all decide by the same one (jax.experimental.multihost_utils.broadcast_one_to_all)."
)
CROSSED = "groups that share ranks must make their calls in one order on all of them."
EARLIER = "jaxrun --lockstep strict stops at the first call that differs."
