"""Both ends of `generate` mean the same by it: what one writes the other reads."""

import asyncio
import json

import pytest

from elastic_scheduler import End, TurnJournal
from rose.client.errors import VersionNotServed
from rose.client.types import ClientTurn, ask_for
from rose.client.wire import decode_event, decode_turn, encode, message, refusal
from rose.contract.replica import Sampling
from rose.gateway.apis import VllmFrontend
from rose.gateway.apis.frontend import ApiRequest as GatewayAsk
from rose.gateway.errors import VersionUnavailable
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.token_stream import TokenStream

FRONTEND = VllmFrontend(ServedModel("rose-policy", 4_096), 4)
SAMPLING = Sampling(0.5, 0.9, 7, 64, 2, (9,), (8, 9), 11)
ASK = ask_for(
    (1, 100),
    SAMPLING,
    request_id="turn",
    session_id="s",
    min_version=3,
    priority=-2,
    group_id="g",
    group_size=4,
    hedges=1,
    job="j",
)


def read(ask: ClientTurn) -> GatewayAsk:
    return asyncio.run(FRONTEND.read(encode(ask.body), {"X-Session-ID": ask.session_id}))


def whole_feed() -> TokenStream:
    """Three tokens of two versions, from two replicas."""
    journal = TurnJournal([1, 100], 64, max_attempts=4)
    journal.append(journal.begin("a", "guest").number, [101, 102], [-0.5, -1.25], 3)
    journal.end(1, End.REVOKED)
    journal.append(journal.begin("b", "dedicated").number, [103], [-2.0], 4, 3)
    journal.end(2, End.FINISHED, "stop")
    return TokenStream(journal)


def test_the_gateway_reads_all_that_the_client_asks_for() -> None:
    asked = read(ASK)
    (turn,) = asked.turns
    assert (turn.request_id, turn.token_ids, turn.sampling) == ("turn", [1, 100], SAMPLING)
    assert (turn.min_version, turn.exact_version, turn.priority) == (3, None, -2)
    origin = turn.origin
    assert (origin.session, origin.group, origin.job) == ("s", "g", "j")
    assert (origin.group_size, origin.hedges) == (4, 1)
    assert turn.named
    assert not asked.stream


def test_the_client_reads_all_that_the_gateway_answers() -> None:
    answer, feed = read(ASK).answer, whole_feed()
    asyncio.run(answer.prepare([feed]))
    turn = decode_turn(answer.whole([feed]))
    assert (turn.request_id, turn.token_ids) == ("turn", (101, 102, 103))
    assert turn.logprobs == (-0.5, -1.25, -2.0)
    assert turn.versions == ((3, 0, 2), (4, 2, 3))
    assert turn.oldest_versions == ((3, 2, 3),)
    assert turn.segments == (("a", "guest", 0, 2), ("b", "dedicated", 2, 3))
    assert (turn.finish_reason, turn.attempts) == ("stop", 2)


def test_the_client_reads_all_that_the_gateway_streams() -> None:
    event = read(ASK).answer.part(0, whole_feed(), 1, 3)
    last = decode_event(event.removeprefix(b"data: ").strip())
    (choice,) = last.choices
    assert choice.token_ids == [102, 103]
    assert choice.logprobs is not None
    assert [each.logprob for each in choice.logprobs.content] == [-1.25, -2.0]
    spans = [(s.version, s.start, s.end, s.oldest_version) for s in last.versions]
    assert spans == [(3, 1, 2, None), (4, 2, 3, 3)]
    assert last.segments is not None
    assert [(s.replica, s.start, s.end) for s in last.segments] == [("a", 0, 2), ("b", 2, 3)]
    assert (choice.finish_reason, last.attempts) == ("stop", 2)


def test_the_client_reads_why_there_is_no_answer() -> None:
    error = VersionUnavailable("version 3 is over")
    body = FRONTEND.error(error)
    assert json.loads(body)["error"]["code"] == error.status == 409
    assert message(409, body) == "version 3 is over"
    in_a_stream = decode_event(FRONTEND.broken(error).split(b"\n\n")[0].removeprefix(b"data: "))
    assert in_a_stream.error is not None
    with pytest.raises(VersionNotServed, match="is over"):
        raise refusal(in_a_stream.error.code, in_a_stream.error.message)
