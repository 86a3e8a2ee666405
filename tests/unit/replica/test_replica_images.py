"""Images of a replica's turns: held by hash, and put into prompts as the processor writes them."""

import pytest

pytest.importorskip("vllm")

import hashlib
import io
import zlib
from types import SimpleNamespace
from typing import Any

from PIL import Image as Picture
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import PlaceholderRange
from vllm.v1.engine import FinishReason

from rose.contract.replica import MAX_IMAGE_BYTES
from rose.images import ImageCache
from rose.replica import turns as turns_module
from rose.replica.token_versions import KvStaleness
from rose.replica.vllm_images import stamp
from tests.fakes.asgi_client import AsgiExchange, exchange
from tests.harness.waiting import until_async
from tests.unit.replica.test_replica_turns import PATH, ServedTurns, tokens

IMAGES = "/rose/v1/images"
PLACE = 90
OF_IMAGE = [91, PLACE, PLACE, 92]
E, U = OF_IMAGE, [PLACE]


def file_of(shade: int) -> bytes:
    made = io.BytesIO()
    Picture.new("RGB", (4, 4), (shade, 0, 0)).save(made, "PNG")
    return made.getvalue()


RED, DARK = file_of(255), file_of(7)
# A head of 400 million pixels, of which the file has none.
HUGE = RED[:16] + (20_000).to_bytes(4) * 2 + RED[24:29]
HUGE += zlib.crc32(HUGE[12:29]).to_bytes(4) + RED[33:]
NAMES = [hashlib.sha256(each).hexdigest() for each in (RED, DARK)]


class FakeRenderer:
    """Puts OF_IMAGE in the place of the first tokens PLACE, one for each image."""

    def __init__(self) -> None:
        self.limit = 4

    def get_eos_token_id(self) -> None:
        return None

    @property
    def mm_processor(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(allowed_mm_limits={"image": self.limit}))

    async def render_cmpl_async(self, prompts: list[Any], *, skip_mm_cache: bool) -> list[Any]:
        (asked,) = prompts
        names = asked["multi_modal_uuids"]["image"]
        ids, ranges = list[int](), list[PlaceholderRange]()
        for token in asked["prompt_token_ids"]:
            placed = token == PLACE and len(ranges) < len(names)
            if placed:
                ranges.append(PlaceholderRange(offset=len(ids), length=len(OF_IMAGE)))
            ids += OF_IMAGE if placed else [token]
        if len(ranges) < len(names):
            raise AssertionError(f"Failed to apply prompt replacement for {len(ranges)}")
        assert len(asked["multi_modal_data"]["image"]) == len(names)
        return [mm_input(ids, {"image": names}, {"image": names}, {"image": ranges})]


@pytest.fixture
def served() -> ServedTurns:
    made = ServedTurns()
    made.engine.model_config.is_multimodal_model = True
    made.engine.renderer = FakeRenderer()  # type: ignore[assignment]
    return made


async def begin(served: ServedTurns, **asked: Any) -> AsgiExchange:
    """Begin a turn and wait until the engine has it, or it is refused: a thread reads images."""
    before = len(served.engine.prompts)
    begun = await served.begin(**asked)
    await until_async(lambda: len(served.engine.prompts) > before or begun.status, 10.0, "the turn")
    return begun


async def hold(served: ServedTurns, *files: bytes) -> None:
    for data in files:
        answer = await exchange(served.app, IMAGES, data).done()
        assert (answer.status, answer.json["sha256"]) == (200, hashlib.sha256(data).hexdigest())


@pytest.mark.parametrize(
    ("prompt", "starts"),
    [
        ([5, *U, 6, *U, 7], [1, 6]),
        ([5, *U, *U, 7], [1, 5]),
        ([5, *E, 6, *E, 7], [1, 6]),
        ([*E, *E], [0, 4]),
        # A session's kept tokens, and a new message.
        ([5, *E, 6, *U, 7], [1, 6]),
        # A sampled placeholder is no place of an image.
        ([5, *E, 6, *E, 7, PLACE, 8], [1, 6]),
    ],
)
async def test_each_image_has_its_tokens_once(
    served: ServedTurns, prompt: list[int], starts: list[int]
) -> None:
    await hold(served, RED, DARK)
    begun = await begin(served, token_ids=prompt, images=NAMES, cache_salt="v0")
    await served.step(FinishReason.LENGTH)
    await begun.done()
    (given,) = served.engine.prompts
    ids = given["prompt_token_ids"]
    assert [ids[start : start + 4] for start in starts] == [OF_IMAGE] * 2
    assert [(each.offset, each.length) for each in given["mm_placeholders"]["image"]] == [
        (start, 4) for start in starts
    ]
    assert (given["mm_hashes"], given["cache_salt"]) == ({"image": NAMES}, "v0")
    said = [line["prompt_token_ids"] for line in begun.lines if "prompt_token_ids" in line]
    assert said == ([] if ids == prompt else [ids]), "the caller learns what it has not sent"
    assert tokens(begun.lines) == [0]


