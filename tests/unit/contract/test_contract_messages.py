"""Every message of `rose.contract` is on the wire as its golden file has it.

A file that differs is a change of the contract: of both ends, and of docs/architecture.md.
"""

import inspect
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastic_scheduler import Segment
from rose.contract import gateway, replica, weights
from weight_transfer import OnUpdate
from weight_transfer.fetch import publisher_client

HERE = Path(__file__).parent
SCHEMA = replica.StructuredOutputs(json='{"type":"object"}', disable_any_whitespace=True)
SAMPLING = replica.Sampling(
    0.5, 0.9, 7, 64, 2, (9,), (8, 9), 11, 0.05, 1.1, 0.25, -0.5, True, 1, SCHEMA, 1, 0
)
DIGEST = "0123456789abcdef" * 4
SPAN = gateway.Version(3, 0, 2)
OLD_KV = gateway.Version(4, 2, 3, 3)
SEGMENT = Segment("n1/g0", "guest", 0, 3)
LOGPROBS = gateway.Logprobs([gateway.TokenLogprob(-0.5), gateway.TokenLogprob(-1.25)])
ROUTES = replica.RoutedExperts(2, 1, 1, b"\x05\x06")
TOP = gateway.TopLogprobs(1, b"\x01" * 16)
FAULT = gateway.GatewayFault("no replica was free", "ServiceUnavailableError", None, 503)
CHOOSING = gateway.Choosing(1.5, "turn", None, "all are full", 9, True, (("n1/g0", 0.5),))
ORIGIN: dict[str, Any] = {"group_id": "g", "job": "j", "group_size": 4, "hedges": 1}

SERVED = gateway.ReplicaVersion("n1/g0", "guest", "j", 6, gateway.SYNCING)

