"""Programs that are in step, in whatever way their ranks differ: nothing is said of them, however long they go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import HERE, jaxrun

BENIGN = str(HERE / "benign.py")
SOURCES = "".join(path.read_text() for path in sorted((HERE / "agreeing").glob("*.py")))
PROGRAMS = [name.replace("_", "-") for name in re.findall(r"^@program\ndef (\w+)", SOURCES, re.MULTILINE)]
STEPS = {"record": 1000, "strict": 150}  # a thousand take about 70 s in strict mode
# Two shares of about the same length; and over four ranks those whose groups are not all of them.
SHARES = {"even": (2, PROGRAMS[::2]), "odd": (2, PROGRAMS[1::2]), "four": (4, ["some-ranks-only", "local-on-rank-0"])}


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("mode", STEPS)
def test_nothing_is_said_of_ranks_that_are_in_step(tmp_path: Path, mode: str, share: str) -> None:
    size, programs = SHARES[share]
    flags = ("-n", str(size), "--lockstep", mode, "--timeout", "120")
    result = jaxrun(tmp_path, *flags, BENIGN, "--steps", str(STEPS[mode]), *programs)
    assert result.code == 0, result.err
    assert result.verdict()["divergence"] == ""
    ours = [line for line in result.err.splitlines() if not line.startswith("[")]
    price = [line for line in ours if re.match(r"--lockstep strict: \d+ calls agreed on first", line)]
    assert len(price) == (mode == "strict"), ours
    said = set(ours) - set(price)
    assert [line for line in said if not re.match(r"jaxrun: (\d process|starting:|joining:|done in)", line)] == []
    for rank in range(size):
        text = (result.run_dir / f"rank-{rank:04d}.out").read_text()
        assert re.findall(r"^in step: (\S+)", text, re.MULTILINE) == programs
