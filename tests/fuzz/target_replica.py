"""Fuzz targets of the replica endpoint: in process, against an engine without a core.

Each `run_<face>(data)` sends `data` to a route and raises unless the answer is one of the contract:
never a 5xx that is not `draining` or `unavailable`, always JSON, never an exception.
"""

import asyncio
import json
import os
from collections.abc import Coroutine
from typing import Any, Final

from rose.contract.replica import TURNS
from rose.replica.asgi import AccessFilter
from tests.fakes.asgi_client import CONTROL, SECRET, AsgiExchange, settle
from tests.fakes.weight_ranks import FakeWeightRanks, Served

_LIMIT_S = 5.0
_MEANT = {"draining", "unavailable", "no_audit"}
_loop = asyncio.new_event_loop()


def run_admit(data: bytes) -> None:
    """`POST /rose/v1/admit`, on a replica that nobody has leased yet and on a leased one."""
    _run(_control("admit", data))


def run_drain(data: bytes) -> None:
    """`POST /rose/v1/drain`."""
    _run(_control("drain", data))


def run_apply(data: bytes) -> None:
    """`POST /rose/v1/weights/apply`."""
    _run(_control("weights/apply", data))


def run_audit(data: bytes) -> None:
    """`POST /rose/v1/weights/audit`, which reads nothing of its body."""
    _run(_control("weights/audit", data))


def run_generate(data: bytes) -> None:
    """`POST /rose/v1/generate` on a leased replica; a turn that begins is ended by a drain."""
    _run(_turn(data))


def run_generate_batch(data: bytes) -> None:
    """`POST /rose/v1/generate_batch` on a leased replica; turns that begin are ended by a drain."""
    _run(_batch(data))


def run_leave_batch(data: bytes) -> None:
    """`POST /rose/v1/generate_batch/leave`."""
    _run(_control("generate_batch/leave", data))


def run_authorization(data: bytes) -> None:
    """Headers of a stranger: none of them opens a route of control."""
    if data != CONTROL["Authorization"].encode():
        _run(_stranger(data))


def run_route(data: bytes) -> None:
    """Method and path in front of a server that answers everything with 204."""
    _run(_route(data))


def _run(work: Coroutine[Any, Any, None]) -> None:
    os.environ |= {"ROSE_ROLE": "dedicated", "ROSE_REPLICA_SECRET": SECRET}
    os.environ |= {"ROSE_WEIGHTS_DIR": "/nonexistent", "ROSE_UNSIGNED": "1"}
    _loop.run_until_complete(asyncio.wait_for(work, _LIMIT_S))


def _check(answer: AsgiExchange) -> None:
    said = json.loads(answer.received)
    if answer.status >= 500 and said["error"]["type"] not in _MEANT:
        raise AssertionError(f"{answer.status} {said}")


def _ask(served: Served, path: str, data: bytes) -> AsgiExchange:
    begun = AsgiExchange(served.app, f"/rose/v1/{path}", data, "POST", served.headers)
    begun.send_body()
    return begun


async def _control(path: str, data: bytes) -> None:
    served = await Served(FakeWeightRanks()).start()
    for _ in range(2):
        _check(await _ask(served, path, data).done())
        assert (await served.state())["epoch"] <= 1 << 53
        await _ask(served, "admit", b'{"epoch":1}').done()


async def _answered(path: str, data: bytes) -> AsgiExchange | None:
    """Return the results of turns that a drain ends after one step; None for a good refusal."""
    served = await Served(FakeWeightRanks()).start()
    await _ask(served, "admit", b'{"epoch":1}').done()
    asked = _ask(served, path, data)
    await settle()
    served.engine.step()
    await settle()
    await _ask(served, "drain", b'{"epoch":1}').done()
    await asked.done()
    if asked.status != 200:
        _check(asked)
        return None
    return asked


async def _turn(data: bytes) -> None:
    turn = await _answered("generate", data)
    if turn is not None:
        assert turn.lines[-1]["finish_reason"] in {"revoked", "stop", "length"}


def _turns_of(body: bytes) -> int:
    """Return the number of turns of a batch; fields that nobody reads may hold invalid text."""
    return len(json.loads(body.decode(errors="replace"))["turns"])


async def _batch(data: bytes) -> None:
    batch = await _answered("generate_batch", data)
    if batch is None:
        return
    last = {place: (line, *status) for place, line, *status in batch.lines}
    assert sorted(last) == [*range(_turns_of(data))]
    for line, *status in last.values():
        assert status in ([400], [503]) or line["finish_reason"] in {"revoked", "stop", "length"}


async def _stranger(data: bytes) -> None:
    served = await Served(FakeWeightRanks(), {"Authorization": data.decode("latin-1")}).start()
    for path in ("admit", "drain", "weights/apply", "weights/audit"):
        answer = await _ask(served, path, b'{"epoch":1,"chunks":"c"}').done()
        assert answer.status == 401


async def _route(data: bytes) -> None:
    reached = []

    async def anything(scope: Any, receive: Any, send: Any) -> None:
        del receive
        reached.append((scope["method"], scope["path"]))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    method, _, path = data.decode("utf-8", "replace").partition(" ")
    answer = AsgiExchange(AccessFilter(anything), path, b"", method)
    answer.send_body()
    await answer.done()
    if answer.status == 204:
        assert method in {"GET", "POST"}
        assert path in {
            "/health",
            "/metrics",
            "/metrics/",
            "/v1/models",
            "/rose/v1/state",
            *TURNS,
        }
    else:
        assert answer.status in {401, 404}
        assert not reached


_CHUNKS = b'"chunks":"/nonexistent/chunks"'
SEEDS: Final[dict[str, tuple[bytes, ...]]] = {
    "run_admit": (b'{"epoch":2,"reason":"r"}',),
    "run_drain": (b'{"epoch":1,"reason":"r"}',),
    "run_apply": (
        b'{"manifest":"/nonexistent/manifests/1.manifest",%s}' % _CHUNKS,
        b'{"manifests":["1","2"],"on_update":"keep",%s}' % _CHUNKS,
    ),
    "run_generate": (
        b'{"request_id":"r","token_ids":[1,2],"sampling":{"max_tokens":2}}',
        b'{"request_id":"r","token_ids":[1],"sampling":{"temperature":0.5,"top_p":0.9,"top_k":4,'
        b'"min_tokens":1,"stop_token_ids":[3],"allowed_token_ids":[1,2],"seed":7},'
        b'"cache_salt":"s","priority":-1}',
    ),
    "run_generate_batch": (
        b'{"batch":"b","turns":[{"request_id":"r","token_ids":[1,2],"sampling":{"max_tokens":2}},'
        b'{"request_id":"s","token_ids":[1],"sampling":{"temperature":-1.0}}]}',
    ),
    "run_leave_batch": (b'{"batch":"b","turns":[0,1]}',),
    "run_authorization": (b"Bearer x", b"bearer " + SECRET.encode(), SECRET.encode()),
    "run_route": (
        b"GET /health",
        b"POST /rose/v1/generate",
        b"POST /collective_rpc",
        b"GET //health",
        b"POST /rose/v1/../../sleep",
    ),
}