@pytest.mark.parametrize(
    ("prompt", "images", "line"),
    [
        ([5, 6], [RED], "images: Failed to apply prompt replacement for 0"),
        ([5, *U, *U], [RED], "images: the prompt has places of more than its 1 images"),
        ([91, *U, 92], [RED], ""),
        ([91, *U, *U, *U, 92], [RED], "images: the prompt has places of more than its 1 images"),
        ([5, *U], [RED[:40]], "images: Failed to load image"),
        ([5, *U], [HUGE], "images: Image size (400000000 pixels) exceeds limit"),
    ],
)
async def test_a_prompt_that_does_not_fit_its_images_is_refused(
    served: ServedTurns, prompt: list[int], images: list[bytes], line: str
) -> None:
    await hold(served, *images)
    names = [hashlib.sha256(each).hexdigest() for each in images]
    begun = await begin(served, token_ids=prompt, images=names)
    if line:
        await begun.done()
        assert begun.status == 400
        assert begun.json["error"]["message"].startswith(line)
    else:
        await served.step(FinishReason.LENGTH)
        assert tokens((await begun.done()).lines) == [0]


async def test_a_replica_takes_what_its_model_takes(
    served: ServedTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def line(data: bytes) -> tuple[int, str]:
        answer = await exchange(served.app, IMAGES, data).done()
        return answer.status, answer.json["error"]["message"]

    assert await line(b"%PDF") == (400, "images: send a file of PNG, JPEG, GIF or WebP")
    assert (await line(RED + bytes(MAX_IMAGE_BYTES)))[0] == 413
    served.engine.renderer.limit = 0
    assert "--limit-mm-per-prompt" in (await line(RED))[1]
    served.engine.model_config.is_multimodal_model = False
    assert await line(RED) == (400, "images: the engine's model takes none")
    served.admission.close(1, "host is busy")
    assert (await line(RED))[0] == 503


async def test_a_turn_that_names_an_image_that_is_not_here_begins_nothing(
    served: ServedTurns,
) -> None:
    served.turns.images = ImageCache(len(RED) + len(DARK) - 1)
    await hold(served, RED, DARK)
    begun = await (await begin(served, token_ids=[*U], images=NAMES[:1])).done()
    assert begun.status == 428
    assert begun.json["error"]["message"].startswith(f"images: {NAMES[0]} is not here")
    turns = [{"request_id": k, "token_ids": [*U], "images": [NAMES[k == "b"]]} for k in "ab"]
    batch = await served.begin_batch(*turns)
    await until_async(lambda: served.engine.prompts, 10.0, "the other turn")
    await served.step(FinishReason.LENGTH)
    await batch.done()
    refused = [line for line in batch.lines if any(line[2:])]
    assert [(place, status) for place, _, status in refused] == [(0, 428)]
    assert len(served.engine.prompts) == 1


async def test_long_prompts_come_in_several_lines(
    served: ServedTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "PROMPT_IDS", 2)
    await hold(served, RED)
    begun = await begin(served, token_ids=[5, *U], images=NAMES[:1])
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert [line.get("prompt_token_ids") for line in begun.lines] == [
        [5, 91],
        [90, 90],
        [92],
        None,
        None,
    ]


def test_images_of_a_version_whose_caches_were_kept_are_not_reused() -> None:
    ages = KvStaleness()
    ages.activated(3, kept_kv=True)
    prompt = mm_input([*E], {}, {"image": NAMES}, {})
    stamp(prompt, ages, ages.salted("s"))
    assert prompt["mm_hashes"] == {"image": [f"3/{each}" for each in NAMES]}
    assert prompt["cache_salt"] == "3/s"


async def test_the_path_of_turns_is_theirs(served: ServedTurns) -> None:
    begun = await served.begin()
    await served.step(FinishReason.LENGTH)
    await begun.done()
    assert served.engine.prompts == [{"type": "token", "prompt_token_ids": [1, 2, 3]}]
    assert (await exchange(served.app, PATH, b"{}").done()).status == 400
