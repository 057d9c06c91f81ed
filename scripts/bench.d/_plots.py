"""The figures of the benchmarks; `pyplot` is matplotlib's, the summaries are the benchmark's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def startup(summaries: Sequence[Any], goals: Mapping[int, float], pyplot: Any) -> Any:
    """Times and ratios over the number of processes."""
    ticks = sorted({one.size for one in summaries})
    figure, (times, ratios) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name in dict.fromkeys(one.contender for one in summaries):
        points = [one for one in summaries if one.contender == name and one.median is not None]
        sizes, medians = [one.size for one in points], [one.median for one in points]
        spread = [
            [one.median - one.least for one in points],
            [one.most - one.median for one in points],
        ]
        times.errorbar(sizes, medians, yerr=spread, label=name, marker="o", capsize=3)
        ratios.plot(sizes, [one.ratio for one in points], label=name, marker="o")
    shown = {size: goal for size, goal in goals.items() if size in ticks}
    ratios.plot(list(shown), list(shown.values()), "k_", markersize=18, label="goal for jaxrun")
    times.set(title="from command to exit, one sum", ylabel="seconds", yscale="log")
    ratios.set(title="ratio to plain subprocesses", yscale="log")
    for axes in (times, ratios):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, map(str, ticks))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set(xlabel="processes")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def failure(summaries: Sequence[Any], goal: float, limit: float, pyplot: Any) -> Any:
    """A group of bars for each fault."""
    faults = list(dict.fromkeys(str(one.fault) for one in summaries))
    names = list(dict.fromkeys(one.contender for one in summaries))
    figure, axes = pyplot.subplots(figsize=(11, 4.2), layout="constrained")
    for number, name in enumerate(names):
        bars = [one for one in summaries if one.contender == name]
        places = [faults.index(str(one.fault)) + (number - (len(names) - 1) / 2) * 0.8 / len(names) for one in bars]
        axes.bar(places, [one.gone for one in bars], width=0.75 / len(names), label=name)
    axes.axhline(goal, color="black", linestyle="--", linewidth=1, label="goal for jaxrun")
    axes.axhline(limit, color="grey", linestyle=":", linewidth=1, label="stopped here")
    axes.set_xticks(range(len(faults)), faults)
    axes.set(yscale="log", ylabel="seconds", title="from the fault until nothing of the job is left, 4 processes")
    axes.legend(fontsize="small")
    return figure


def scale(summaries: Sequence[Any], pyplot: Any) -> Any:
    """Times and memory over the number of agents, both logarithmic: a slope of one is linear growth."""
    figure, (times, memory) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    sizes = [one.size for one in summaries]
    lines = {
        "go": "first connection → all told to run",
        "handshake": "first connection → all have proved themselves",
        "told": "one failure → all others told",
        "cpu_go": "processor time of the head until go",
    }
    for name, label in lines.items():
        times.plot(sizes, [getattr(one, name) for one in summaries], marker="o", label=label)
    last = summaries[-1]
    linear = [last.go * size / last.size for size in sizes]
    times.plot(sizes, linear, color="grey", linestyle=":", linewidth=1, label="linear")
    memory.plot(sizes, [one.memory / 2**20 for one in summaries], marker="o", label="the head at go, MiB")
    memory.plot(
        sizes, [one.grown / one.size / 2**10 for one in summaries], marker="o", label="of it for each agent, KiB"
    )
    times.set(title="one head, all agents at once", ylabel="seconds", yscale="log")
    memory.set(title="memory of the head", ylim=(0, None))
    for axes in (times, memory):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set(xlabel="agents")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    times.yaxis.set_major_formatter("{x:g}")
    return figure
