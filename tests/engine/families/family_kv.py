"""Program: lends and takes back KV memory of a real vLLM engine of each named family.

`python -m tests.engine.families.family_kv FOLDER NAME…` writes FOLDER/NAME.kv.json, see
`KvOutcome`. An engine starts in a process forked from this one, which has imported vLLM once.
"""

import os
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from executor import ControlPage, Grant, GrantMode
from executor.control_page.host_description import HostDescription
from executor.guest import plugin
from executor.guest.gate_client import GateClient
from executor.guest.kv_balloon import GuestKv
from tests.engine.families.family_updates import ENVIRONMENT, UNIPROC, import_engine, try_each
from tests.engine.families.tiny_families import MATRIX_EXTENSION, VISION, make_family
from tests.harness.seated_host import SeatedHost

KV_BYTES = 24 << 20
VOCABULARY = 400
TOKENS = 24
GUEST, HOST = (
    "executor.vllm.guest.scheduler.GatedScheduler",
    ("executor.vllm.host.scheduler.ObservedScheduler"),
)
DRAFT = "llama+draft"
"""A target with a draft model beside it; a guest has none."""
BFLOAT16 = {"qwen3-next", "int8-channel", *MATRIX_EXTENSION}
"""Families whose kernels take no activations in float32, on some CPUs."""
SHORT = {"falcon-h1", "nemotron-h", "granite-hybrid"}
"""Families tried a short prompt at a time, without prefixes: stock vLLM ends on a CPU if
Mamba-2 has several prompts in a step, or a prefix from the cache."""


@dataclass
class KvOutcome:
    """Result of a family's engines. guest, host: "works" or the line that refused.

    guest_bytes, host_bytes: most measured to be given back and lent, of `kv_bytes`. lost: blocks
    with content that lost some of it when others were released. groups: the groups of layers.
    """

    family: str
    guest: str = ""
    host: str = ""
    guest_bytes: int = 0
    host_bytes: int = 0
    kv_bytes: int = 0
    lost: int = 0
    groups: int = 0
    engine: str = "vLLM"


class Clock:
    """A monotonic clock that runs as it is looked at."""

    def __init__(self) -> None:
        self._now_ns = time.monotonic_ns()

    def __call__(self) -> int:
        self._now_ns += 10_000
        return self._now_ns


