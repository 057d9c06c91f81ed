"""Facts about the leaves of a state. They are kept beside the bytes, and compared with `like` and between ranks.

A leaf comes back with the kind that it had; `like` only says where it goes. So `like` may have a Python number where
the snapshot has an array, because a step makes an array of a number. An array of numpy gets the type of the jax.Array
that `like` has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrun.protocol.message_tags import digest
from jaxrun.text import format_ranks, group_alike

ARRAY, KEY, NUMPY, NUMPY_SCALAR = "jax.Array", "key", "numpy.ndarray", "numpy scalar"
NUMBERS: Mapping[str, type] = {kind.__name__: kind for kind in (bool, int, float, complex)}
_DTYPES = {"bool": np.bool_, "int": np.integer, "float": np.floating, "complex": np.complexfloating}
_OF_NUMPY = (NUMPY, NUMPY_SCALAR)
_MAX_LINES = 20


class LeafFacts(NamedTuple):
    """Facts about a leaf, without its value and its sharding.

    name:       `state['params']['w']`
    kind:       ARRAY, KEY, NUMPY, NUMPY_SCALAR or one of NUMBERS
    dtype:      a text that np.dtype reads; for keys, the type as JAX writes it; empty for a Python number
    key_impl:   for keys, the implementation's name for jax.random.wrap_key_data
    """

    name: str
    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    key_impl: str = ""
    weak_type: bool = False

    def __str__(self) -> str:
        """Return the type and shape, `float32[8,2]`, or `a Python int`."""
        if self.kind in NUMBERS:
            return f"a Python {self.kind}"
        dtype = self.dtype if self.kind == KEY else str(np.dtype(self.dtype))
        return f"{dtype}[{','.join(map(str, self.shape))}]"


class Description(NamedTuple):
    """Everything that is kept of a state except the bytes of its arrays.

    numbers:  the Python numbers among the leaves, as text, by the leaf's number
    hosts:    the job's hosts
    """

    leaves: Sequence[LeafFacts]
    numbers: Mapping[int, str]
    hosts: Sequence[str]

    def to_bytes(self) -> bytes:
        return json.dumps(self).encode()

    @classmethod
    def from_text(cls, text: str) -> Description:
        """Parse a description. Raises ValueError if `text` is not one."""
        leaves, numbers, hosts = json.loads(text)
        facts = [LeafFacts(name, kind, tuple(shape), *rest) for name, kind, shape, *rest in leaves]
        return cls(facts, {int(leaf): number for leaf, number in numbers.items()}, hosts)


def structure_digest(leaves: Sequence[LeafFacts]) -> str:
    """Return 16 hex digits that are equal for equal leaves."""
    return digest(json.dumps(leaves).encode()).hex()[:16]


def dtype_text(dtype: np.dtype[Any]) -> str:
    """Return a text from which np.dtype makes this type again; empty if there is none, as for objects and records."""
    for text in () if dtype.hasobject else (dtype.str, dtype.name):
        try:
            if np.dtype(text) == dtype:
                return text
        except TypeError:
            pass
    return ""


def number_text(number: complex) -> str:
    if isinstance(number, int):
        return hex(number)
    return number.hex() if isinstance(number, float) else f"{number.real.hex()} {number.imag.hex()}"


def parse_number(kind: str, text: str) -> complex:
    if kind in ("bool", "int"):
        number = int(text, 16)
        return bool(number) if kind == "bool" else number
    parts = [float.fromhex(part) for part in text.split()]
    return parts[0] if kind == "float" else complex(*parts)


# ---- comparing


def fits(kept: LeafFacts, like: LeafFacts) -> bool:
    """Whether the kept leaf may replace `like`."""
    if (kept.name, kept.shape) != (like.name, like.shape):
        return False
    if KEY in (kept.kind, like.kind):
        return (kept.kind, kept.dtype) == (like.kind, like.dtype)
    if kept.kind in _OF_NUMPY and like.kind in _OF_NUMPY:  # neither comes from JAX, which may have narrowed the other
        return np.dtype(kept.dtype).newbyteorder("=") == np.dtype(like.dtype).newbyteorder("=")
    numbers = [facts.kind for facts in (kept, like) if facts.kind in NUMBERS]
    dtypes = [_in_jax(np.dtype(facts.dtype)) for facts in (kept, like) if facts.kind not in NUMBERS]
    if numbers and dtypes:  # a step may count from a Python 0, which becomes an array
        return bool(jax.numpy.issubdtype(dtypes[0], _DTYPES[numbers[0]]))
    return len({*numbers, *dtypes}) == 1


def _in_jax(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that JAX uses instead: float32 for float64, unless 64 bits are enabled."""
    try:
        return np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    except TypeError:  # a date, or text
        return dtype