TRAJECTORY = gateway.SessionTrajectory(
    (5, 6, 7),
    (0, 1, 1),
    (0.0, -0.5, -0.25),
    (gateway.Version(7, 1, 3),),
    (gateway.TrajectoryTurn("chatcmpl-a", 1, 3, "stop"),),
    0,
)
MESSAGES: tuple[msgspec.Struct, ...] = (
    SCHEMA,
    SAMPLING,
    replica.GenerateBody("turn.1f.1", [1, 100], SAMPLING, "7", -2, "j", (DIGEST,)),
    replica.ImageHeld(DIGEST),
    replica.StreamLine(
        [101, 102],
        [-0.5, -1.25],
        3,
        2,
        "stop",
        "a message",
        [None, [(7, -0.5, 1), (9, -2.0, None)]],
        b"\x01" * 16,
        ROUTES,
        [1, 100],
    ),
    ROUTES,
    replica.BatchBody("b1", [replica.GenerateBody("turn.1f.1", [1, 100])]),
    replica.BatchLine(3, replica.StreamLine(message="no turns of k here"), 503),
    replica.LeaveBody("b1", [0, 3]),
    replica.Left(),
    replica.Fault("draining", "no turns now"),
    replica.Refusal(replica.Fault("draining", "no turns now")),
    replica.EpochBody(5, "lease lost", "j", latest=0, offer=1),
    replica.Drained(2),
    replica.Admitted(),
    weights.ApplyBody("/c", "/m/1", ["/m/1", "/m/2"], OnUpdate.KEEP),
    weights.UpdateApplied(
        version=2,
        tensors=3,
        changed_elements=40,
        wire_bytes=90,
        stage_s=0.5,
        pause_s=0.25,
        apply_s=0.125,
        probe_s=0.0625,
        loose=1,
        on_update=OnUpdate.FINISH_OLD,
        finished_old=True,
        digest_ok=True,
        probe_ok=True,
        probe_max_abs_diff=0.0,
    ),
    weights.Unproven(replica.Fault("unproven", "version 2 broke off")),
    weights.Audited(2, ["lm_head.weight"], ["norm.weight"], 40, 0.5),
    replica.WarmUpState(failed=True, said="warm-up begins"),
    replica.ReplicaState(
        replica_id="n1/g0",
        role="guest",
        policy_version=2,
        proven=True,
        admitting=True,
        epoch=5,
        running=1,
        waiting=2,
        tokens_total=300,
        kv_tokens=4096,
        warm=True,
        warm_up=replica.WarmUpState(said="warm after 4 sizes"),
        job="j",
        adapters={"j": 2},
    ),
    gateway.TurnFields(
        session_id="s",
        stream=True,
        min_version=1,
        exact_version=2,
        timeout_s=1.5,
        resume_from=3,
        routed_experts=True,
        **ORIGIN,
    ),
    TOP,
    gateway.GatewayGenerateBody(
        request_id="turn",
        token_ids=(1, 100),
        sampling_params=SAMPLING,
        priority=-2,
        return_token_ids=True,
        images=(gateway.ImageName(DIGEST), b"bytes"),
        **ORIGIN,
    ),
    gateway.ImageName(DIGEST),
    SPAN,
    LOGPROBS.content[0],
    LOGPROBS,
    gateway.Choice((101, 102), LOGPROBS, "length", TOP, b"npy"),
    gateway.TurnAnswer(
        request_id="turn",
        choices=[gateway.Choice((101, 102), LOGPROBS, "length", TOP, b"npy")],
        versions=[SPAN],
        segments=(SEGMENT,),
        attempts=2,
        prompt_token_ids=(1, 100),
    ),
    gateway.StreamChoice([101, 102], LOGPROBS, "length", TOP, b"npy"),
    FAULT,
    gateway.GatewayRefusal(FAULT),
    gateway.StreamEvent(
        [gateway.StreamChoice([101, 102], LOGPROBS)], [SPAN, OLD_KV], (SEGMENT,), 2, FAULT, (1, 100)
    ),
    gateway.NamesBody(["a", "b"], "c", "s", "j"),
    gateway.Aborted(["a"]),
    gateway.SessionFinished("s", 2),
    gateway.TrajectoryPlace(1, 2, 30, "edited"),
    TRAJECTORY.turns[0],
    TRAJECTORY,
    gateway.SessionTokens("s", (TRAJECTORY,)),
    gateway.GatewayCounters({"n1/g0": 9}, {"n1/g0": 1}, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0.5, 0.25),
    CHOOSING,
    gateway.Explanation("s", [CHOOSING]),
    SERVED,
    gateway.JobVersion("j", 7),
    gateway.Versions((gateway.JobVersion("j", 7),), (SERVED,)),
    gateway.GatewayHealthReport("degraded", ("no tokenizer",), 1, 2, {"e0": "vllm"}),
    publisher_client.CatalogPayload("j", 60.0, ((0, 900),), ((1, 0, 90), (2, 1, 80))),
    publisher_client.LeaseBody("n1/g0", 1, 60.0),
    publisher_client.LeaseGranted(60.0),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_is_written_and_read_as_its_golden_file_has_it(message: msgspec.Struct) -> None:
    kind = type(message)
    role = kind.__module__.rpartition(".")[2]
    golden = (HERE / f"{role}.{kind.__name__}.json").read_bytes().strip()
    assert msgspec.json.encode(message) == golden
    assert msgspec.json.decode(golden, type=kind) == message


def test_every_message_has_a_golden_file() -> None:
    declared = {
        kind
        for module in (replica, gateway, weights, publisher_client)
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    }
    assert declared == {type(message) for message in MESSAGES}
    assert len(list(HERE.glob("*.json"))) == len(MESSAGES)


def test_what_is_at_its_default_is_left_out_of_a_stream() -> None:
    lines = [replica.StreamLine([5], [-0.5], 0), replica.StreamLine(finish_reason="stop")]
    assert [*map(msgspec.json.encode, lines)] == [
        b'{"token_ids":[5],"logprobs":[-0.5],"version":0}',
        b'{"finish_reason":"stop"}',
    ]


@pytest.mark.parametrize(
    ("kind", "bad"),
    [
        (replica.StreamLine, b'{"token_ids":[2147483648],"logprobs":[0.0],"version":1}'),
        (replica.StreamLine, b'{"token_ids":[1],"logprobs":[0.5],"version":1}'),
        (replica.GenerateBody, b'{"request_id":"r","token_ids":[4294967296]}'),
        (replica.GenerateBody, b'{"request_id":"r","token_ids":[1],"sampling":{"top_k":1e99}}'),
        (replica.EpochBody, b'{"epoch":-1}'),
        (replica.ReplicaState, b'{"policy_version":0,"admitting":true,"epoch":0}'),
        (publisher_client.LeaseBody, b'{"reader":"r","version":-1,"ttl_s":1.0}'),
        (
            publisher_client.CatalogPayload,
            b'{"job":"j","expires_s":1.0,"bases":[],"deltas":[],"more":1}',
        ),
    ],
)
def test_what_is_beyond_a_limit_is_refused(kind: type[msgspec.Struct], bad: bytes) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(bad, type=kind)
