"""EnginePool: started engines that modules of tests take turns with.

A start takes as long as hundreds of turns, nearly all of it for importing vLLM. So modules name
the engines that they need (`pytest.mark.engines`), those that need the same follow each other, and
an engine ends once its last module is done:

    start ── module ── module ── … ── end
             after each of its tests the engine is as it was, or the test fails and it is replaced
"""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import psutil
from policy_versions import PolicyVersions
from standin_node import StandInNode
from tiny_model import save_tiny_model
from vllm_versions import run_by

from bench.common.tiny_models import FLEET_MODEL
from executor import ControlPage
from executor.control_page.host_description import page_of
from rose.addresses import free_port
from rose.engines import EngineKind, EngineProcess, EngineRole, EngineSpec
from rose.engines.spec import LoraSlots
from rose.errors import EngineStartError
from tests.fakes.cuda.standin_library import build
from tests.harness.conversations import TEMPLATES
from tests.harness.tokenizer_kinds import save_byte_tokenizer, save_tokenizer
from tests.harness.vision_model import save_qwen_vision_model, save_vision_model

# Half a minute on a quiet machine; beside other work a guest waits for what that leaves.
START_S = 480.0
AT_ONCE = 2
# Tokens of the byte tokenizer; its end of sequence comes after them.
BYTES = 256
# "Tokenizers" of models that take images, with their processors.
VISION, QWEN_VISION = "vision", "qwen-vision"
HOST_NAME = "chat-0"
# In which an engine is rid of what a test asked of it.
SETTLE_S = 15.0
POLL_S = 0.02
LOOK = aiohttp.ClientTimeout(total=5.0)
BUSY_METRICS = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
)


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """An engine that serves the tiny model in fp32; equal ones are one engine.

    name: of the engine, and of its model where `served` names no other. tokenizer: its kind; the
    model then has its whole vocabulary and an end of sequence. page: engines that name the same
    one are on one control page. weights: takes versions. lora: those are adapters. standin_cuda:
    finds the stand-in for a GPU's driver. python: see `vllm_versions`, `sglang_python`.
    """

    name: str
    role: EngineRole
    served: str = ""
    tokenizer: str = ""
    page: str = ""
    kv_bytes: int = 64 << 20
    kv_backend: str = "auto"
    stream_interval: int = 1
    weights: bool = False
    lora: LoraSlots | None = None
    standin_cuda: bool = False
    args: tuple[str, ...] = ()
    environ: tuple[tuple[str, str], ...] = ()
    python: str | None = None
    engine: EngineKind = EngineKind.VLLM


@dataclass
class PoolPage:
    """A control page, and who writes what no engine of the pool writes on it."""

    control: ControlPage
    node: StandInNode

    def close(self) -> None:
        self.node.stop()
        self.control.close()


