"""Turns say their trajectory, group, job and trace: lengths are forecast by the names, and a trace
goes to the replica and back.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict

from rose.client import RolloutClient, Sampling
from rose.tracing import NO_SPANS, TraceContext, parsed, spans_of, trace_of
from tests.harness.spans import otel
from tests.unit.gateway.gateway_cases import base_url, failing_over, serving
from tests.unit.gateway.wire_cases import GENERATE_ROUTES, VLLM, ask, body_of, stream, vllm_body

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{PARENT}-01"


# ---- the header ----


def test_a_context_is_what_the_specification_says() -> None:
    assert parsed(SAMPLED, "a=1") == TraceContext(TRACE, PARENT, sampled=True, state="a=1")
    unsampled = parsed(f"00-{TRACE}-{PARENT}-00")
    assert unsampled is not None
    assert not unsampled.sampled
    later = parsed(f"cc-{TRACE}-{PARENT}-03-what-comes-next")
    assert later is not None
    assert later.traceparent == SAMPLED, "it is handed on in the version that is known here"


@pytest.mark.parametrize(
    "said",
    [
        "",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01-more",
        f"cc-{TRACE}-{PARENT}-01more",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE[:-1]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}-01\r\nX: y",
        f"cc-{TRACE}-{PARENT}-01-" + "x" * 300,
    ],
)
def test_what_is_malformed_is_ignored_with_its_state(said: str) -> None:
    assert parsed(said, "a=1") is None


def header(max_bytes: int) -> st.SearchStrategy[str]:
    """Text of a header as the server decodes its bytes."""
    return st.binary(max_size=max_bytes).map(lambda raw: raw.decode("utf-8", "surrogateescape"))


@settings(max_examples=50)
@given(header(80), header(600))
def test_whatever_comes_is_handed_on_as_one_clean_header_or_not_at_all(
    parent: str, state: str
) -> None:
    assert parsed(parent) is None or len(parent) >= len(SAMPLED)
    context = parsed(SAMPLED, state)
    assert context is not None
    head = context.head()
    assert head.count(b"\r\n") == 1 + bool(context.state)
    assert len(head) < 700


def test_two_headers_are_none() -> None:
    twice = CIMultiDict([("traceparent", SAMPLED), ("traceparent", SAMPLED)])
    assert trace_of(twice) is None
    assert trace_of(CIMultiDict(Traceparent=SAMPLED)) is not None


# ---- on its way ----


@pytest.mark.parametrize("path", GENERATE_ROUTES)
async def test_a_trace_reaches_the_replica_and_comes_back(path: str) -> None:
    async with serving() as (replica, _, session):
        for body in (body_of(path), {**body_of(path), "stream": True}):
            headers = {"traceparent": SAMPLED}
            async with session.post(path, json=body, headers=headers) as answer:
                assert answer.status == 200
                assert answer.headers["traceparent"] == SAMPLED
                await answer.read()
    assert replica.traces == [SAMPLED, SAMPLED]


async def test_a_turn_without_a_valid_trace_is_a_turn_without_one() -> None:
    async with serving() as (replica, _, session):
        for headers in ({}, {"traceparent": "00-zz"}, {"tracestate": "a=1"}):
            async with session.post(VLLM, json=vllm_body(3), headers=headers) as answer:
                assert answer.status == 200
                assert "traceparent" not in answer.headers
    assert replica.traces == [None] * 3


async def test_each_attempt_is_of_the_trace_and_the_log_has_the_turn(tmp_path: Path) -> None:
    async with failing_over(log_dir=tmp_path) as (guest, own, gw, session):
        guest.revoke_after = 1
        for trace in (SAMPLED, SAMPLED[:-1] + "0"):
            headers = {"traceparent": trace}
            assert (await ask(session, VLLM, vllm_body(3), headers=headers))[0] == 200
        assert gw.flush_logs()
    assert guest.traces[0] == own.traces[0] == SAMPLED
    lines = (tmp_path / "events-gateway.jsonl").read_text().splitlines()
    [said] = [line for line in lines if '"turn_traced"' in line]
    assert f'"trace_id":"{TRACE}"' in said
    assert '"replicas":["guest-0","own-0"]' in said


async def test_a_turn_that_is_sent_again_is_the_same_in_another_trace() -> None:
    body = {**vllm_body(3), "request_id": "r"}
    async with serving() as (replica, _, session):
        first = await ask(session, VLLM, body, headers={"traceparent": SAMPLED})
        again = SAMPLED.replace(PARENT, "1" * 16)
        second = await ask(session, VLLM, body, headers={"traceparent": again})
        assert (first[0], second[0]) == (200, 200)
    assert replica.traces == [SAMPLED]


async def test_the_client_names_a_trace_and_learns_it() -> None:
    async with serving() as (replica, gw, _), RolloutClient(base_url(gw)) as client:
        turn = await client.generate([1, 2], Sampling(max_tokens=3), traceparent=SAMPLED)
        assert turn.trace_id == TRACE
        async with client.stream([1, 2], Sampling(max_tokens=3), traceparent=SAMPLED) as parts:
            async for _ in parts:
                pass
        assert parts.turn.trace_id == TRACE
        assert (await client.generate([1, 2], Sampling(max_tokens=3))).trace_id == ""
    assert replica.traces == [SAMPLED, SAMPLED, None]


# ---- spans ----


async def test_spans_of_turn_and_attempts_stand_between_caller_and_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spans, _, exporter = otel()
    monkeypatch.setattr("rose.gateway.app.spans_of", lambda _: spans)
    async with serving() as (replica, _, session):
        headers = {"traceparent": SAMPLED}
        assert (await stream(session, VLLM, vllm_body(3), headers=headers))[0] == 200
    attempt, turn = exporter.get_finished_spans()
    assert (attempt.name, turn.name) == ("rose attempt", "rose turn")
    assert turn.parent.span_id == int(PARENT, 16)
    assert attempt.parent.span_id == turn.context.span_id
    assert turn.attributes["rose.tokens"] == 3
    assert attempt.attributes["rose.replica"] == "guest-0"
    assert replica.traces == [f"00-{TRACE}-{attempt.context.span_id:016x}-01"]


async def test_the_clients_own_span_is_the_parent() -> None:
    _, tracer, _ = otel()
    async with serving() as (replica, gw, _), RolloutClient(base_url(gw)) as client:
        with tracer.start_as_current_span("rollout") as span:
            made = span.get_span_context()
            turn = await client.generate([1, 2], Sampling(max_tokens=3))
    assert turn.trace_id == f"{made.trace_id:032x}"
    assert replica.traces == [f"00-{made.trace_id:032x}-{made.span_id:016x}-01"]


def test_without_a_collector_there_are_no_spans_and_nothing_is_imported() -> None:
    said = (
        "import sys; from rose.tracing import NO_SPANS, current_trace, spans_of\n"
        "assert spans_of('x') is NO_SPANS and current_trace() is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", said], check=True, env={"PATH": ""}, timeout=60)
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}
    assert spans_of("x", asked) is NO_SPANS


# ---- names ----

NAMES = {"session_id": "s", "group_id": "g", "job": "j"}
HEADERS = {"X-Session-ID": "s", "X-Group-ID": "g", "X-Rose-Job": "j"}


def needs(gateway: Any) -> list[Any]:
    """Record the router's need of each turn that begins from now on."""
    seen: list[Any] = []
    router = gateway.dispatcher.jobs.of("")
    begin = router.begin

    def noting(replica: str, need: Any, now_s: float) -> Any:
        seen.append(need)
        return begin(replica, need, now_s)

    router.begin = noting
    return seen


