from argparse import Namespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from asgi_client import AsgiExchange, exchange, settle
from fake_async_llm import FakeAsyncLLM
from fastapi import FastAPI

from rose.replica.endpoint import ReplicaEndpoint
from rose.replica.shortcut import GenerateShortcut
from rose.replica.weights import ActivationError
from weight_transfer import WeightError, WrongBaseError

TURN = {"request_id": "r", "token_ids": [1], "sampling": {"max_tokens": 8}}
REPORT = {"version": 4, "digest_ok": True, "probe_ok": True}


class Replica:
    def __init__(self) -> None:
        self.engine = FakeAsyncLLM()
        self.endpoint = ReplicaEndpoint()
        self.app = FastAPI()
        self.endpoint.attach_router(self.app)

    async def start(self) -> "Replica":
        await self.endpoint.init_state(self.engine, self.app.state, Namespace(model="model"))
        return self

    def begin(self, path: str, body: object, method: str = "POST") -> AsgiExchange:
        return exchange(self.app, f"/rose/v1/{path}", body, method)

    async def ask(self, path: str, body: object, method: str = "POST") -> tuple[int, Any]:
        answer = await self.begin(path, body, method).done()
        return answer.status, answer.json

    async def state(self) -> dict[str, Any]:
        status, state = await self.ask("state", b"", "GET")
        assert status == 200
        return dict(state)


@pytest.fixture
async def replica(monkeypatch: pytest.MonkeyPatch) -> Replica:
    monkeypatch.setenv("ROSE_ROLE", "dedicated")
    monkeypatch.setenv("ROSE_REPLICA_ID", "d0")
    return await Replica().start()


def fail_apply(replica: Replica, monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    async def apply(manifest: str, chunks: str, on_update: str) -> Any:
        assert on_update == "recompute"
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(replica.endpoint._weights, "apply", apply)


@pytest.mark.parametrize("role", [None, "host"])
def test_the_plugin_is_inert_outside_a_replica(
    monkeypatch: pytest.MonkeyPatch, role: str | None
) -> None:
    if role is None:
        monkeypatch.delenv("ROSE_ROLE", raising=False)
    else:
        monkeypatch.setenv("ROSE_ROLE", role)
    app = FastAPI()
    before = len(app.router.routes)
    ReplicaEndpoint().attach_router(app)
    assert len(app.router.routes) == before


async def test_a_lease_opens_a_drain_closes_and_an_old_lease_does_nothing(
    replica: Replica,
) -> None:
    assert (await replica.ask("generate", TURN))[0] == 503
    assert (await replica.ask("admit", {"epoch": 5}))[0] == 200
    turn = replica.begin("generate", TURN)
    await settle()
    replica.engine.step()
    await settle()
    assert await replica.state() == {
        "replica_id": "d0",
        "role": "dedicated",
        "policy_version": 0,
        "admitting": True,
        "epoch": 5,
        "running": 1,
        "waiting": 0,
        "tokens_total": 1,
        "kv_tokens": 128,
        "warm": True,
        "warm_up": {"failed": False, "said": "no warm-up was asked for"},
    }
    assert (await replica.ask("drain", {"epoch": 4, "reason": "old"}))[0] == 409
    assert (await replica.ask("admit", {"epoch": 4}))[0] == 409
    assert await replica.ask("drain", {"epoch": 5, "reason": "busy"}) == (200, {"aborted": 1})
    assert (await turn.done()).lines[-1] == {"finish_reason": "revoked"}
    assert not (await replica.state())["admitting"]
    assert (await replica.ask("drain", {"reason": 1}))[0] == 400


@pytest.mark.parametrize(
    ("outcome", "status", "still_admitting"),
    [
        (REPORT, 200, True),
        (WrongBaseError("based on 7"), 409, True),
        (WeightError("a chunk is damaged"), 422, True),
        (REPORT | {"probe_ok": False}, 422, False),
        (REPORT | {"digest_ok": False}, 422, False),
        (ActivationError("broke off"), 422, False),
    ],
)
async def test_unproven_weights_close_the_replica_and_nothing_else_does(
    replica: Replica,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Any,
    status: int,
    still_admitting: bool,
) -> None:
    await replica.ask("admit", {"epoch": 1})
    fail_apply(replica, monkeypatch, outcome)
    assert (await replica.ask("weights/apply", {"manifest": "m", "chunks": "c"}))[0] == status
    assert (await replica.state())["admitting"] is still_admitting
    assert (await replica.ask("admit", {"epoch": 2}))[0] == (200 if still_admitting else 409)


@pytest.mark.parametrize(
    ("outcome", "status", "still_admitting"),
    [
        ({"flipped": []}, 200, True),
        ({"flipped": ["lm_head.weight"]}, 422, False),
        (WeightError("versions change too fast"), 503, True),
    ],
)
async def test_a_flipped_weight_closes_the_replica(
    replica: Replica,
    monkeypatch: pytest.MonkeyPatch,
    outcome: Any,
    status: int,
    still_admitting: bool,
) -> None:
    async def audit() -> Any:
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(replica.endpoint._weights, "audit", audit)
    await replica.ask("admit", {"epoch": 1})
    assert (await replica.ask("weights/audit", b""))[0] == status
    assert (await replica.state())["admitting"] is still_admitting


async def test_an_unknown_way_to_update_is_refused(replica: Replica) -> None:
    body = {"manifest": "m", "chunks": "c", "on_update": "whenever"}
    assert (await replica.ask("weights/apply", body))[0] == 400


@pytest.mark.parametrize("shortcut", [False, True])
async def test_a_turn_passes_the_servers_middleware_only_with_the_shortcut(
    replica: Replica, shortcut: bool
) -> None:
    seen: list[str] = []

    class FakeMetrics:
        def __init__(self, app: Any) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["path"])
            await self._app(scope, receive, send)

    replica.app.add_middleware(FakeMetrics)
    if shortcut:
        replica.app.add_middleware(GenerateShortcut)
    assert (await replica.ask("generate", TURN))[0] == 503, "served by the endpoint either way"
    assert (await replica.ask("admit", {"epoch": 1}))[0] == 200
    turn = ["/rose/v1/generate"] if not shortcut else []
    assert seen == [*turn, "/rose/v1/admit"]
