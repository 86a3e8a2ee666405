"""Images of turns: bytes come once, replicas get them once, a turn goes on with them anywhere."""

import base64
import hashlib
from typing import Any

import pytest

from rose.client import RolloutClient, Sampling
from rose.contract.gateway import ImageName
from rose.gateway.errors import ImageMissing
from rose.gateway.images import KeptImages
from rose.gateway.replicas.table import ReplicaApi
from rose.security.callers import Caller
from tests.fakes.replica import IMAGE_TOKENS, PLACE, StandInReplica
from tests.unit.gateway.gateway_cases import base_url, calling, entry, failing_over, serving
from tests.unit.gateway.wire_cases import SGLANG, VLLM, ask, body_of, vllm_body

CAT, DOG = b"\x89PNG\r\n\x1a\ncat", b"\xff\xd8\xffdog"
PROMPT = [1, PLACE, 2, PLACE, 100]
WHOLE = [1, *IMAGE_TOKENS, 2, *IMAGE_TOKENS, 100]
COUNT = [*range(101, 111)]


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sent(data: bytes) -> str:
    return base64.b64encode(data).decode()


def body(*images: Any, tokens: int = 10, **more: Any) -> dict[str, Any]:
    fields = {"token_ids": PROMPT, "return_token_ids": True, "images": images, **more}
    return vllm_body(tokens, **fields)


async def test_bytes_come_once_and_hashes_name_them_afterwards() -> None:
    async with serving() as (replica, _, session):
        for images in ([sent(CAT), sent(DOG)], [{"sha256": name(CAT)}, {"sha256": name(DOG)}]):
            status, answer, _ = await ask(session, VLLM, body(*images))
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == COUNT
            assert answer["prompt_token_ids"] == WHOLE, "as the model's processor writes it"
            assert answer["usage"]["prompt_tokens"] == len(WHOLE)
    assert replica.sent_images == [name(CAT), name(DOG)]
    assert replica.images == {name(CAT): CAT, name(DOG): DOG}
    assert [each["images"] for each in replica.requests] == [[name(CAT), name(DOG)]] * 2


@pytest.mark.parametrize("after", [0, 4])
@pytest.mark.parametrize("counts", [False, True])
async def test_a_turn_goes_on_elsewhere_with_its_images(after: int, counts: bool) -> None:
    sampling = {"frequency_penalty": 0.5} if counts else {}
    async with failing_over() as (guest, own, _, session):
        guest.revoke_after = after
        status, answer, _ = await ask(session, VLLM, body(sent(CAT), sent(CAT), sampling=sampling))
    assert (status, answer["attempts"]) == (200, 2)
    assert answer["choices"][0]["token_ids"] == COUNT
    assert answer["prompt_token_ids"] == WHOLE
    assert guest.sent_images == own.sent_images == [name(CAT)], "to each replica exactly once"
    (rest,) = own.requests
    kept = [] if counts else COUNT[:after]
    assert rest["images"] == [name(CAT)] * 2
    # Sampled tokens are no places of images: what goes on has the prompt's in it.
    assert rest["token_ids"] == [*WHOLE, *kept]


async def test_samples_of_one_prompt_share_what_is_sent() -> None:
    async with serving() as (replica, _, session):
        asked = body(sent(CAT), sent(DOG), sampling={"n": 4})
        status, answer, _ = await ask(session, VLLM, asked)
    assert (status, len(answer["choices"])) == (200, 4)
    assert replica.sent_images == [name(CAT), name(DOG)]
    assert replica.batches == [4], "still one request"
    assert answer["usage"]["prompt_tokens"] == len(WHOLE)


@pytest.mark.parametrize("samples", [1, 2])
async def test_a_replica_that_dropped_an_image_is_sent_it_again(samples: int) -> None:
    async with serving() as (replica, _, session):
        await ask(session, VLLM, body(sent(CAT), sent(DOG)))
        replica.images.clear()
        asked = body({"sha256": name(CAT)}, {"sha256": name(DOG)}, sampling={"n": samples})
        status, answer, _ = await ask(session, VLLM, asked)
    assert status == 200, answer
    assert {*answer["choices"][0]["token_ids"]} == {*COUNT}
    assert replica.sent_images == [name(CAT), name(DOG)] * 2


