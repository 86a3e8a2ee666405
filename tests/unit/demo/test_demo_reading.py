import pytest

from bench.load.protocol import ClientRequest, HostLatency, join_requests


def client_request(name: str, status: str = "ok") -> ClientRequest:
    return ClientRequest(name, 1, "leased", 1, 0.5, 10.5, 0.1, 0.5, 5, status)


def host_latency(name: str) -> HostLatency:
    return HostLatency(name, 11.0, 0.02, 0.01, 0.3, 40, 5)


@pytest.mark.parametrize(
    "engine_id", ["b1s1n7", "cmpl-b1s1n7", "cmpl-b1s1n7-0", "cmpl-b1s1n7-0-9f"]
)
def test_the_hosts_figures_win_whatever_the_engine_added_to_the_id(engine_id: str) -> None:
    (joined,) = join_requests([client_request("b1s1n7")], [host_latency(engine_id)])
    assert (joined.source, joined.ttft_s, joined.tpot_s) == ("host_plugin", 0.02, 0.01)
    assert joined.prompt_tokens == 40


def test_a_request_the_host_did_not_measure_keeps_its_senders_figures() -> None:
    (joined,) = join_requests([client_request("b1s1n7")], [host_latency("cmpl-b1s1n71-0")])
    assert (joined.source, joined.ttft_s) == ("client", 0.1)
    assert joined.tpot_s == pytest.approx(0.1)
