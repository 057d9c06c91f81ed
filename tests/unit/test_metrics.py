"""The metrics of a job: names and values as Prometheus parses them, and the causes of lost time."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from jaxrun.analysis.diagnosis.doing import Doing
from jaxrun.analysis.diagnosis.overview import Overview, RankEnd
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.cli.main import main
from jaxrun.frontends.http_server import parse_request
from jaxrun.frontends.metrics.__main__ import MetricsPage
from jaxrun.frontends.metrics.exposition import JobFacts, collect, lost_seconds
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.query_messages import RankReply
from jaxrun.protocol.worker_messages import DeviceReport
from jaxrun.records.history.job_log import AttemptLog, RankLog
from jaxrun.records.history.job_trace import Span

FACTS = JobFacts("ab" * 16, "train", 'a "night" run', "/runs/1")
HOST_MEMORY = {"host_memory_bytes": 2**33, "host_memory_limit_bytes": 2**35}
HOSTS = {0: "h1", 1: "h1", 2: "h2", 3: "h2"}


class Given(Collector):
    def __init__(self, *given):
        self._given = given

    def collect(self):
        return collect(FACTS, *self._given)


def parsed(overview, attempts=()):
    """{(name, labels as text): value} of all samples."""
    registry = CollectorRegistry()
    registry.register(Given(overview, attempts))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def flight(calls):
    return Flight(level=EVERY_CALL, call_counts={"0-3": calls})


def attempt(number, start, end, run_at=None, ended_with=""):
    log = AttemptLog(number, start, end, ended_with=ended_with)
    log.ranks[0] = RankLog(at={DeviceReport: run_at} if run_at is not None else {})
    return log


def test_states_steps_and_resources_of_ranks():
    vitals = {
        0: RankReply(0, 1, 100.0, cpu_seconds=5.5, bytes_written=120, memory_bytes=2**30, **HOST_MEMORY),
        1: RankReply(1, 1, 100.0, gpu_percent=40.0, gpu_bytes=2**34),
    }
    straggler = Straggler((2,), "0-3", "", 9, 100, 0.9, 0.1, 0.25, 0.2, True)
    seen = Overview(
        100.0,
        "running",
        HOSTS,
        (0, 1),
        {0: flight(40), 1: flight(42)},
        vitals,
        {2: RankEnd("finished", is_failure=False, has_finished=True), 3: RankEnd("raised ValueError")},
        4,
        straggler,
    )
    found = parsed(seen)
    states = {labels: value for (name, labels), value in found.items() if name == "jaxrun_ranks"}
    assert states == {
        **dict.fromkeys((f"state={doing}" for doing in Doing), 0),
        **{"state=working": 2, "state=finished": 1, "state=failed": 1},
    }
    assert found["jaxrun_calls_total", ""] == 41 and found["jaxrun_steps_total", ""] == 10
    assert found["jaxrun_straggler_share_ratio", "ranks=2"] == 0.25
    assert found["jaxrun_rank_cpu_seconds_total", "host=h1,rank=0"] == 5.5
    assert found["jaxrun_rank_output_bytes_total", "host=h1,rank=0"] == 120
    assert found["jaxrun_rank_memory_bytes", "host=h1,rank=0"] == 2**30
    assert found["jaxrun_host_memory_used_bytes", "host=h1"] == 2**33
    assert found["jaxrun_host_memory_limit_bytes", "host=h1"] == 2**35
    assert ("jaxrun_host_memory_used_bytes", "host=h2") not in found  # no rank of it has answered
    assert found["jaxrun_rank_gpu_memory_bytes", "host=h1,rank=1"] == 2**34
    assert found["jaxrun_rank_gpu_busy_ratio", "host=h1,rank=1"] == 0.4
    assert ("jaxrun_rank_gpu_memory_bytes", "host=h1,rank=0") not in found
    assert found["jaxrun_job_info", f"job_id={FACTS.job_id},name=train,run_dir=/runs/1,tag={FACTS.tag}"] == 1


def test_if_the_launcher_does_not_answer_the_event_log_is_shown():
    found = parsed(None, [attempt(1, 0.0, 50.0, 4.0, "killed"), attempt(2, 51.0, 60.0, 53.0)])
    assert found["jaxrun_launcher_answers", ""] == 0 and found["jaxrun_restarts_total", ""] == 1
    assert found["jaxrun_lost_seconds_total", "cause=startup"] == 4
    assert found["jaxrun_lost_seconds_total", "cause=killed"] == 3
    assert not any(name == "jaxrun_ranks" for name, _ in found)


def test_losses_and_returns_of_ranks_are_counted_over_all_attempts():
    first, second = attempt(1, 0.0, 50.0, 4.0, "killed"), attempt(2, 51.0, 60.0, 53.0)
    first.ranks[0].losses, first.ranks[0].absences = 2, [Span("lost", 10.0, 11.0)]
    second.ranks[0].losses = 1
    found = parsed(None, [first, second])
    assert found["jaxrun_rank_losses_total", ""] == 3 and found["jaxrun_rank_returns_total", ""] == 1


def test_time_is_lost_until_a_program_runs():
    attempts = [
        attempt(1, 0.0, 10.0, None, "unavailable"),
        attempt(2, 10.5, 30.0, 12.0, "killed"),
        attempt(3, 31.0, 40.0, 33.0),
    ]
    assert lost_seconds(attempts) == {"startup": 10.0, "unavailable": 2.0, "killed": 3.0}
    assert lost_seconds([]) == {}


@pytest.mark.parametrize("where", ["port", "1:2:x", "70000", "host:"])
def test_a_value_that_is_not_a_port_is_refused(where, capsys):
    assert main(["--metrics", where, "train.py"]) == 2
    assert "--metrics must be a port" in capsys.readouterr().err


def test_readings_of_one_second_cost_one_look_at_the_job():
    times = iter([10.0, 10.0, 10.9, 11.0, 11.0])
    looks = []

    class Counted(Given):
        def collect(self):
            looks.append(1)
            return super().collect()

    page = MetricsPage(Counted(None, ()), lambda: next(times))
    for path, count in (("/metrics", 1), ("/", 1), ("/metrics", 2)):
        answer = page.answer(parse_request(f"GET {path} HTTP/1.1\r\nHost: a".encode()))
        assert answer.status == 200 and b"jaxrun_job_info{" in answer.content and len(looks) == count
        assert answer.kind.startswith("text/plain; version=0.0.4")
    assert page.answer(parse_request(b"GET /x HTTP/1.0")).status == 404