async def test_what_is_no_image_of_the_caller_is_one_line() -> None:
    async with serving(images_bytes=64) as (replica, _, session):

        async def line(*images: Any, path: str = VLLM) -> tuple[int, str]:
            asked = body(*images) if path == VLLM else {**body_of(path), "image_data": [*images]}
            status, answer, _ = await ask(session, path, asked)
            return status, answer["error"]["message"]

        unknown = await line({"sha256": name(CAT)})
        assert unknown[0] == 428
        assert unknown[1].startswith(f"images: {name(CAT)} is not here: send its bytes")
        assert await line("no base64!") == (
            400,
            "1 validation error: Invalid base64 encoded string - at `$.images[0]`",
        )
        none = "images: send a file of PNG, JPEG, GIF or WebP; image 1 is none"
        assert await line(sent(CAT), sent(b"%PDF-")) == (400, none)
        assert await line(sent(CAT + bytes(64))) == (
            400,
            f"images: image 0 has {len(CAT) + 64} bytes, one may have 64",
        )
        assert "sha256" in (await line({"sha256": "../x"}))[1]
        assert "image_data" in (await line(sent(CAT), path=SGLANG))[1]
        # Others pushed it out.
        padded = CAT + bytes(45)
        assert (await ask(session, VLLM, body(sent(CAT), sent(padded))))[0] == 200
        assert (await ask(session, VLLM, body(sent(DOG), sent(padded))))[0] == 200
        assert (await line({"sha256": name(CAT)}, sent(DOG)))[0] == 428
        replica.takes_images = False
        replica.images.clear()
        other = b"GIF89a"
        assert await line(sent(other), sent(other)) == (
            400,
            "guest-0 refuses the turn: images: the engine's model takes none",
        )


@pytest.mark.parametrize(("job", "subject"), [("other", "a"), ("job", "b")])
async def test_a_hash_finds_nobody_elses_image(job: str, subject: str) -> None:
    kept = KeptImages(1 << 20, lambda _, asked: asked)
    owner, stranger = Caller(None, "a"), Caller(None, subject)
    (image,) = await kept.taken([CAT], owner, "job")
    assert await kept.taken([ImageName(image.sha256)], owner, "job") == (image,)
    with pytest.raises(ImageMissing):
        await kept.taken([ImageName(image.sha256)], stranger, job)


async def test_a_stock_replica_is_refused_by_field_and_name() -> None:
    async with StandInReplica() as stock:
        for api in (ReplicaApi.VLLM, ReplicaApi.SGLANG):
            async with calling(entry(stock, "own-0", api=api)) as (_, session):
                status, answer, _ = await ask(session, VLLM, body(sent(CAT), sent(CAT)))
            assert status == 400
            assert answer["error"]["message"].startswith("images: a stock replica"), api
            assert answer["error"]["param"] == "images"
    assert not stock.sent_images


async def test_the_client_sends_a_gateway_bytes_once() -> None:
    async with serving() as (replica, gateway, _), RolloutClient(base_url(gateway)) as client:
        kept = gateway._server._images
        given: list[Any] = []
        taken = kept.taken

        async def spied(images: Any, *more: Any) -> Any:
            given.append([*images])
            return await taken(images, *more)

        kept.taken = spied
        async with client.session() as session:
            prompt = [*PROMPT]
            for turns in range(3):
                if turns == 2:
                    kept._cache._images.clear()
                turn = await session.generate(prompt, Sampling(max_tokens=2), images=[CAT, DOG])
                assert turn.prompt_token_ids is not None
                prompt = [*turn.prompt_token_ids, *turn.token_ids]
            async with session.stream(prompt, Sampling(max_tokens=2), images=[CAT, DOG]) as parts:
                async for _ in parts:
                    pass
        assert parts.turn.prompt_token_ids == tuple(prompt)
        plain = await client.generate([5], Sampling(max_tokens=1))
    assert prompt == [*WHOLE, *range(101, 107)]
    assert [[isinstance(each, bytes) for each in turn] for turn in given] == [
        [True] * 2,
        [False] * 2,
        [False] * 2,
        [True] * 2,
        [False] * 2,
    ]
    assert plain.prompt_token_ids is None
    assert "images" not in replica.requests[-1]
    assert replica.sent_images == [name(CAT), name(DOG)]