class FamilyEngine:
    """A vLLM engine in this process with the scheduler of a guest or of a host."""

    def __init__(self, model: Path, family: str, role: str, page: Path) -> None:
        os.environ.update(ROSE_ROLE="none", ROSE_CONTROL_PAGE=str(page), ROSE_ORPHAN_S="3600")
        os.environ.update(ROSE_HOST_RESERVE="0.1", ROSE_HOST_PREFIX_COLD_S="0.01")
        self.page, self.lost = ControlPage.create(page), 0
        self.pooling = family == "reward"
        self.longest = 60 if family in SHORT else 200
        if role == GUEST:
            # No busy machine ages a grant: two guests under the same caps schedule the same steps.
            self.clock = Clock()
            plugin.GateClient = partial(GateClient, clock_ns=self.clock)  # type: ignore[misc]
            plugin.GuestKv = partial(GuestKv, clock_ns=self.clock)  # type: ignore[misc]
            self.host = SeatedHost(self.page, self.clock)
            os.environ["ROSE_ROLE"] = "guest"
            self.allow(0)
        self.start(model, family, role)

    def start(self, model: Path, family: str, role: str) -> None:
        from vllm import LLM

        more: dict[str, Any] = {}
        if family == DRAFT:
            draft = make_family("llama-draft", model.parent / "draft")
            speculation = {"method": "draft_model", "num_speculative_tokens": 3}
            more["speculative_config"] = speculation | {"model": str(draft)}
        self.llm: Any = LLM(
            model=str(model),
            skip_tokenizer_init=not (self.pooling or family == VISION),
            enforce_eager=True,
            dtype="bfloat16" if family in BFLOAT16 else "float32",
            kv_cache_memory_bytes=KV_BYTES,
            max_model_len=384,
            max_num_seqs=1 if family in SHORT else 8,
            enable_prefix_caching=family not in SHORT,
            max_num_batched_tokens=512,
            block_size=32,
            distributed_executor_backend=UNIPROC,
            # With AMX vLLM takes a backend for latent attention that has no float32.
            attention_backend="CPU_MLA" if "deepseek" in family else None,
            scheduler_cls=role,
            runner="pooling" if self.pooling else "generate",
            seed=0,
            **more,
        )
        core = self.llm.llm_engine.engine_core.engine_core
        self.core, self.scheduler = core, core.scheduler

    @property
    def pool(self) -> Any:
        """The guest's balloon."""
        return self.scheduler._kv._pool

    @property
    def lender(self) -> Any:
        return self.scheduler.lender

    @property
    def groups(self) -> int:
        return len(self.scheduler.kv_cache_config.kv_cache_groups)

    def allow(self, cap: int) -> None:
        now_ns = self.clock()
        self.host.tell()
        live = {"heartbeat_ns": now_ns, "expiry_ns": now_ns + 4 * 10**9}
        self.page.grant.write(Grant(GrantMode.RUN, 512, 8, kv_granule_cap=cap, **live))

    def lend(self) -> None:
        # A host lends from its start on, when no block has content.
        self.llm.reset_prefix_cache()
        os.environ.update(ROSE_ROLE="host", ROSE_HOST_LEVEL="lend")
        self.scheduler.attach()

    def answers(self, before_step: Callable[[int], None] = lambda _: None) -> list[Any]:
        """Answers of two waves of requests; a request that is handed back goes on at once."""
        rng = random.Random(1)
        shared = [rng.randrange(VOCABULARY) for _ in range(self.longest // 2)]
        prompts = [
            shared[: rng.choice([0, 32, 100])]
            + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(20, self.longest))]
            for _ in range(24)
        ]
        found = {}
        for wave in (prompts[:8], prompts[8:]):
            found |= self.wave(dict(enumerate(wave, len(found))), before_step)
            self.idle()
        return [found[number] for number in range(len(prompts))]

    def wave(
        self, prompts: dict[int, list[int]], before_step: Callable[[int], None], steps: int = 4000
    ) -> dict[int, Any]:
        found: dict[int, Any] = {}
        tokens: dict[int, list[int]] = {number: [] for number in prompts}
        for number, prompt in prompts.items():
            self.add(number, prompt, TOKENS)
        for step in range(steps):
            before_step(step)
            for id_, part, reason in self.step():
                number = int(id_.partition(".")[0])
                tokens[number] += part
                if reason == "length":
                    found[number] = tokens[number]
                elif reason:
                    left = TOKENS - len(tokens[number])
                    self.add(number, prompts[number] + tokens[number], left, f".{step}")
            if len(found) == len(prompts):
                return found
        raise AssertionError(f"{len(found)} of {len(prompts)} answers after {steps} steps")

    def step(self) -> Iterable[tuple[str, list[Any], str]]:
        """Yield of each request that a step ended its id, its output and the reason."""
        for output in self.llm.llm_engine.step():
            if self.pooling:
                yield output.request_id, output.outputs.data.tolist(), "length"
            elif output.finished:
                (whole,) = output.outputs
                yield output.request_id, list(whole.token_ids), whole.finish_reason

    def empty_step(self) -> None:
        self.core.step()

    def add(self, number: int, prompt: list[int], tokens: int, suffix: str = "") -> None:
        from vllm import PoolingParams, SamplingParams

        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        sampling.detokenize = False
        parameters = PoolingParams(task="classify") if self.pooling else sampling
        request = {"prompt_token_ids": prompt}
        self.llm.llm_engine.add_request(f"{number}{suffix}", request, parameters)

    def idle(self) -> None:
        """Turn the core's idle loop until it has nothing to do, at least for a moment."""
        for _ in range(400):
            if not self.scheduler.has_requests():
                return
            self.core.step()

    def filled(self) -> list[int]:
        """Return the blocks that have content."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        return [block.block_id for block in blocks if block.ref_cnt or block.block_hash]

    def bytes_of(self, blocks: list[int]) -> Iterable[Any]:
        """Yield a copy of these blocks' bytes of each tensor."""
        import torch

        config = self.scheduler.kv_cache_config
        layers = self.scheduler.vllm_config.compilation_config.static_forward_context
        for name in (name for group in config.kv_cache_groups for name in group.layer_names):
            cache = layers[name].kv_cache
            for tensor in cache if isinstance(cache, tuple) else (cache,):
                rows = tensor.unflatten(0, (config.num_blocks, -1))[blocks]
                yield rows.contiguous().view(torch.uint8).clone()

    def watch(self, pool: Any) -> None:
        """Count blocks with content that change when others are released."""
        release = pool.pages.release

        def watched(released: Any) -> None:
            import torch

            gone = {*released, *pool.held}
            blocks = [block for block in self.filled() if pool.granules.of(block) not in gone]
            before = list(self.bytes_of(blocks))
            release(released)
            after = self.bytes_of(blocks)
            self.lost += sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

        pool.pages.release = watched

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


