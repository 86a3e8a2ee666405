"""The front answers the calls of the trainers' own client files, which were recorded."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest
from front_cases import StandInPublisher, front_with, save_checkpoint
from recorded_clients import (
    CLIENTS,
    RECORDS,
    Names,
    RecordedCall,
    Recorder,
    TurnsGateway,
    drive,
    read,
    written,
)

from rose.gateway.apis import CompletionFrontend, SglangFrontend, VllmFrontend
from rose.gateway.apis.frontend import ApiFrontend
from rose.gateway.text_codec import ServedModel
from tests.trainers.stack import ROOT, save_policy

REWRITE = "ROSE_REWRITE_TRACES"
APIS: dict[str, Callable[..., ApiFrontend]] = {
    "/inference/v1/generate": VllmFrontend,
    "/generate": SglangFrontend,
    "/v1/completions": CompletionFrontend,
}


def names(front: str, folder: Path) -> Names:
    return Names({"$FRONT": front, "$PLACE": front.removeprefix("http://"), "$FOLDER": str(folder)})


async def test_recorded_clients_are_answered_as_they_were(tmp_path: Path) -> None:
    publisher, gateway = StandInPublisher(), TurnsGateway(str(tmp_path / "policy"))
    for number in range(1, len(CLIENTS) + 1):
        folder = save_checkpoint(tmp_path / f"saved/step_{number}")
        (folder / "STABLE").touch()
    recorded = read()
    async with (
        front_with(tmp_path, publisher, gateway) as url,
        aiohttp.ClientSession() as session,
    ):
        run = names(url, tmp_path)
        for call in recorded:
            body = None if call.body is None else json.loads(run.shown(json.dumps(call.body)))
            async with session.request(call.method, url + run.shown(call.path), json=body) as said:
                answer = await said.text()
            assert said.status == call.status, (call.path, answer)
            if call.answer is not None:
                assert json.loads(run.hidden(answer)) == call.answer, call.path
    updates = range(1, len(CLIENTS) + 1)
    assert publisher.events == [f"{what} {n}" for n in updates for what in ("published", "served")]
    # Turns reach the gateway as their clients wrote them.
    asked = [(call.path, call.body) for call in recorded if call.path in APIS]
    assert json.loads(run.hidden(json.dumps(gateway.turns))) == [[*each] for each in asked]
    assert len(asked) == len(CLIENTS)


@pytest.mark.parametrize("call", [each for each in read() if each.path in APIS])
async def test_a_recorded_turn_is_read_by_the_gateway(call: RecordedCall) -> None:
    model = ServedModel("$FOLDER/policy", 512, None)
    salted = call.body | ({"cache_salt": "3"} if "token_ids" in call.body else {})
    asked = await APIS[call.path](model, 16).read(json.dumps(salted).encode(), {})
    (turn,) = asked.turns
    assert (turn.token_ids, turn.sampling.max_tokens) == ([10, 20, 30, 40], 6)


@pytest.mark.nightly
@pytest.mark.timeout(300)
async def test_the_record_is_what_the_clients_ask(tmp_path: Path) -> None:
    clients = Path(os.environ.get("ROSE_TRAINER_CLIENTS") or ROOT / ".trainer-clients")
    if not (clients / "libraries").is_dir():
        pytest.skip(f"the clients' files are not in {clients}: scripts/trainer-clients")
    model = save_policy(tmp_path / "policy")
    gateway = TurnsGateway(str(model))
    async with front_with(tmp_path, StandInPublisher(), gateway) as url:
        recorder = Recorder(url)
        async with recorder.listening() as place:
            await asyncio.to_thread(drive, clients, place, model, tmp_path / "saved")
            made = written(recorder.calls, names(place, tmp_path))
    if os.environ.get(REWRITE):
        RECORDS.write_text(made, encoding="utf-8")
    assert made == RECORDS.read_text(encoding="utf-8")