@dataclass
class Started:
    """One engine as tests see it. Its process may be another one after a test that left it dirty.

    `process` belongs to the pool's loop: nothing of it can be awaited elsewhere.
    """

    of: PoolSpec
    spec: EngineSpec
    page: PoolPage | None
    published: PolicyVersions | None
    epochs: Iterator[int] = field(default_factory=lambda: count(1))
    process: EngineProcess | None = None
    ready: "Future[Any] | None" = None
    spawned: threading.Event = field(default_factory=threading.Event)
    spent: str = ""

    @property
    def url(self) -> str:
        return self.spec.url

    @property
    def control(self) -> ControlPage:
        """The page that it is on."""
        assert self.page is not None
        return self.page.control

    @property
    def node(self) -> StandInNode:
        """Node that grants on its page."""
        assert self.page is not None
        return self.page.node

    @property
    def versions(self) -> PolicyVersions:
        """Versions published for it."""
        assert self.published is not None
        return self.published

    @property
    def running(self) -> EngineProcess:
        assert self.process is not None
        return self.process

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a control request."""
        return self.running.headers

    @property
    def pid(self) -> int:
        """Process id of its API process, which leads its group."""
        return self.running.process.pid

    @property
    def ended(self) -> bool:
        return self.running.process.returncode is not None

    @property
    def core(self) -> psutil.Process:
        """The process that computes."""
        family = psutil.Process(self.pid).children(recursive=True)
        return next(child for child in family if "EngineCore" in child.name())

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""
        os.killpg(self.pid, number)

    def spend(self, why: str) -> None:
        """Say that it is of no use to anybody after this test."""
        self.spent = why


class EnginePool:
    """All engines of a session. `plan`: modules in their order, by path, and what each needs."""

    def __init__(self, folder: Path, plan: dict[str, tuple[PoolSpec, ...]]) -> None:
        self._folder, self._plan = folder, plan
        self._engines: dict[PoolSpec, Started] = {}
        self._pages: dict[str, PoolPage] = {}
        self._leased: set[PoolSpec] = set()
        # The kernel ends an engine with the thread that started it.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._slots = asyncio.Semaphore(AT_ONCE)
        self.model = folder / "model"
        save_tiny_model(self.model, dtype="float32")
        save_byte_tokenizer(self.model)
        self._worded: dict[str, Path] = {"": self.model}

    def worded(self, tokenizer: str) -> Path:
        """Folder of a model whose every token has a text of this tokenizer."""
        folder = self._folder / f"worded-{len(self._worded)}"
        visions = {VISION: save_vision_model, QWEN_VISION: save_qwen_vision_model}
        if tokenizer in visions and tokenizer not in self._worded:
            visions[tokenizer](folder, "float32")
            self._worded[tokenizer] = folder
        elif tokenizer not in self._worded:
            size = BYTES + 1
            if tokenizer != "bytes":
                # Beside a model's config, Transformers takes the tokenizer of its family.
                kind, template = tokenizer.split("/")
                size = save_tokenizer(kind, folder / "tokenizer", TEMPLATES[template])
            made = replace(FLEET_MODEL, dtype="float32", vocabulary=size, eos_token_id=size - 1)
            made.save(folder, words=False)
            if tokenizer == "bytes":
                save_byte_tokenizer(folder)
            self._worded[tokenizer] = folder
        return self._worded[tokenizer]

    def close(self) -> None:
        self._end(list(self._engines))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def start_early(self, module: str) -> None:
        """Begin what the next modules need; returns once that runs, long before it serves."""
        later = next((m for m in self._after(module) if self._needs(m)), None)
        if later is not None:
            wanted = [*self._needs(later), *self._alike(later, self._needs(later))]
            # An engine that waited for its turn would start in the environment of some test.
            for started in self._begin([*dict.fromkeys(wanted)][:AT_ONCE]):
                started.spawned.wait(START_S)

    @contextmanager
    def lease(self, module: str, specs: Sequence[PoolSpec]) -> Iterator[list[Started]]:
        """Engines for this module alone; those of the next modules of its kind start with them."""
        assert not self._leased & set(specs), "engines are one module's at a time"
        self._end([spec for spec, engine in self._engines.items() if engine.spent])
        self._begin([*specs, *self._alike(module, specs)])
        self._await(specs)
        self._leased |= set(specs)
        try:
            yield [self._engines[spec] for spec in specs]
        finally:
            self._leased -= set(specs)
            needed = {spec for later in self._after(module) for spec in self._needs(later)}
            self._end([spec for spec in self._engines if spec not in needed])

    def faults(self, engines: Iterable[Started], *, at_the_end: bool = False) -> list[str]:
        """Return its differences from the state before a test, after some patience; it is replaced
        then.

        at_the_end: of a module, which has to leave the model's own weights.
        """
        found = []
        for started in engines:
            if started.spent:
                continue
            if said := self._run(_settled(started, at_the_end)):
                found += [f"{started.of.name}: {fault}" for fault in said]
                self._replace(started)
        return found

    def renew(self, started: Started) -> None:
        """Start an engine anew that a test has ended."""
        self._replace(started)
        started.spent = ""

    def _alike(self, module: str, specs: Sequence[PoolSpec]) -> list[PoolSpec]:
        """Return the needs of the next modules that begin with the same engine."""
        alike: list[PoolSpec] = []
        for later in self._after(module):
            if self._needs(later)[:1] != (specs[0],):
                break
            alike += self._needs(later)
        return alike

    def _needs(self, module: str) -> tuple[PoolSpec, ...]:
        return self._plan[module]

    def _after(self, module: str) -> list[str]:
        modules = list(self._plan)
        return modules[modules.index(module) + 1 :]

    def _begin(self, specs: Iterable[PoolSpec]) -> list[Started]:
        """Start the ones that do not run yet."""
        new = [self._made(spec) for spec in dict.fromkeys(specs) if spec not in self._engines]
        for started in new:
            self._engines[started.of] = started
            started.ready = self._submit(self._start(started))
        return new

    def _await(self, specs: Iterable[PoolSpec]) -> None:
        """Return once all that was begun serves; one that did not come up is not tried again."""
        failed = {spec: e.ready.exception() for spec, e in self._engines.items() if e.ready}
        if said := "; ".join(str(failed[spec]) for spec in specs if failed.get(spec)):
            raise EngineStartError(said)

    def _made(self, spec: PoolSpec) -> Started:
        folder = self._folder / "-".join(filter(None, [spec.name, "other" if spec.python else ""]))
        folder.mkdir(exist_ok=True)
        page = self._page(spec) if spec.page else None
        model = self.worded(spec.tokenizer)
        published = PolicyVersions(folder / "store", model) if spec.weights else None
        found: tuple[tuple[str, str], ...] = ()
        if page and spec.role is EngineRole.HOST:
            at = page.control.path
            found = ("ROSE_HOST_DIR", str(at.parent)), ("ROSE_HOST_NAME", at.stem)
        engine_spec = EngineSpec(
            name=spec.served or spec.name,
            role=spec.role,
            engine=spec.engine,
            model_dir=model,
            port=free_port(),
            log=folder / "engine.log",
            dtype="float32",
            kv_bytes=spec.kv_bytes,
            kv_backend=spec.kv_backend,
            stream_interval=spec.stream_interval,
            # A host makes itself known in the folder of its page, as a node would find it.
            control_page=page.control.path if page and not found else None,
            orphan_s=2.0,
            verify_key=published.key.verify_key.hex if published else None,
            weights_dir=published.folder if published else None,
            lora=spec.lora,
            extra_args=(*spec.args, *_tokenizer_of(model)),
            **_environment(replace(spec, environ=(*spec.environ, *found)), folder),
        )
        return Started(spec, engine_spec, page, published)

    def _page(self, spec: PoolSpec) -> PoolPage:
        """The page of this name; engines of another interpreter have their own."""
        name = f"{spec.page}-{'other' if spec.python else 'here'}"
        if name not in self._pages:
            folder = self._folder / f"shared-{name}"
            folder.mkdir()
            control = ControlPage.create(page_of(str(folder), HOST_NAME))
            planned = {other for specs in self._plan.values() for other in specs}
            hosts = {other.page for other in planned if other.role is EngineRole.HOST}
            self._pages[name] = PoolPage(
                control, StandInNode(control, real_host=spec.page in hosts)
            )
            self._pages[name].node.start()
        return self._pages[name]

    async def _start(self, started: Started) -> None:
        async with self._slots:
            try:
                started.process = await EngineProcess.start(started.spec)
            finally:
                started.spawned.set()
            await started.process.wait_healthy(START_S)
        if started.of.role.is_replica:
            async with aiohttp.ClientSession(timeout=LOOK) as http:
                body = {"epoch": next(started.epochs)}
                url, headers = f"{started.url}/rose/v1/admit", started.headers
                async with http.post(url, json=body, headers=headers) as answer:
                    answer.raise_for_status()

    def _replace(self, started: Started) -> None:
        self._stop([started])
        started.epochs = count(1)
        if started.page is not None:
            started.page.node.reset()
        if started.published is not None:
            started.published.begin_anew()
        self._run(self._start(started))

    def _end(self, specs: Iterable[PoolSpec]) -> None:
        self._stop([self._engines.pop(spec) for spec in specs])
        pages = [started.page for started in self._engines.values()]
        for name in [name for name, page in self._pages.items() if page not in pages]:
            self._pages.pop(name).close()

    def _stop(self, engines: Sequence[Started]) -> None:
        async def stop() -> None:
            for started in engines:
                if started.ready is not None:
                    started.ready.cancel()
            running = [started for started in engines if started.process is not None]
            for started in running:
                with suppress(ProcessLookupError):
                    started.signal(signal.SIGCONT)
            await asyncio.gather(*(started.running.stop() for started in running))

        self._run(stop())

    def _submit(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self._submit(coroutine).result()


def _tokenizer_of(model: Path) -> tuple[str, ...]:
    folder = model / "tokenizer"
    return (f"--tokenizer={folder}",) if folder.exists() else ()


def _environment(spec: PoolSpec, folder: Path) -> dict[str, Any]:
    """Interpreter and environment: tests' own modules can be named in `args`."""
    how = run_by(spec.python, folder)
    here = Path(__file__).parent
    theirs = how.get("extra_env", {}).get("PYTHONPATH", "")
    path = [str(here), str(here.parents[1]), theirs, os.environ.get("PYTHONPATH", "")]
    environ = {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        # Tests' clients keep connections for 15 s. Engines would close them after 5 s.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
        "SGLANG_TIMEOUT_KEEP_ALIVE": "60",
    }
    if spec.standin_cuda:
        environ["LD_LIBRARY_PATH"] = build(folder)["LD_LIBRARY_PATH"]
    return {"python": how.get("python"), "extra_env": environ | dict(spec.environ)}


