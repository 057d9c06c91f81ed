"""What hosts find out of each other: who can connect to whom, how far clocks are apart; certificates of ranks."""

import sys
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from simulation import HEAD_ADDRESS, JOB_ID, Simulation, make_registry, report

from jaxrun.controller.head import startup as startup_module
from jaxrun.controller.head.clock_offsets import ClockOffsets
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.startup import Startup
from jaxrun.errors import UnavailableError
from jaxrun.job_events.actions import RecordClock, SendToAgents
from jaxrun.protocol.agent_messages import ClockProbe, ClockReply, StartWorkers
from jaxrun.protocol.probe_messages import HostFacts, PeerResults, ProbePeers
from jaxrun.protocol.worker_messages import CoordinatorReady, Join, StartCoordinator


def startup(hosts, **wanted):
    """The start-up of a job with a rank on each of `hosts`, whose agents have all reported; and what it does next."""
    registry = make_registry(len(hosts), **wanted)
    start = Startup(dict.fromkeys(range(len(hosts)), "?"), Expected(len(hosts), "", "cpu", 1), registry)
    actions = [start.handle(report(rank, host, len(hosts))) for rank, host in enumerate(hosts)]
    assert actions[:-1] == [[] for _ in hosts[1:]]
    return start, actions[-1]


def tell_facts(start, rank, host):
    return start.handle(HostFacts(rank, 1.0, host, port=4000 + rank))


def probed(rank, errors=()):
    return PeerResults(rank, {}, dict(errors))


def started(actions):
    return [
        one.worker.rank
        for action in actions
        if isinstance(action.message, StartWorkers)
        for one in action.message.workers
    ]


def test_a_job_that_does_not_ask_starts_at_once_and_takes_no_facts():
    start, actions = startup(["h1", "h2"])
    assert started(actions) == [0, 1]
    assert tell_facts(start, 0, "h1") == [] and start.handle(probed(0)) == []


def test_the_first_agent_of_each_host_connects_to_the_others_once_all_have_reported():
    start, actions = startup(["h1", "h1", "h9"], probe_hosts=True)
    assert actions == []
    assert tell_facts(start, 2, "h9") == [] and tell_facts(start, 0, "h1") == []
    assert start.describe_progress(3) == "probing the network: 0 of 3 ranks after 3 s, waiting for ranks 0-2 (h1, h9)"
    (order,) = tell_facts(start, 1, "h1")
    addresses = {0: "10.0.0.1:4000", 2: "10.0.0.9:4002"}
    assert order == SendToAgents((0, 2), ProbePeers(addresses, {0: "h1", 2: "h9"}))
    assert start.handle(probed(2)) == []
    assert start.describe_progress(3).endswith("2 of 3 ranks after 3 s, waiting for rank 0 (h1)")
    assert started(start.handle(probed(0))) == [0, 1, 2]
    assert start.handle(probed(0)) == []


def test_one_host_has_nobody_to_connect_to():
    start, _ = startup(["h1", "h1"], probe_hosts=True)
    tell_facts(start, 0, "h1")
    assert started(tell_facts(start, 1, "h1")) == [0, 1]


def test_hosts_that_cannot_connect_start_nothing_once_all_have_probed():
    start, _ = startup(["h1", "h2"], probe_hosts=True)
    for rank, host in enumerate(("h1", "h2")):
        tell_facts(start, rank, host)
    assert start.handle(probed(0, {1: "timed out"})) == []
    with pytest.raises(UnavailableError, match="cannot all connect to each other"):
        start.handle(probed(1))


def test_the_address_of_the_heads_own_host_is_the_one_that_the_others_use():
    registry = make_registry(2, probe_hosts=True)
    start = Startup({0: "?", 1: "?"}, Expected(2, "", "cpu", 1), registry)
    start.handle(report(0, "h1", 2, address="127.0.0.1", head_address="127.0.0.1"))
    start.handle(report(1, "h2", 2))
    tell_facts(start, 0, "h1")
    (order,) = tell_facts(start, 1, "h2")
    assert order.message.addresses == {0: f"{HEAD_ADDRESS}:4000", 1: "10.0.0.2:4001"}


# ---- clocks

HOSTS = {0: "h1", 1: "h2", 2: "h2"}


class Network:
    """Answers the probes of ranks whose hosts' clocks are `ahead`; the ways take `there` and `back` seconds."""

    def __init__(self, ahead):
        self.ahead = ahead
        self.offsets = ClockOffsets(HOSTS, make_registry(3))
        self.now = 1000.0

    def probe(self, rank, *ways):
        """A round of probes, each with its ways; returns what the head wants logged."""
        actions = self.offsets.probe((rank,), self.now)
        for there, back in ways:
            assert actions == [SendToAgents((rank,), ClockProbe(self.now))]
            reply = ClockReply(rank, self.now, self.now + there + self.ahead[HOSTS[rank]])
            self.now += there + back
            actions = self.offsets.handle(reply, self.now)
        return actions


