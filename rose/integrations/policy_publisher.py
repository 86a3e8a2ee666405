"""PolicyPublisher: the blocking publisher that every trainer's plugin is built on.

    start     the root holds versions: continue from the newest
              the root and the job have none: version 0 is the checkpoint
              only the job has some: the next publication is a whole base that replaces them
    publish   named tensors, on all ranks together --> durable, announced, served by `replicas`

The first rank publishes; the others take part, and raise what it raises.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rose.addresses import free_ports
from rose.client.blocking import LoopThread
from rose.client.client import RolloutClient
from rose.client.errors import RequestRefused, RolloutError
from rose.errors import ConfigError, NotAnnouncedError, RefusedError, UnavailableError
from rose.integrations.lora import LoraSettings, NamedAdapter, digest_of_base
from rose.integrations.named_weights import Named, NamedWeights, ties_embeddings
from rose.integrations.ranks import from_first, rank
from rose.integrations.settings import TrainerSettings
from rose.weight_distribution import PublisherSettings, Receipt, WeightPublisher
from weight_transfer import Adapter, TensorBits, WeightError, read_model_dir

_log = logging.getLogger(__name__)
LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class PolicyReceipt:
    """Record of one published version: its size, and how long each stage took.

    wire_bytes: bytes that cross a link once. full_bytes: bytes of all weights. density: share of
    weights that changed. publish_s: seconds until the version was announced. served_s: seconds from
    then until enough replicas served it, 0 without a wait.
    """

    version: int
    wire_bytes: int
    full_bytes: int
    density: float
    publish_s: float
    served_s: float


class PolicyPublisher:
    """Publisher of a policy's versions, for blocking code in one process or on all ranks of a
    trainer.

    A pickle of it holds its settings alone, and it starts on first use. Each wait is bounded by
    `settings.timeout_s`, and its error says what it waited for. Raises `RoseError` with one line.
    """

    def __init__(self, settings: TrainerSettings) -> None:
        self.settings = settings
        self._thread: LoopThread | None = None
        self._publisher: WeightPublisher | None = None
        self._base: Mapping[str, TensorBits] | None = None
        self._bits: Mapping[str, TensorBits] | None = None
        self._version = 0
        # First version of this run; older ones are another run's.
        self._first = 0
        self._resumed = False
        # Digest of the base, which adapters name; computed once, of all weights.
        self._base_name = ""
        self.receipts: list[PolicyReceipt] = []
        """Receipts of the versions that this process published, oldest first."""

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.settings,)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def version(self) -> int:
        """Number of the newest published version, 0 before the first.

        Starts the publisher if it never ran.
        """
        self._of_base()
        return self._version

    @property
    def oldest_allowed(self) -> int:
        """Oldest version that rollouts may still use: `max_staleness` before the newest, and none
        of an earlier run of the job.
        """
        return max(self._first, self.version - self.settings.max_staleness, 0)

    @property
    def resumed(self) -> bool:
        """True if the job continues from a version that an earlier process published.

        Starts the publisher if it never ran.
        """
        self._of_base()
        return self._resumed

    def start(self) -> None:
        """Register the job with the scheduler and load its newest version from `root`.

        Only the first rank does so, and only once; other calls do nothing. Raises `ConfigError`,
        `UnavailableError`, `RunHeldError`.
        """
        if self._thread is not None or rank() != 0:
            return
        self._base = _read(self.settings)
        self._thread = LoopThread("rose-publisher")
        try:
            self._thread.call(self._begin(self._base))
        except BaseException:
            self.close()
            raise

    def publish(
        self,
        named: Named,
        *,
        wait: bool = True,
        collective: bool = True,
        lora: LoraSettings | None = None,
    ) -> int:
        """Publish a version made of these named tensors, and return its number.

        lora: they are those of a LoRA adapter by PEFT's names, with these settings.

        collective: every rank calls this with all names, in the same order; DTensors are gathered
        one by one, and all ranks get the number. False: the trainer calls the first rank alone, and
        the others walk the tensors themselves. wait: return only when `settings.replicas` replicas
        serve the version. Raises `UnfitWeightsError`, `RunFencedError`, `UnavailableError`.
        """
        failed: Exception | None = None
        base: Mapping[str, TensorBits] = {}
        try:
            base = self._of_base()
        except Exception as error:  # noqa: BLE001 - raised below, once nobody waits for this rank
            failed = error
        keep = rank() == 0 and failed is None
        weights: NamedWeights | NamedAdapter
        if lora is None:
            tied, frozen = ties_embeddings(self.settings.checkpoint), self.settings.frozen
            weights = NamedWeights(base, tied=tied, frozen=frozen)
        else:
            if keep and not self._base_name:
                self._base_name = digest_of_base(base)
            weights = NamedAdapter(base, lora, self._base_name)
        # Gather before anything may raise: gathering is collective.
        weights.take(named, keep=keep)

        def work() -> tuple[int, int]:
            if failed is not None:
                raise failed
            new = weights.finish()
            adapter = weights.adapter if isinstance(weights, NamedAdapter) else None
            self._publish(new, adapter, wait=wait)
            return self.known

        self.known = from_first(work, "the first rank published nothing") if collective else work()
        return self._version

    def restore(self) -> Mapping[str, TensorBits]:
        """Return the tensors of the newest version by name, for a trainer without a checkpoint of
        its own.

        A new job has the checkpoint's. Call it on the first rank alone, and do not write to the
        tensors. Raises `RefusedError` if the job has versions and `root` holds none.
        """
        self.start()
        if self._bits is None:
            raise RefusedError("its root holds no version; begin from the trainer's own weights")
        return self._bits

    def wait_served(self, version: int, replicas: int | None = None) -> None:
        """Block until this many replicas (default `settings.replicas`) serve the version or a newer
        one. A version that no scheduler knows yet is announced first.

        Raises `UnavailableError` after `settings.timeout_s`.
        """
        wanted = self.settings.replicas if replicas is None else replicas
        self.start()
        if self._thread is not None:
            self._thread.call(self._served(version, wanted))

    def close(self) -> None:
        """Stop serving versions to nodes.

        Published versions stay in `root`, from which another process may continue.
        """
        thread, self._thread = self._thread, None
        publisher, self._publisher = self._publisher, None
        if thread is not None and thread.alive:
            if publisher is not None:
                thread.call(publisher.close())
            thread.stop()

    @property
    def known(self) -> tuple[int, int]:
        """Pair of the newest version and the first version of this run, which the first rank sends
        to the other ranks.
        """
        return self._version, self._first

    @known.setter
    def known(self, versions: tuple[int, int]) -> None:
        self._version, self._first = versions

    # ---- on the first rank ----

    def _of_base(self) -> Mapping[str, TensorBits]:
        """Return the checkpoint's tensors, and start the publisher if it never ran.

        After `close` it is not started again.
        """
        if self._base is None:
            self.start()
            self._base = self._base or {}
        return self._base

    async def _begin(self, base: Mapping[str, TensorBits]) -> None:
        settings = self.settings
        self._publisher = WeightPublisher(
            settings.job,
            settings.scheduler,
            settings.root,
            settings.port or free_ports(1)[0],
            settings.signing_key(),
            settings.max_staleness,
            PublisherSettings(
                host=settings.host,
                certificates=settings.certificates(),
                take_over=settings.take_over,
                checkpoint=settings.checkpoint,
                bucket=settings.bucket,
            ),
        )
        begun = await self._publisher.start()
        if begun.resumed is not None:
            self._bits = await self._restored(self._publisher)
        if self._bits is not None and begun.resumed is not None:
            self._version, self._resumed = begun.resumed, True
        else:
            self._version = begun.latest
            self._first = begun.latest + 1 if begun.latest else 0
            self._bits = None if begun.latest else base

    async def _restored(self, publisher: WeightPublisher) -> Mapping[str, TensorBits] | None:
        """Return the tensors of the newest version in `root`; None if there is none, or if its
        files are incomplete or damaged.
        """
        try:
            return await publisher.restore()
        except (WeightError, OSError) as error:
            _log.warning("%s cannot be gone on from: %s", self.settings.root, error)
            return None

    def _publish(
        self, new: Mapping[str, TensorBits], adapter: Adapter | None, *, wait: bool
    ) -> None:
        assert self._thread is not None
        began_s = time.perf_counter()
        receipt = self._thread.call(self._put(new, adapter))
        self._version, self._bits = receipt.version, new
        served_s = time.perf_counter()
        if wait:
            self.wait_served(receipt.version)
        now_s = time.perf_counter()
        self.receipts.append(
            PolicyReceipt(
                receipt.version,
                receipt.wire_bytes,
                receipt.full_bytes,
                receipt.density,
                served_s - began_s,
                now_s - served_s,
            )
        )

    async def _put(self, new: Mapping[str, TensorBits], adapter: Adapter | None) -> Receipt:
        assert self._publisher is not None
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                if adapter != self._publisher.adapter:
                    self._publisher.adapter, self._bits = adapter, None
                if self._bits is None or _layout(self._bits) != _layout(new):
                    return await self._publisher.publish_anew(self._version + 1, new)
                version, old = self._version, self._bits
                return await self._publisher.publish(version + 1, version, old, new)
        except NotAnnouncedError:
            # The version is durable: the next publication continues from it.
            self._version, self._bits = self._version + 1, new
            raise
        except (WeightError, OSError) as error:
            raise RefusedError(f"version {self._version + 1} is not published: {error}") from error
        except TimeoutError:
            raise UnavailableError(
                f"version {self._version + 1} was not published within {self.settings.timeout_s:g}"
                f" s; look at the disk of {self.settings.root} and at the scheduler"
            ) from None

    async def _served(self, version: int, wanted: int) -> None:
        if self._publisher is not None:
            await self._publisher.announce_late()
        if not wanted:
            return
        seen = "no answer yet"
        try:
            async with (
                asyncio.timeout(self.settings.timeout_s),
                RolloutClient(
                    self.settings.gateway,
                    credentials=self.settings.credentials(),
                    job=self.settings.job,
                ) as client,
            ):
                while True:
                    try:
                        reply = await client.versions()
                    except RequestRefused as error:
                        raise RefusedError(
                            f"the gateway cannot say what is served: {error}"
                        ) from error
                    except RolloutError as error:
                        seen = f"the gateway does not answer: {error}"
                    else:
                        serving = reply.serving(version, self.settings.job)
                        if serving >= wanted:
                            return
                        seen = f"{serving} of {wanted} do ({len(reply.replicas)} replicas known)"
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise UnavailableError(
                f"version {version} is published and not served after"
                f" {self.settings.timeout_s:g} s: {seen}; ask `rose status`"
            ) from None


def _layout(tensors: Mapping[str, TensorBits]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


def _read(settings: TrainerSettings) -> Mapping[str, TensorBits]:
    try:
        return read_model_dir(settings.checkpoint)
    except (WeightError, OSError) as error:
        raise ConfigError(f"{settings.checkpoint} is no checkpoint: {error}") from error