@pytest.mark.parametrize("path", GENERATE_ROUTES)
async def test_body_and_headers_name_the_same_on_every_route(path: str) -> None:
    async with serving() as (_, gw, session):
        seen = needs(gw)
        assert (await ask(session, path, {**body_of(path, 9), **NAMES}))[0] == 200
        assert (await ask(session, path, body_of(path, 9), headers=HEADERS))[0] == 200
        other = dict.fromkeys(NAMES, "other")
        assert (await stream(session, path, {**body_of(path, 9), **other}, headers=HEADERS))[
            0
        ] == 200
        assert (await ask(session, path, body_of(path, 9)))[0] == 200
    named = [(need.session, need.group, need.job) for need in seen]
    assert named == [("s", "g", "j")] * 3 + [("", "", "")]


async def test_the_lengths_of_some_members_forecast_the_others() -> None:
    async with serving() as (replica, gw, session):
        replica.stop_after = 5
        for name in ("a", "b", "c"):
            body = vllm_body(900, request_id=name, group_id="g", job="j")
            assert (await ask(session, VLLM, body))[0] == 200
        for group in ("g", "h"):
            body = vllm_body(900, request_id=group, group_id=group, job="j")
            assert (await ask(session, VLLM, body))[0] == 200
        expected = {
            group: gw.dispatcher.jobs.of("").explained(group)[0].expected_tokens
            for group in ("a", "g", "h")
        }
    assert expected == {"a": 900, "g": 5, "h": 900}


async def test_the_client_sends_groups_and_jobs_of_turns_sessions_and_groups() -> None:
    two = Sampling(max_tokens=2)
    async with serving() as (_, gw, _), RolloutClient(base_url(gw)) as client:
        seen = needs(gw)
        async with client.gather_group([1, 5], two, 2, group_id="g", job="j") as group:
            assert [member.error async for member in group] == [None, None]
        async with client.session("s", group_id="g") as session:
            await session.generate([1, 5], two, job="j")
            async with session.stream([1, 5], two) as turn:
                assert [chunk async for chunk in turn]
        await client.generate([1, 5], two)
    named = [(need.session, need.group, need.job) for need in seen]
    assert sorted(named[:2]) == [("g/0", "g", "j"), ("g/1", "g", "j")]
    assert named[2:4] == [("s", "g", "j"), ("s", "g", "")]
    assert named[4][1:] == ("", "")
