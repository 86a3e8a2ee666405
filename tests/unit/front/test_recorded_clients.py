"""The front answers the calls of the trainers' own client files, which were recorded."""

import asyncio
import json
import os
from pathlib import Path

import aiohttp
import pytest
from front_cases import StandInPublisher, front_with, save_checkpoint
from recorded_clients import (
    CLIENTS,
    RECORDS,
    Names,
    Recorder,
    TurnsGateway,
    drive,
    read,
    written,
)

from tests.trainers.stack import ROOT, save_policy

REWRITE = "ROSE_REWRITE_TRACES"


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
    routes = ("/inference/v1/generate", "/generate", "/v1/completions")
    asked = [(call.path, call.body) for call in recorded if call.path in routes]
    assert json.loads(run.hidden(json.dumps(gateway.turns))) == [[*each] for each in asked]
    assert len(asked) == len(CLIENTS)


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
