"""The state of a job at one moment as metrics: names and units by the conventions of Prometheus. No I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from jaxrun.analysis.diagnosis.doing import Doing
from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.analysis.lockstep.told_progress import find_told_step, seconds_left
from jaxrun.analysis.verdict.goodput_text import Goodput
from jaxrun.frontends.top.samples import take_samples
from jaxrun.records.history.goodput import account
from jaxrun.records.history.job_log import AttemptLog

_STARTUP = "startup"  # a cause of lost time, besides the outcomes of attempts


class JobFacts(Struct, frozen=True):
    """The properties that do not change while a job runs."""

    job_id: str
    name: str
    tag: str
    run_dir: str


def collect(facts: JobFacts, overview: Overview | None, attempts: Sequence[AttemptLog]) -> Iterator[Metric]:
    """Yield all metrics; without an `overview`, if the launcher did not answer, only the metrics of the event log."""
    info = GaugeMetricFamily("jaxrun_job_info", "The job; always 1.", labels=["job_id", "name", "tag", "run_dir"])
    info.add_metric([facts.job_id, facts.name, facts.tag, facts.run_dir], 1)
    yield info
    restarts = max(0, attempts[-1].number - 1) if attempts else 0
    yield CounterMetricFamily("jaxrun_restarts", "How often the job was started again.", value=restarts)
    ranks = [rank for attempt in attempts for rank in attempt.ranks.values()]
    text = "How often a rank has failed without which the others went on."
    yield CounterMetricFamily("jaxrun_rank_losses", text, value=sum(rank.losses for rank in ranks))
    text = "How often such a rank has come back."
    yield CounterMetricFamily("jaxrun_rank_returns", text, value=sum(len(rank.absences) for rank in ranks))
    yield _lost_seconds(attempts)
    yield from _time(account(attempts))
    up = 0 if overview is None else 1
    yield GaugeMetricFamily("jaxrun_launcher_answers", "Whether the launcher has answered this time.", value=up)
    if overview is not None:
        yield from _of_job(overview)
        yield from _told_progress(overview)
        yield from _of_ranks(overview)
        yield from _of_hosts(overview)


def _time(goodput: Goodput) -> Iterator[Metric]:
    text = "Time of the job by what it was spent on, up to the last record of the event log."
    spent = CounterMetricFamily("jaxrun_time_seconds", text, labels=["part"])
    share = GaugeMetricFamily("jaxrun_time_ratio", "The same as a share; of steps, it is the goodput.", labels=["part"])
    for part, microseconds in goodput.parts_us.items():
        spent.add_metric([part], microseconds / 1e6)
        share.add_metric([part], goodput.share_of(part))
    yield from (spent, share)


def _lost_seconds(attempts: Sequence[AttemptLog]) -> Metric:
    lost = CounterMetricFamily(
        "jaxrun_lost_seconds",
        "Time in which no program ran: until the first one did, and from the end of an attempt until the next one did.",
        labels=["cause"],
    )
    for cause, seconds in lost_seconds(attempts).items():
        lost.add_metric([cause], seconds)
    return lost


def lost_seconds(attempts: Sequence[AttemptLog]) -> dict[str, float]:
    """Return the seconds without a program by cause: the start-up, or what the attempt before ended with."""
    lost: defaultdict[str, float] = defaultdict(float)
    for before, attempt in zip([None, *attempts], attempts, strict=False):
        until = attempt.run_at if attempt.run_at is not None else attempt.end
        if before is None:
            lost[_STARTUP] += max(0.0, until - attempt.start)
        else:
            lost[before.ended_with or "unknown"] += max(0.0, until - before.end)
    return dict(lost)


def _of_job(overview: Overview) -> Iterator[Metric]:
    ranks = GaugeMetricFamily("jaxrun_ranks", "How many ranks are in this state.", labels=["state"])
    counts = Counter(sample.doing for sample in take_samples(overview))
    for doing in Doing:
        ranks.add_metric([doing.value], counts[doing])
    yield ranks
    made = overview.calls_made
    if made is not None:
        yield CounterMetricFamily("jaxrun_calls", "Cross-process calls that a rank has made, the median.", value=made)
        if overview.calls_per_step:
            steps = made // overview.calls_per_step
            yield CounterMetricFamily("jaxrun_steps", "Steps: calls, by how many calls a step has.", value=steps)
    if overview.idle_s is not None:
        text = "Seconds since any rank has come to a cross-process call."
        yield GaugeMetricFamily("jaxrun_progress_age_seconds", text, value=overview.idle_s)
    share = GaugeMetricFamily(
        "jaxrun_straggler_share_ratio", "In what share of the time others wait for these ranks.", labels=["ranks"]
    )
    if overview.straggler is not None:
        share.add_metric([",".join(map(str, overview.straggler.ranks))], overview.straggler.share)
    yield share


def _told_progress(overview: Overview) -> Iterator[Metric]:
    """Yield how far the program says it has come, if it does."""
    told = find_told_step(overview.flights)
    if told is not None:
        yield GaugeMetricFamily("jaxrun_told_step", "The step that the program says it has finished.", value=told.step)
        if told.total:
            yield GaugeMetricFamily("jaxrun_told_steps", "How many there will be, as it says.", value=told.total)
        if told.per_second > 0.0:
            text = "How many of these steps it has made per second."
            yield GaugeMetricFamily("jaxrun_told_steps_per_second", text, value=told.per_second)
        if (left := seconds_left(told)) is not None:
            yield GaugeMetricFamily("jaxrun_told_left_seconds", "How long the rest takes at that pace.", value=left)


def _of_ranks(overview: Overview) -> Iterator[Metric]:
    """Yield what each rank uses, without ranks whose hosts have not answered and values that a host does not know."""
    labels = ["rank", "host"]
    cpu = CounterMetricFamily("jaxrun_rank_cpu_seconds", "CPU time that the rank has used.", labels=labels)
    written = CounterMetricFamily("jaxrun_rank_output_bytes", "Bytes written to stdout and stderr.", labels=labels)
    memory = GaugeMetricFamily("jaxrun_rank_memory_bytes", "Memory of the rank's process.", labels=labels)
    gpu = GaugeMetricFamily("jaxrun_rank_gpu_memory_bytes", "Memory of its GPUs that is used.", labels=labels)
    busy = GaugeMetricFamily("jaxrun_rank_gpu_busy_ratio", "For how much of the time its GPUs work.", labels=labels)
    for rank, vitals in sorted(overview.vitals.items()):
        where = [str(rank), overview.hosts.get(rank, "")]
        cpu.add_metric(where, vitals.cpu_seconds)
        written.add_metric(where, vitals.bytes_written)
        if vitals.memory_bytes:
            memory.add_metric(where, vitals.memory_bytes)
        if vitals.gpu_bytes >= 0:
            gpu.add_metric(where, vitals.gpu_bytes)
        if vitals.gpu_percent >= 0:
            busy.add_metric(where, vitals.gpu_percent / 100)
    yield from (cpu, written, memory, gpu, busy)


def _of_hosts(overview: Overview) -> Iterator[Metric]:
    """Yield how full the memory is that the ranks of each host share."""
    text = "of the host's memory, or of its ranks' cgroup if that is fuller"
    used = GaugeMetricFamily("jaxrun_host_memory_used_bytes", f"Bytes in use {text}.", labels=["host"])
    limit = GaugeMetricFamily("jaxrun_host_memory_limit_bytes", f"All bytes {text}.", labels=["host"])
    for memory in overview.host_memory:
        used.add_metric([memory.host], memory.used_bytes)
        limit.add_metric([memory.host], memory.limit_bytes)
    yield from (used, limit)