def test_the_shortest_round_trip_says_how_far_a_clock_is_off():
    network = Network({"h2": 5.0})
    assert network.offsets.offset(1, 0.0) is None
    logged = network.probe(1, (0.030, 0.001), (0.0004, 0.0002), (0.001, 0.02))
    found = network.offsets.offset(1, network.now - 0.021)
    assert found.offset_s == pytest.approx(-5.0, abs=0.0001001)
    assert abs(found.offset_s + 5.0) <= found.error_s == pytest.approx(0.0003)
    known = pytest.approx(found.offset_s, abs=1e-6), pytest.approx(0.0003, abs=3e-6)
    assert logged == [RecordClock(1, *known), RecordClock(2, *known)]
    assert network.offsets.offset(2, network.now) == found  # of the same host
    assert network.offsets.offset(0, network.now) is None


def test_each_host_is_asked_once_by_the_first_of_its_ranks_that_live():
    offsets = ClockOffsets(HOSTS, make_registry(3))
    assert offsets.probe((0, 1, 2), 5.0) == [SendToAgents((0, 1), ClockProbe(5.0))]
    assert offsets.probe((2,), 5.0) == [SendToAgents((2,), ClockProbe(5.0))]
    assert offsets.probe((), 5.0) == []
    shared = ClockOffsets(HOSTS, SimpleNamespace(agents={0: (0,), 1: (1, 2)}))  # one agent a host
    assert shared.probe((0, 2), 5.0) == [SendToAgents((0, 1), ClockProbe(5.0))]


def test_it_is_logged_again_only_if_it_is_another():
    network = Network({"h2": 5.0})
    assert network.probe(1, *[(0.001, 0.001)] * 3)
    assert not network.probe(2, *[(0.001, 0.003)] * 3)
    network.ahead["h2"] = 5.1
    network.now += 3600
    logged, _ = network.probe(1, *[(0.001, 0.001)] * 3)
    assert logged.offset_s == pytest.approx(-5.1, abs=1e-6)


def test_an_old_measurement_counts_less_than_a_fresh_one():
    network = Network({"h2": 0.0})
    network.probe(1, *[(0.0001, 0.0001)] * 3)
    error = network.offsets.offset(1, network.now).error_at(network.now)
    network.now += 300
    network.ahead["h2"] = 0.010  # the clock runs fast
    assert network.offsets.offset(1, network.now).error_at(network.now) > max(0.010, 10 * error)
    network.probe(1, *[(0.001, 0.001)] * 3)
    assert network.offsets.offset(1, network.now).offset_s == pytest.approx(-0.010)


# ---- certificates for the ranks of one attempt: who gets one, what is in it, and what is made of ranks without

PEERS = f"spiffe://jaxrun/{JOB_ID}/"
KEYS = [ec.generate_private_key(ec.SECP256R1()).public_key() for _ in range(3)]
PUBLIC = [key.public_bytes(Encoding.X962, PublicFormat.CompressedPoint).hex() for key in KEYS]


def with_keys(changes=()):
    """A job of three ranks on two hosts whose coordinator is ready, where the head has not refused it."""
    job = Simulation(3, hosts={0: "h1", 1: "h1", 2: "h2"})
    hellos = {f"r{rank}": {"public_key": key} for rank, key in enumerate(PUBLIC)}
    job.say_hello(**{**hellos, **dict(changes)})
    return job.handle(CoordinatorReady(0, "10.0.0.1:4711")).wait(1)


def given(job):
    """The certificate of each rank."""
    orders = {ranks: message for _, ranks, message in job.sent if isinstance(message, (StartCoordinator, Join))}
    return {rank: message.certificate for ranks, message in orders.items() for rank in ranks}


def test_each_rank_gets_a_certificate_for_its_own_key_that_names_it():
    found = given(with_keys())
    ca = x509.load_pem_x509_certificate(found[0].ca.encode())
    assert {(one.ca, one.peers) for one in found.values()} == {(found[0].ca, PEERS)}
    assert ca.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    for rank, key in enumerate(KEYS):
        own = x509.load_pem_x509_certificate(found[rank].chain.encode())
        own.verify_directly_issued_by(ca)
        assert own.public_key() == key
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [f"{PEERS}{rank}"]

    assert given(with_keys())[0].ca != found[0].ca  # which is that of one attempt


def test_where_a_rank_has_no_key_no_rank_gets_a_certificate(monkeypatch):
    assert given(with_keys({"r2": {}})) == dict.fromkeys(range(3))
    monkeypatch.delattr(startup_module, "CertificateAuthority")  # which is not made where nobody has a key
    assert given(with_keys({f"r{rank}": {} for rank in range(3)})) == dict.fromkeys(range(3))


@pytest.mark.parametrize("key", ["zz", "02", "02" + "ff" * 32, PUBLIC[0] * 2])
def test_a_value_that_is_not_a_key_is_refused(key):
    job = with_keys({"r1": {"public_key": key}})
    assert given(job) == {} and job.verdict.exit_code == 65
    assert "rank 1 sent an invalid key" in str(job.verdict)


def test_a_launcher_without_the_package_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    job = with_keys()
    assert given(job) == {} and job.verdict.exit_code == 69
    assert "pip install cryptography. Or give --coordinator-tls off" in str(job.verdict)
