"""A real host and a real guest on one control page: published, gated, frozen, orphaned."""

import http.client
import json
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from engine_specs import GUEST, HOST
from pool import Started
from standin_node import StandInNode
from vllm_versions import VERSIONS

from executor import ControlPage, GateLimits, GrantMode, GuestState, LatencyRecord
from tests.harness.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.engines(HOST, GUEST, versions=VERSIONS, spends=True),
    pytest.mark.timeout(600),
]

log = logging.getLogger(__name__)
WATCHED_NS = 200_000_000
# Beyond one step: what a shared core may keep a process waiting.
LATE_MS = 250.0


def complete(
    engine: Started, request_id: str, max_tokens: int, timeout_s: float = 60, shift: int = 0
) -> dict[str, object]:
    """Ask an engine as its own clients do."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.spec.port, timeout=timeout_s)
    body = {
        "model": engine.spec.name,
        "prompt": [(i * 7 + shift) % 96 for i in range(40)],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "detokenize": False,
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id, **engine.headers}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
    finally:
        connection.close()
    assert response.status == 200, answer
    return dict(answer)


@dataclass
class HostAndGuest:
    host: Started
    guest: Started

    @property
    def page(self) -> ControlPage:
        return self.host.control

    @property
    def node(self) -> StandInNode:
        return self.guest.node

    def guest_state(self) -> GuestState:
        """A guest behind everybody else may lose its core in the middle of a write."""
        until(lambda: self.page.guest.peek() is not None, 5.0, "the guest's section is whole")
        state = self.page.guest.peek()
        return state if state is not None else self.guest_state()

    def frozen(self) -> None:
        """Freeze the guest, which has nothing to do; returns once no step of it can begin."""
        self.node.mode = GrantMode.FREEZE

        def granted() -> bool:
            return (grant := self.page.grant.peek()) is not None and grant.mode == GrantMode.FREEZE

        until(granted, 5.0, "the grant is to freeze")


@pytest.fixture(scope="module")
def pair(engines: list[Started]) -> HostAndGuest:
    host, guest = engines
    return HostAndGuest(host, guest)


@pytest.fixture(autouse=True)
def granted_anew(pair: HostAndGuest) -> Iterator[None]:
    yield
    pair.node.reset()


def test_host_section_follows_the_host_and_ends_idle(pair: HostAndGuest) -> None:
    before = pair.page.host.read()
    assert before is not None, "the host publishes itself before its first request"
    assert before.idle
    busy_seen = 0
    asking = threading.Thread(target=complete, args=(pair.host, "watched", 60))
    asking.start()
    while asking.is_alive():
        state = pair.page.host.peek()
        if state is not None and not state.idle:
            busy_seen += 1
            assert state.running + state.waiting >= 1
        time.sleep(0.001)
    after = pair.page.host.read()
    assert busy_seen > 5
    assert after is not None
    assert after.idle
    assert after.step_seq >= before.step_seq + 60
    assert after.busy_ns > before.busy_ns
    assert after.queued_prefill_tokens == 0
    assert after.earliest_prefill_deadline_ns == after.earliest_decode_deadline_ns == 0
    assert after.kv_total > 0


def test_latencies_arrive_under_the_clients_request_id(pair: HostAndGuest) -> None:
    cursor = pair.page.latency.cursor
    sent_s: dict[str, float] = {}
    for name in ("load-1-0001", "5d0f1c9e-0a52-4f6e-9d6a-0123456789ab"):
        began_s = time.monotonic()
        complete(pair.host, name, 20)
        sent_s[name] = time.monotonic() - began_s
    records: dict[str, LatencyRecord] = {}

    def all_arrived() -> bool:
        records.update({r.request_id: r for r in pair.page.latency.drain(cursor).records})
        return sent_s.keys() <= records.keys()

    until(all_arrived, 10.0, f"records of {list(sent_s)}, have {list(records)}")
    for name, client_e2e_s in sent_s.items():
        record = records[name]
        assert (record.prompt_tokens, record.output_tokens) == (40, 20)
        assert 0 < record.ttft_ns < record.e2e_ns <= client_e2e_s * 1e9
        assert record.tpot_ns == pytest.approx((record.e2e_ns - record.ttft_ns) / 19, rel=0.01)


def test_no_token_while_frozen_and_on_it_goes_after(pair: HostAndGuest) -> None:
    pair.frozen()
    before = pair.guest_state()
    answers: list[dict[str, object]] = []
    asking = threading.Thread(target=lambda: answers.append(complete(pair.guest, "frozen", 30)))
    asking.start()

    def held_back() -> bool:
        return pair.guest_state().yielded_ns - before.yielded_ns > 0.8e9

    until(held_back, 20.0, "the request waits in the guest, and yields")
    frozen = pair.guest_state()
    assert frozen.waiting == 1
    assert frozen.gate_reason == "frozen"
    assert (frozen.tokens_total, frozen.step_seq) == (before.tokens_total, before.step_seq)
    until(lambda: pair.guest_state().heartbeat_ns > frozen.heartbeat_ns, 5.0, "it beats on")
    pair.node.mode = GrantMode.RUN
    asking.join(20)
    assert answers, "the guest goes on once it may run"
    assert pair.guest_state().tokens_total == before.tokens_total + 30


def test_guest_aborts_go_through_while_frozen(pair: HostAndGuest) -> None:
    pair.frozen()
    with pytest.raises(TimeoutError):
        complete(pair.guest, "given-up", 30, timeout_s=0.5)
    until(lambda: pair.guest_state().waiting == 0, 5.0, "the client that left is gone")


def granted_share(pair: HostAndGuest) -> float | None:
    return grant.slack_share if (grant := pair.page.grant.peek()) is not None else None


def guest_tokens_while_host_is_busy(pair: HostAndGuest, slack_share: float) -> int:
    pair.node.slack_share = slack_share
    until(lambda: granted_share(pair) == slack_share, 5.0, "the grant has this share")
    begun = last = pair.guest_state().tokens_total
    serving = threading.Thread(target=complete, args=(pair.host, "serving", 450))
    serving.start()
    until(lambda: (host := pair.page.host.peek()) and not host.idle, 5.0, "the host serves")
    rolling = threading.Thread(target=complete, args=(pair.guest, "rolling", 100))
    rolling.start()
    while serving.is_alive():
        tokens = pair.guest_state().tokens_total
        host = pair.page.host.peek()
        if host is not None and not host.idle:
            last = tokens
        time.sleep(0.001)
    serving.join()
    rolling.join(20)
    assert not rolling.is_alive()
    return last - begun


def test_a_busy_host_lends_its_slack_only_when_told_to(pair: HostAndGuest) -> None:
    assert guest_tokens_while_host_is_busy(pair, slack_share=0.0) == 0
    # The machine decides how many fit (`make bench-coserve`), the switch that some do: on a machine
    # with other work not in each answer of the host.
    lent = 0
    for _ in range(5):
        lent = lent or guest_tokens_while_host_is_busy(pair, slack_share=1.0)
    log.info("%d of 100 guest tokens came while the host was busy", lent)
    assert lent > 0


@pytest.mark.parametrize(("ttl_s", "reason"), [(0.2, "grant_expired"), (0.5, "heartbeat_stale")])
def test_silence_freezes_within_one_step_and_a_grant_revives(
    pair: HostAndGuest, ttl_s: float, reason: str
) -> None:
    waits_ms, longest_step_ms = [], 0.0
    pair.node.ttl_s = ttl_s
    for trial in range(4):
        until(lambda: not pair.guest_state().running, 5.0, "the guest has nothing to do")
        yielded_before_ns = pair.guest_state().yielded_ns
        asking = threading.Thread(
            target=complete, args=(pair.guest, f"silent-{trial}", 450), kwargs={"shift": trial}
        )
        asking.start()
        until(lambda: pair.guest_state().running == 1, 5.0, "the guest runs")
        pair.node.silence()
        grant = pair.page.grant.read()
        assert grant is not None
        due_ns = min(grant.expiry_ns, grant.heartbeat_ns + GateLimits().grant_stale_ns)
        until(lambda: pair.guest_state().gate_reason != "ok", 10.0, "the guest yields")
        yielding = pair.guest_state()
        while (state := pair.guest_state()).heartbeat_ns < yielding.heartbeat_ns + WATCHED_NS:
            assert state.tokens_total == yielding.tokens_total, "silence lets no token through"
            time.sleep(0.001)
        first_yield_ns = state.heartbeat_ns - (state.yielded_ns - yielded_before_ns)
        waits_ms.append(round((first_yield_ns - due_ns) / 1e6, 1))
        longest_step_ms = max(longest_step_ms, state.last_step_ns / 1e6)
        pair.node.mode = GrantMode.RUN
        asking.join(30)
        assert not asking.is_alive()
    log.info("%s: step %.1f ms, first yield late by %s ms", reason, longest_step_ms, waits_ms)
    assert min(waits_ms) >= 0
    assert max(waits_ms) < longest_step_ms + LATE_MS


def test_an_orphaned_guest_ends_itself_and_the_host_serves_on(pair: HostAndGuest) -> None:
    pair.guest.spend("it ends itself")
    pair.node.mode = None
    took_s = until(lambda: pair.guest.ended, pair.guest.spec.orphan_s + 20, "the guest has ended")
    log.info("orphaned guest gone in %.1f s", took_s)
    assert "guest ends itself: orphaned" in pair.guest.spec.log.read_text()
    assert complete(pair.host, "still-there", 5)["choices"]
