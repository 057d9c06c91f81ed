"""What ranks of a simulated job do with live_devices, and what the head sends to them."""

from jaxrun.protocol.agent_messages import WorkerSpawned
from jaxrun.protocol.survivor_messages import LiveRanks, LiveRanksAsked

ALL = (0, 1, 2, 3)


def sent(job, kind, rank):
    return [message for _, ranks, message in job.sent if isinstance(message, kind) and rank in ranks]


def asks(job, *ranks, about=ALL):
    return job.handle(*(LiveRanksAsked(rank, about, 1) for rank in ranks))


def answer(job):
    """The last answer of live_devices: who has got it, and the incarnations."""
    found = [(ranks, dict(message.incarnations)) for _, ranks, message in job.sent if isinstance(message, LiveRanks)]
    return found[-1] if found else None


def start_again(job, rank):
    """What the rank does from the order to start it until its program runs."""
    job.handle(WorkerSpawned(rank, 2000 + rank), job.hello(rank, pid=2000 + rank), job.device_report(rank))
