"""The programs that jaxrun ships, in one process with four devices: what they print, and what goes wrong in them."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.processes(1, devices=4)


def program(name: str) -> Any:
    return import_module(f"jaxrun_runtime.programs.{name}")


@pytest.mark.extended
def test_selfcheck_lists_the_devices(capsys: Any) -> None:
    program("selfcheck").main()
    *table, verdict = capsys.readouterr().out.splitlines()
    assert [line.split() for line in table] == [["rank", "devices", "platform", "kind"], ["0", "4", "cpu", "cpu"]]
    assert verdict == "psum, all_gather and ppermute are right on 4 device(s) in 1 process(es)"


@pytest.mark.parametrize(
    ("collective", "broken", "message"),
    [
        ("psum", lambda x, name: 3 * x, "psum of ones gave [3.0] instead of [4] on"),
        ("all_gather", lambda x, name: x[None].repeat(4), "all_gather gave [[0, 0, 0, 0]] instead of [[0, 1, 2, 3]]"),
        ("ppermute", lambda x, name, pairs: x, "ppermute ring gave [0] instead of [3] on"),
    ],
)
def test_selfcheck_ends_with_a_sentence_when_a_collective_is_wrong(
    monkeypatch: pytest.MonkeyPatch, collective: str, broken: Any, message: str
) -> None:
    import jax

    monkeypatch.setattr(jax.lax, collective, broken)
    with pytest.raises(SystemExit) as ended:
        program("selfcheck").main()
    assert message in str(ended.value) and "of rank 0: the devices do not compute together." in str(ended.value)


@pytest.mark.extended
@pytest.mark.jax_version
def test_regression_finds_the_line(capsys: Any) -> None:
    program("regression").main(["--no-plot"], {})
    first, second, line = capsys.readouterr().out.splitlines()
    # A gradient that is summed twice would still find the line, by other steps.
    losses = [float(words.partition("loss")[2]) for words in (first, second)]
    assert losses == pytest.approx([5.782, 0.226], abs=0.001), losses
    assert (first[:8], second[:8]) == ("step   0", "step 100")
    assert line == "y = 2.030 x - 1.004  (truth: 2 x - 1)"


def test_regression_draws_the_line_where_it_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    regression = program("regression")
    x, y = regression.make_data()
    monkeypatch.chdir(tmp_path)
    assert regression.plot(x, y, 2.0, -1.0, tmp_path) == "plot: regression.png"
    assert (tmp_path / "regression.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert regression.plot(x, y, 2.0, -1.0, tmp_path) == (
        "plot left out: matplotlib is not installed; pip install matplotlib"
    )


def test_a_training_that_is_stopped_and_goes_on_ends_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    pytest.importorskip("optax")
    pytest.importorskip("orbax.checkpoint")
    train = program("train")
    monkeypatch.setattr(train, "EVALUATE_EVERY", 15)

    def run(directory: str, steps: int, *words: str) -> str:
        train.main([str(tmp_path / directory), "--steps", str(steps), "--save-every", "10", *words])
        return capsys.readouterr().out

    evaluated, whole = run("whole", 25).splitlines()
    assert re.fullmatch(r"step   15  loss 0\.\d{4}  \d\d\.\d% right", evaluated)
    assert re.fullmatch(r"parameters \w{16} after 25 steps", whole)
    with monkeypatch.context() as patch:
        patch.setattr(train.jr, "should_stop", lambda step=0: step in (0, 17))
        evaluated, stopped = run("parts", 25).splitlines()
    assert re.fullmatch(r"step   15  loss 0\.\d{4}", evaluated)
    assert stopped == "stopped after step 17, and saved it"
    assert run("parts", 25) == f"continues after step 17, bit for bit\n{whole}\n"

    (description,) = (tmp_path / "parts/25/description").glob("metadata")
    description.write_text(description.read_text().replace('"devices": 4', '"devices": 1'))
    rounding = "saved on 1 device, so equal to an undisturbed run only up to rounding"
    assert run("parts", 26).startswith(f"continues after step 25, {rounding}\n")
    with pytest.raises(SystemExit, match="has --batch-size 128; give that, or another DIR"):
        run("parts", 27, "--batch-size", "64")


def test_without_optax_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "jaxrun_runtime.programs.train", raising=False)
    with pytest.raises(SystemExit) as ended:
        program("train")
    assert ended.value.code == "train needs optax, which is not installed; pip install optax orbax-checkpoint"


# ---- the tutorial


@pytest.mark.jax_version
@pytest.mark.parametrize("way", ["vmap", "pmap", "in-axes"])
def test_the_convolution_is_the_same_by_each_way(capsys: Any, way: str) -> None:
    program("convolution").main([way])
    assert capsys.readouterr().out == f"{way}: 4 outputs here, the last is 146 155 164\n"


@pytest.mark.jax_version
@pytest.mark.parametrize("way", ["normalized", "shard-map", "jit"])
def test_the_shares_add_up_to_one(capsys: Any, way: str) -> None:
    program("convolution").main([way])
    assert capsys.readouterr().out.splitlines() == [
        f"{way}: 4 outputs here, the last is 0.465 0.4429 0.4249",
        "sum over all processes: 1 1 1",
    ]


@pytest.mark.jax_version
@pytest.mark.processes(2, devices=2)
@pytest.mark.parametrize("way", ["normalized", "vmap-inside", "shard-map", "jit"])
def test_the_sum_reaches_all_processes(capsys: Any, way: str) -> None:
    import jax

    program("convolution").main([way])
    _, *total = capsys.readouterr().out.splitlines()
    assert total == ([] if jax.process_index() else ["sum over all processes: 1 1 1"])


@pytest.mark.parametrize(
    ("pitfall", "printed"),
    [("shapes", "mean 1\n"), ("last-batch", "all batches done\n"), ("order-of-a-set", "16\n1\n")],
)
def test_alone_no_rank_falls_into_a_pit(capsys: Any, pitfall: str, printed: str) -> None:
    program("pitfalls").main([pitfall])
    assert capsys.readouterr().out == printed
