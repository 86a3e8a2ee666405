"""Several turns of one request: each is a turn of its own, and only their lines share an answer."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import FinishReason

from rose.replica.admission import Admission
from rose.replica.endpoint import GenerateApp
from rose.replica.turns import Turns
from rose.replica.vllm import VllmEngine
from tests.fakes.asgi_client import AsgiExchange, exchange, settle
from tests.fakes.async_llm import FakeAsyncLLM

PATH = "/rose/v1/generate_batch"
LEAVE = "/rose/v1/generate_batch/leave"


def turn(number: int, **changes: Any) -> dict[str, Any]:
    asked = {"request_id": f"r{number}", "token_ids": [1, 2], "sampling": {"max_tokens": 8}}
    return asked | changes


class Served:
    def __init__(self) -> None:
        self.engine = FakeAsyncLLM()
        self.admission = Admission()
        self.admission.admit(1, "mine")
        self.app = GenerateApp(self.admission)
        self.turns = self.app.turns = Turns(VllmEngine(self.engine))

    async def begin(self, *turns: dict[str, Any]) -> AsgiExchange:
        begun = exchange(self.app, PATH, {"batch": "b", "turns": turns})
        await settle()
        return begun

    async def step(self, finish: FinishReason | None = None) -> None:
        self.engine.step(finish)
        await settle()


def of(begun: AsgiExchange, place: int) -> list[dict[str, Any]]:
    return [line for at, line, *_ in begun.lines if at == place]


async def test_the_lines_of_one_step_are_one_piece_and_each_token_has_its_version() -> None:
    served = Served()
    begun = await served.begin(turn(0), turn(1), turn(2))
    await served.step()
    served.engine.weight_version = "7"
    await served.step()
    await served.step(FinishReason.LENGTH)
    await begun.done()
    for place in range(3):
        *chunks, last = of(begun, place)
        stamps = [(c["token_ids"], c["version"]) for c in chunks]
        assert stamps == [([0], 0), ([1], 7), ([2], 7)]
        assert last == {"finish_reason": "length"}
    assert begun.sends == 4, "headers, two pieces, and the last one"
    assert served.turns.tokens_total == 9
    assert not served.engine.core_aborts


async def test_a_drain_ends_each_of_them_after_the_tokens_that_it_has() -> None:
    served = Served()
    begun = await served.begin(turn(0), turn(1))
    await served.step()
    served.admission.close(1, "over")
    assert await served.turns.revoke_all() == 2
    await begun.done()
    for place in range(2):
        assert [line.get("finish_reason") for line in of(begun, place)] == [None, "revoked"]
        assert of(begun, place)[0]["token_ids"] == [0]


async def test_one_that_is_left_ends_alone() -> None:
    served = Served()
    begun = await served.begin(turn(0), turn(1))
    await served.step()
    left = await exchange(served.app, LEAVE, {"batch": "b", "turns": [1, 7]}).done()
    await settle()
    assert (left.status, served.engine.live) == (200, 1)
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert [line.get("token_ids") for line in of(begun, 0)] == [[0], [1], None]
    assert [line.get("token_ids") for line in of(begun, 1)] == [[0]]
    assert len(served.engine.core_aborts) == 1


async def test_a_name_that_nobody_gave_ends_nothing() -> None:
    served = Served()
    begun = await served.begin(turn(0), turn(1))
    left = await exchange(served.app, LEAVE, {"batch": "c", "turns": [0, 1]}).done()
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert left.status == 200
    assert [len(of(begun, place)) for place in range(2)] == [2, 2]


async def test_a_client_that_hangs_up_leaves_nothing_in_the_engine() -> None:
    served = Served()
    begun = await served.begin(turn(0), turn(1))
    await served.step()
    begun.leave()
    await begun.done()
    assert served.engine.live == 0
    assert (served.turns.running, served.turns.waiting) == (0, 0)


async def test_one_of_another_job_is_refused_alone() -> None:
    served = Served()
    begun = await served.begin(turn(0, job="mine"), turn(1, job="other"))
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert [at for at, *_ in begun.lines] == [1, 0, 0]
    assert begun.lines[0] == [1, {"message": "no turns of other here"}, 503]


async def test_what_the_engine_refuses_is_refused_alone() -> None:
    served = Served()
    served.engine.adding.clear()
    begun = await served.begin(turn(0), turn(1, sampling={"max_tokens": 8, "temperature": -1.0}))
    served.engine.adding.set()
    await settle()
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert begun.status == 200
    (refusal,) = [line for line in begun.lines if line[0] == 1]
    assert refusal[2] == 400
    assert of(begun, 0)[-1] == {"finish_reason": "length"}
    served.engine.refuse_with = VLLMValidationError("no")
    begun = await served.begin(turn(2), turn(3))
    await begun.done()
    assert [line[2] for line in begun.lines] == [400, 400]


async def test_without_a_lease_all_are_refused_at_once() -> None:
    served = Served()
    served.admission.close(1, "held")
    begun = await (await served.begin(turn(0), turn(1))).done()
    assert begun.status == 503
    assert begun.json["error"]["type"] == "draining"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        {"batch": "b"},
        {"batch": "b", "turns": []},
        {"batch": "b", "turns": [{"request_id": "r"}]},
        {"batch": "b", "turns": [turn(0)] * 257},
    ],
)
async def test_a_body_that_is_no_batch_is_a_bad_request(body: object) -> None:
    served = Served()
    assert (await exchange(served.app, PATH, body).done()).status == 400
    assert (await exchange(served.app, LEAVE, {"turns": [-1]}).done()).status == 400
    assert served.engine.live == 0


async def test_a_weight_update_lets_none_of_them_begin_meanwhile() -> None:
    served = Served()
    with served.turns.hold.closed():
        begun = await served.begin(turn(0), turn(1))
        assert served.engine.live == 0
        await exchange(served.app, LEAVE, {"batch": "b", "turns": [1]}).done()
    await settle()
    assert served.engine.live == 1
    await served.step(FinishReason.LENGTH)
    await asyncio.wait_for(begun.done(), 2)
    assert of(begun, 1) == []