def list_differences(kept: Sequence[LeafFacts], like: Sequence[LeafFacts]) -> list[str]:
    """Return how `like` differs from the kept leaves, a line for each leaf; empty if it fits."""
    there, here = ({facts.name: facts for facts in leaves} for leaves in (kept, like))
    lines = [f"only the snapshot has {name}, {facts}" for name, facts in there.items() if name not in here]
    lines += [f"only `like` has {name}, {facts}" for name, facts in here.items() if name not in there]
    both = [(facts, here[name]) for name, facts in there.items() if name in here]
    lines += [f"{one.name} is {one} in the snapshot, {two} in `like`" for one, two in both if not fits(one, two)]
    if not lines and [facts.name for facts in kept] != [facts.name for facts in like]:
        lines.append("its leaves are in another order")
    return lines


def compare_facts(by_rank: Sequence[Mapping[str, str]]) -> list[str]:
    """Return a line for each leaf that differs between ranks. `by_rank`: each rank's leaves, by name, as text."""
    lines = []
    for name in _all_names(by_rank):
        having = {rank: facts[name] for rank, facts in enumerate(by_rank) if name in facts}
        if lacking := [rank for rank in range(len(by_rank)) if rank not in having]:
            lines.append(f"{format_ranks([min(having)])} has {name}, which {format_ranks(lacking)} {_has_not(lacking)}")
        if len(groups := group_alike(having)) > 1:
            said = ", ".join(f"{facts} on {format_ranks(ranks)}" for facts, ranks in groups)
            lines.append(f"{name} is not alike on all ranks: {said}")
    return lines


def compare_values(by_rank: Sequence[Mapping[str, str | int]]) -> list[str]:
    """Return a line for each value that is not equal on all ranks. All ranks have the same names."""
    lines = []
    for name in _all_names(by_rank):
        others = [rank for rank, values in enumerate(by_rank) if values[name] != by_rank[0][name]]
        if others:
            differ = "differs" if len(others) == 1 else "differ"
            lines.append(f"{name} must be equal on all ranks: {format_ranks(others)} {differ} from rank 0")
    return lines


def _all_names(by_rank: Sequence[Mapping[str, Any]]) -> list[str]:
    return [*dict.fromkeys(name for each in by_rank for name in each)]


def _has_not(ranks: Sequence[int]) -> str:
    return "has not" if len(ranks) == 1 else "have not"


def merge_lines(by_rank: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of all ranks, each once, with the ranks that have it unless all have."""
    merged = []
    for line in dict.fromkeys(line for lines in by_rank for line in lines):
        ranks = [rank for rank, lines in enumerate(by_rank) if line in lines]
        merged.append(line if len(ranks) == len(by_rank) else f"on {format_ranks(ranks)} {line}")
    return merged


def join_lines(start: str, lines: Iterable[str]) -> str:
    """Return `start` with the lines: one sentence for one line, a list for several."""
    found = [*lines]
    if len(found) == 1:
        return f"{start}: {found[0]}"
    more = [f"and {len(found) - _MAX_LINES} more"] if len(found) > _MAX_LINES else []
    return "\n  ".join([f"{start}:", *found[:_MAX_LINES], *more])