Start = type[FamilyEngine]


def as_guest(start: Start, model: Path, family: str, page: Path, result: KvOutcome) -> str:
    """Return how a guest went: it computes twice with the same caps, once with its pages kept."""
    answers = []
    for gives in (False, True):
        page.unlink(missing_ok=True)
        engine = start(model, family, GUEST, page)
        answers.append(capped_answers(engine, result, gives=gives))
        engine.close()
    if answers[0] != answers[1]:
        return f"{sum(a != b for a, b in zip(*answers, strict=True))} answers differ"
    return "works" if result.guest_bytes else "computes; gives no KV memory back"


def capped_answers(engine: FamilyEngine, result: KvOutcome, *, gives: bool) -> list[Any]:
    """Answers under caps that change; `gives`: held pages go, else they stay as they are."""
    pool, rng, cap = engine.pool, random.Random(2), 0
    pages = pool.pages
    result.groups = engine.groups
    result.kv_bytes = pages.bytes_total
    if gives:
        engine.watch(pool)
    else:
        pages.release = pages.restore = lambda _: None

    def change(step: int) -> None:
        nonlocal cap
        if step % 6 == 0:
            cap = rng.choice([0, 1, 1, 2, 3, pool.granules.count // 2])
        engine.allow(cap)
        result.guest_bytes = max(result.guest_bytes, pages.bytes_returned)

    answers = engine.answers(change)
    for _ in range(20):
        change(1)
        engine.allow(1)
        engine.empty_step()
    result.guest_bytes = max(result.guest_bytes, pages.bytes_returned)
    result.lost += engine.lost
    return answers


def as_host(start: Start, model: Path, family: str, page: Path, result: KvOutcome) -> str:
    """Return how a host went: it answers as the same engine did before it was one."""
    engine = start(model, family, HOST, page)
    stock = engine.answers()
    engine.lend()
    lender = engine.lender
    if lender is None:
        said = HostDescription.read(page)
        engine.close()
        return said.lacks[0] if said and said.lacks else "serves, lends no KV memory"
    engine.watch(lender.pool)
    result.kv_bytes = lender.pool.pages.bytes_total

    def note(_: int) -> None:
        result.host_bytes = max(result.host_bytes, lender.lent.bytes_lent)

    for _ in range(2):
        time.sleep(0.02)
        engine.idle()
        note(0)
        answers = engine.answers(note)
        result.lost += engine.lost
        if answers != stock:
            differ = sum(a != b for a, b in zip(answers, stock, strict=True))
            return f"{differ} answers differ"
    engine.close()
    return "works" if result.host_bytes else "lends nothing"


def outcome(
    family: str, folder: Path, start: Start = FamilyEngine, engine: str = "vLLM"
) -> KvOutcome:
    result = KvOutcome(family, engine=engine)
    model = make_family("llama" if family == DRAFT else family, folder / "model")
    result.host = as_host(start, model, family, folder / "host-page", result)
    try:
        result.guest = as_guest(start, model, family, folder / "guest-page", result)
    except Exception as error:
        result.guest = str(error).splitlines()[0]
    return result


def main(folder: Path, families: list[str]) -> None:
    # Random ids would order requests that are handed back together, and with them the next steps.
    os.environ.update(ENVIRONMENT, VLLM_PLUGINS="", VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1")
    import_engine()
    try_each(families, folder, ".kv.json", outcome, lambda f, line: KvOutcome(f, host=line))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