async def _settled(started: Started, at_the_end: bool) -> list[str]:
    """Return the faults that remain when patience is over."""
    now_s = asyncio.get_running_loop().time
    deadline_s = now_s() + SETTLE_S
    async with aiohttp.ClientSession(timeout=LOOK) as http:
        while True:
            if started.ended:
                return [f"it ended: {started.running.last_words()}; see {started.spec.log}"]
            try:
                found = await _faults(started, http, at_the_end)
            except (aiohttp.ClientError, TimeoutError) as error:
                found = [f"it does not answer: {error!r}"]
            if not found or now_s() >= deadline_s:
                return found
            await asyncio.sleep(POLL_S)


async def _faults(started: Started, http: aiohttp.ClientSession, at_the_end: bool) -> list[str]:
    found: dict[str, object] = {}
    if started.of.role.is_replica:
        found |= await _of_a_replica(started, http, at_the_end)
    else:
        async with http.get(f"{started.url}/metrics") as answer:
            found |= _of_metrics(await answer.text())
    if started.page is not None:
        found |= _of_a_page(started, started.page)
    return [f"{what}: {said}" for what, said in found.items() if said]


async def _of_a_replica(
    started: Started, http: aiohttp.ClientSession, at_the_end: bool
) -> dict[str, object]:
    async with http.get(f"{started.url}/rose/v1/state") as answer:
        state = await answer.json()
    published = started.published
    version = published.version if published else 0
    return {
        "turns go on": state["running"] + state["waiting"],
        "other version": state["policy_version"] != version and state["policy_version"],
        "takes no turns": not state["admitting"],
        "unproven": not state["proven"],
        "not the model's own weights": at_the_end
        and published is not None
        and published.active is not published.base,
    }


def _of_metrics(text: str) -> dict[str, object]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    values = [(name.partition("{")[0], float(value)) for name, _, value in lines]
    known = {name for name, _ in values}
    missing = [name for name in BUSY_METRICS if name not in known]
    return {
        "not told": ", ".join(missing),
        **{name: sum(v for n, v in values if n == name) for name in BUSY_METRICS},
    }


def _of_a_page(started: Started, page: PoolPage) -> dict[str, object]:
    if started.of.role is EngineRole.HOST:
        host = page.control.host.peek()
        return {
            "no host on its page": host is None,
            "not idle": host is not None and not host.idle,
            "KV in use": host is not None and host.kv_used,
        }
    guest = page.control.guest.peek()
    return {
        "the grant is not what it was": not page.node.generous,
        "no guest on its page": guest is None,
        "requests": guest is not None and guest.running + guest.waiting,
        # Memory that a cap took away comes back on use.
        "KV in use": guest is not None and guest.kv_used,
    }
