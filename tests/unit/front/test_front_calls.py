"""Calls of the trainers' clients, as they make them, and what the front answers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from front_cases import (
    NotingGateway,
    RunningFront,
    StandInPublisher,
    front_with,
    save_checkpoint,
)
from yarl import URL

from rose.errors import NotAnnouncedError, RefusedError, UnavailableError
from tests.harness.waiting import PATIENCE_S, until_async


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[RunningFront]:
    publisher, gateway = StandInPublisher(), NotingGateway()
    async with front_with(tmp_path, publisher, gateway, tp_size=2) as url:
        yield RunningFront(url, publisher, gateway, tmp_path / "saved")


async def until(condition: Any) -> None:
    await until_async(condition, PATIENCE_S, "the condition", every_s=0.005)


async def test_prime_rl_updates_between_pause_and_resume(front: RunningFront) -> None:
    folder = save_checkpoint(front.saved / "broadcasts/step_1")
    (folder / "STABLE").touch()
    assert await front.get("/health") == (200, {"status": "ok", "replicas": 1})
    paused = await front.post("/pause?mode=keep&clear_cache=false")
    assert (await front.get("/is_paused"))[1] == {"is_paused": True}
    # Its own client touches this file between.
    (folder / "NCCL_READY").touch()
    done = await front.post("/update_weights", {"weight_dir": folder.as_posix()})
    resumed = await front.post("/resume")
    nccl = await front.post("/init_broadcaster", {"host": "h", "port": 1})
    none = await front.post("/update_weights", {"weight_dir": None})
    assert (paused, resumed) == ((200, {"status": "paused"}), (200, {"status": "resumed"}))
    assert done[0] == 200
    assert done[1]["status"] == "ok"
    assert front.publisher.events == ["published 1", "served 1"]
    # Its client goes on without a broadcaster where there is no such route, and gives up at a 4xx.
    assert (nccl[0], none[0]) == (404, 400)
    assert "filesystem" in none[1]["error"]["message"]


async def test_slime_finds_registers_updates_and_reads_its_own_version(front: RunningFront) -> None:
    folder = save_checkpoint(front.saved / "weight_v000001")
    info = (await front.get("/server_info"))[1]
    worker = {"url": front.url, "worker_type": "regular"}
    registered = await front.post("/workers", worker)
    workers = (await front.get("/workers"))[1]["workers"]
    removed = await front.call("DELETE", f"/workers/{workers[0]['id']}")
    before = (await front.get("/get_weight_version"))[1]["weight_version"]
    for path, method in (
        ("/health_generate", "GET"),
        ("/pause_generation", "POST"),
        ("/flush_cache", "GET"),
    ):
        assert (await front.call(method, path))[0] == 200
    body = {"model_path": str(folder), "weight_version": "1"}
    done = await front.post("/update_weights_from_disk", body)
    after = (await front.get("/get_weight_version"))[1]["weight_version"]
    assert (await front.post("/continue_generation", {}))[0] == 200
    split = await front.post("/workers", {"url": front.url, "worker_type": "prefill"})
    assert (info["tp_size"], info["pp_size"], info["num_gpus"]) == (2, 1, 2)
    assert info["enable_memory_saver"] is False
    assert (registered[0], removed[0]) == (200, 200)
    assert [each["url"] for each in workers] == [front.url]
    assert (before, after) == ("default", "1")
    assert done[1]["success"] is True
    assert split[0] == 400


async def test_what_was_pulled_is_published_by_the_name_it_was_pulled_into(
    front: RunningFront,
) -> None:
    pytest.importorskip("torch")  # What reads the files, in a thread of the front's.
    for version in (1, 2):
        save_checkpoint(front.saved / f"stream/weight_v{version:06d}", version)
    pull = {
        "local_checkpoint_dir": "/nvme/engine",
        "source_dir": str(front.saved / "stream"),
    }
    load = {"model_path": "/nvme/engine", "weight_version": "2"}
    early = await front.post("/update_weights_from_disk", load)
    base = await front.post("/pull_weights", {**pull, "target_version": 0})
    pulled = await front.post("/pull_weights", {**pull, "target_version": 2})
    done = await front.post("/update_weights_from_disk", load)
    again = await front.post("/update_weights_from_disk", load)
    late = await front.post("/pull_weights", {**pull, "target_version": 3})
    away = await front.post("/pull_weights", {**pull, "source_dir": "/", "target_version": 1})
    torn = await front.post("/update_weights_from_disk", load)
    await front.post("/pull_weights", {**pull, "target_version": 2})
    anew = await front.post("/update_weights_from_disk", load)
    assert (early[0], base[0], pulled[0], done[0], again[0]) == (400, 200, 200, 200, 200)
    assert (late[0], away[0], torn[0], anew[0]) == (400, 400, 400, 200)
    assert "pull again" in torn[1]["message"]
    assert front.publisher.events == [
        *("published 1", "served 1"),  # what was pulled
        "served 1",  # asked for again
        *("published 2", "served 2"),  # pulled again, as by a trainer that began anew
    ]


@pytest.mark.parametrize(
    ("pause", "update", "resume", "body"),
    [
        (
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
            {"abort_all_requests": True},
        ),
        ("/areal_pause_generation", "/areal_update_weights", "/areal_continue_generation", {}),
    ],
    ids=["sglang", "vllm"],
)
async def test_areal_updates_on_either_of_its_engines(
    front: RunningFront, pause: str, update: str, resume: str, body: dict[str, object]
) -> None:
    folder = save_checkpoint(front.saved / "weight_update_v1")
    answers = [
        await front.post(pause, {}),
        await front.post(update, {"model_path": str(folder), **body}),
        await front.post(resume, {}),
    ]
    assert [status for status, _ in answers] == [200, 200, 200]
    assert front.publisher.events == ["published 1", "served 1"]


async def test_a_failed_update_leaves_the_version_before_and_says_why_in_one_line(
    front: RunningFront,
) -> None:
    ask = "/update_weights_from_disk"
    for step in (1, 2):
        save_checkpoint(front.saved / f"{step}", step)
    one, two = (
        {"model_path": str(front.saved / f"{step}"), "weight_version": step} for step in (1, 2)
    )
    await front.post(ask, one)
    front.publisher.fails = RefusedError("the checkpoint has no strange.weight")
    unfit = await front.post(ask, two)
    front.publisher.fails = UnavailableError("no scheduler answers")
    away = await front.post(ask, two)
    missing = await front.post(ask, {"model_path": str(front.saved / "none")})
    version = await front.get("/get_weight_version")
    again = await front.post(ask, two)
    # A client may repeat a 5xx; repeating does not mend a 4xx.
    assert (unfit[0], away[0], missing[0], again[0]) == (400, 503, 400, 200)
    assert unfit[1]["message"] == unfit[1]["error"]["message"]
    assert "\n" not in unfit[1]["message"]
    assert "strange.weight" in unfit[1]["message"]
    assert version[1] == {"weight_version": "1", "version": 1}


async def test_a_client_that_asks_again_makes_no_second_version(front: RunningFront) -> None:
    folder = save_checkpoint(front.saved / "1")
    front.publisher.unserved = UnavailableError("published and not served after 300 s")
    body = {"weight_dir": str(folder)}
    late = await front.post("/update_weights", body)
    again = await front.post("/update_weights", body)
    # The same folder with other weights is another version.
    save_checkpoint(folder, 2, "model.safetensors", "other")
    anew = await front.post("/update_weights", body)
    assert (late[0], again[0], anew[0]) == (503, 200, 200)
    assert front.publisher.events == ["published 1", "served 1", "published 2", "served 2"]


async def test_a_version_that_no_scheduler_knows_is_not_published_twice(
    front: RunningFront,
) -> None:
    body = {"weight_dir": str(save_checkpoint(front.saved / "1"))}
    front.publisher.fails = NotAnnouncedError("version 1 is published but not announced")
    late = await front.post("/update_weights", body)
    again = await front.post("/update_weights", body)
    assert (late[0], again[0]) == (503, 200)
    assert front.publisher.events == ["published 1", "served 1"]


async def test_updates_come_one_after_the_other_and_outlive_their_callers(
    front: RunningFront,
) -> None:
    front.publisher.held.clear()
    bodies = [{"weight_dir": str(save_checkpoint(front.saved / f"{k}"))} for k in range(9)]
    asked = [asyncio.ensure_future(front.post("/update_weights", body)) for body in bodies]
    _, waiting = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
    # Eight wait, and no more: that one is told so.
    assert len(waiting) == 8
    for each in list(waiting)[:4]:
        each.cancel()
    front.publisher.held.set()
    await until(lambda: front.publisher.version == 8)
    left = await asyncio.gather(*asked, return_exceptions=True)
    assert front.publisher.most == 1
    statuses = [each[0] for each in left if not isinstance(each, BaseException)]
    assert sorted(statuses) == [200, 200, 200, 200, 503]


async def test_folders_beyond_the_roots_are_refused_alike_whatever_is_there(
    front: RunningFront, tmp_path: Path
) -> None:
    outside = save_checkpoint(tmp_path / "secret")
    saved = front.saved
    (saved / "link").symlink_to(outside)
    inside = saved / "linked_file"
    inside.mkdir()
    (inside / "model.safetensors").symlink_to(outside / "model.safetensors")
    named = (
        str(outside),
        str(tmp_path / "nothing"),
        f"{saved}/../secret",
        str(saved / "link"),
        "saved/1",
        f"{saved}\0",
        "/" + "a" * 5_000,
    )
    answers = [await front.post("/update_weights", {"weight_dir": n}) for n in named]
    file = await front.post("/update_weights", {"weight_dir": str(inside)})
    assert [status for status, _ in answers] == [400] * len(named)
    assert all("is not below a --weights-root" in body["message"] for _, body in answers)
    assert file[0] == 400
    assert front.publisher.events == []


async def test_all_other_calls_are_the_gateways_with_the_job(tmp_path: Path) -> None:
    gateway = NotingGateway()
    async with (
        front_with(tmp_path, StandInPublisher(), gateway) as url,
        aiohttp.ClientSession() as session,
    ):
        sent = b"x" * 300_000
        async with session.post(
            URL(f"{url}/v1/completions?a=%2F", encoded=True),
            data=sent,
            headers={"X-SMG-Routing-Key": "s1", "X-Rose-Job": "other", "Authorization": "Bearer t"},
        ) as answer:
            assert (await answer.json()) == {"path": "/v1/completions"}
        async with session.get(f"{url}/tea") as answer:
            assert answer.status == 418
        async with session.get(f"{url}/stream") as answer:
            assert await answer.read() == b"data: 1\n\ndata: 2\n\n"
            assert answer.content_type == "text/event-stream"
    method, path, headers, body = gateway.calls[0]
    assert (method, path, body) == ("POST", "/v1/completions?a=%2F", sent)
    assert headers["X-Rose-Job"] == "grpo"
    assert headers["X-SMG-Routing-Key"] == "s1"
    assert headers["Authorization"] == "Bearer t"


async def test_all_turns_are_aborted_as_sglang_aborts_them(front: RunningFront) -> None:
    turns = [asyncio.ensure_future(front.post("/generate", {"k": k})) for k in range(3)]
    await until(lambda: len(front.gateway.calls) == 3)
    load = (await front.get("/v1/loads?include=core"))[1]["loads"][0]
    aborted = await front.post("/abort_request", {"abort_all": True})
    answers = await asyncio.gather(*turns)
    after = (await front.get("/v1/loads?include=core"))[1]["loads"][0]
    await until(lambda: front.gateway.hung_up == 3)
    one = await front.post("/abort_request", {"rid": "r1"})
    assert (load["num_total_reqs"], after["num_total_reqs"]) == (3, 0)
    assert aborted == (200, {"aborted": 3})
    for status, body in answers:
        assert status == 200
        assert body["meta_info"]["finish_reason"]["type"] == "abort"
        assert body["meta_info"]["output_token_logprobs"] == []
    # One turn by its name is the gateway's to find.
    assert one[1] == {"path": "/inference/v1/abort_requests"}
    assert front.gateway.calls[-1][3] == b'{"rid": "r1"}'


async def test_a_caller_that_hangs_up_ends_its_turn_at_the_gateway(front: RunningFront) -> None:
    turn = asyncio.ensure_future(front.post("/generate", {}))
    await until(lambda: len(front.gateway.calls) == 1)
    turn.cancel()
    await until(lambda: front.gateway.hung_up == 1)


async def test_health_waits_for_a_replica_and_a_silent_gateway_is_one_line(
    front: RunningFront,
) -> None:
    front.gateway.replicas = 0
    empty = await front.get("/health")
    front.gateway.replicas = 1
    ready = await front.get("/health_generate")
    assert (empty[0], ready[0]) == (503, 200)
    assert "0 replicas" in empty[1]["message"]


async def test_what_is_no_call_of_theirs_is_refused_in_one_line(front: RunningFront) -> None:
    answers = [
        await front.post("/update_weights", ["no object"]),
        await front.post("/update_weights_from_disk", {"model_path": 7}),
        await front.post("/update_weights_from_disk", {"model_path": "x" * 70_000}),
        await front.post("/load_lora_adapter", {"lora_name": "a", "lora_path": "/"}),
        await front.post("/update_weights_from_distributed", {}),
        await front.post("/update_weights_from_disk", {"model_path": "/", "load_format": "gguf"}),
    ]
    assert [status for status, _ in answers] == [400, 400, 413, 400, 400, 400]
    assert all(body["success"] is False and body["message"] for _, body in answers)
