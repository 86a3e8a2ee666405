"""ShardedPolicyPublisher: for a trainer whose ranks cannot gather on one of them.

    first     each rank: its shard of a whole version, a base --> first rank: signed, announced
    then      each rank: the changes of its shard             --> likewise
    stores    one folder that all ranks share, or each rank's own, served by itself

The first publication of each process is a base, so a trainer may start from any weights.
"""

import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from rose.addresses import free_port
from rose.client.blocking import LoopThread
from rose.errors import RefusedError
from rose.integrations.named_weights import SHOWN, UnfitWeightsError, checkpoint_name
from rose.integrations.policy_publisher import PolicyPublisher, PolicyReceipt
from rose.integrations.ranks import everywhere, from_first, rank
from rose.integrations.settings import TrainerSettings
from rose.weight_distribution import VersionServer
from rose.weight_distribution.credentials import OPEN
from weight_transfer import ChunkStore, Manifest, TensorBits, VersionPublisher

if TYPE_CHECKING:
    import torch

    from rose.weight_distribution import WeightPublisher
    from weight_transfer.torch import Ranks, ShardedPublisher

TRAINER = "rose-trainer"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _CheckpointFacts:
    """Facts of the checkpoint that all ranks need: shapes by name, the one dtype of weights, number
    of elements, bytes.
    """

    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    elements: int
    full_bytes: int

    @classmethod
    def of(cls, base: Mapping[str, TensorBits]) -> "_CheckpointFacts":
        """Return the facts of the checkpoint `base`.

        Raises `RefusedError` if its floating-point weights have several dtypes.
        """
        dtypes = sorted({each.dtype for each in base.values() if "float" in each.dtype})
        if len(dtypes) != 1:
            raise RefusedError(
                f"the checkpoint has weights of {' and '.join(dtypes)}; shards are published in one"
                " dtype: publish gathered (PolicyPublisher), or save the checkpoint in one"
            )
        sizes = [each.bits.nbytes for each in base.values()]
        shapes = {name: each.shape for name, each in base.items()}
        return cls(shapes, dtypes[0], sum(map(prod, shapes.values())), sum(sizes))


class ShardedPolicyPublisher(PolicyPublisher):
    """`PolicyPublisher` whose ranks each publish their own shards, so no rank holds all weights.

    Every rank creates one, with its own machine's settings. own_stores: each rank keeps its chunks
    under `root/rank-N` and serves them at its `host`; else all ranks share the folder `root`.
    """

    def __init__(self, settings: TrainerSettings, *, own_stores: bool = False) -> None:
        super().__init__(settings)
        self._own_stores = own_stores
        self._layout: _CheckpointFacts | None = None
        self._sharded: ShardedPublisher | None = None
        self._ranks: Ranks | None = None
        self._server: VersionServer | None = None
        self._serving: LoopThread | None = None
        self._unannounced: list[tuple[int, int]] = []

    def __reduce__(self) -> tuple[object, ...]:
        return _made, (self.settings, self._own_stores)

    def publish_state(self, state: "Mapping[str, torch.Tensor]", *, wait: bool = True) -> int:
        """Publish a version from a state dict of DTensors or plain tensors, and return its number
        on every rank.

        Every rank calls it together; if one fails all raise, and the next publication may succeed.
        `state` must not change until this returns. wait: return only when `settings.replicas`
        replicas serve the version. Raises `UnfitWeightsError`, `RefusedError`, `UnavailableError`.
        """
        began_s = time.perf_counter()
        if self._layout is None:
            self._layout = from_first(self._begun_layout)
            self.known = from_first(lambda: self.known)
        layout = self._layout
        fitting = everywhere(lambda: _fitting(state, layout))
        with self._adding():
            manifest = everywhere(lambda: self._put_shards(fitting, layout))
        self._unannounced.append((manifest.version, manifest.parent))
        from_first(self._announce)
        self._version = manifest.version
        if from_first(lambda: self._on_loop(lambda own: own.base_due(layout.full_bytes))):
            self._publish_base()
        announced_s = time.perf_counter()
        if wait:
            from_first(lambda: self.wait_served(manifest.version))
        self._note(manifest, layout, announced_s - began_s, time.perf_counter() - announced_s)
        return manifest.version

    def close(self) -> None:
        """Stop serving versions to nodes; published versions stay in their stores."""
        thread, self._serving = self._serving, None
        if thread is not None and thread.alive:
            if self._server is not None:
                thread.call(self._server.close())
            thread.stop()
        super().close()

    # ---- on every rank ----

    def _put_shards(
        self, state: "Mapping[str, torch.Tensor]", layout: _CheckpointFacts
    ) -> Manifest:
        import torch

        from weight_transfer.torch import Ranks, ShardedPublisher

        if self._sharded is not None:
            return self._sharded.publish(self._sharded.version + 1, state)
        settings = self.settings
        if self._ranks is None:
            self._ranks = Ranks(timeout_s=settings.timeout_s)
        store, origin = everywhere(self._opened_store)
        signer = None
        if rank() == 0:
            signer = VersionPublisher(store, settings.job, TRAINER, settings.signing_key())
        made = ShardedPublisher(
            store,
            state,
            signer,
            self._version + 1,
            origin,
            getattr(torch, layout.dtype),
            self._ranks,
        )
        manifest = made.publish_base()
        self._sharded = made
        return manifest

    def _publish_base(self) -> None:
        assert self._sharded is not None
        sharded = self._sharded
        with self._adding():
            everywhere(sharded.publish_base)

    def _opened_store(self) -> tuple[ChunkStore, str]:
        """Return this rank's chunk store and the URL at which it is served; the URL is "" if the
        first rank serves it.
        """
        settings = self.settings
        if rank() == 0 or not self._own_stores:
            return ChunkStore(settings.root), ""
        store = ChunkStore(settings.root / f"rank-{rank()}")
        if self._server is None:
            certificates = settings.certificates()
            self._serving = LoopThread("rose-shard")
            self._server = VersionServer(
                store,
                settings.port or free_port(),
                credentials=OPEN if certificates is None else OPEN.proving(certificates),
                host=settings.host,
            )
            self._serving.call(self._server.start())
        return store, self._server.url

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Keep the first rank from collecting garbage in its store while the block runs on all
        ranks.
        """
        entered: list[Any] = []

        def enter() -> None:
            assert self._publisher is not None
            entered.append(self._publisher.adding())
            self._on_loop(lambda _: entered[0].__aenter__())

        from_first(enter)
        try:
            yield
        finally:
            if entered:
                self._on_loop(lambda _: entered[0].__aexit__(None, None, None))

    # ---- on the first rank ----

    def _begun_layout(self) -> _CheckpointFacts:
        return _CheckpointFacts.of(self._of_base())

    def _announce(self) -> None:
        """Announce the new version to the scheduler, after any earlier ones whose announcement
        failed.
        """
        while self._unannounced:
            version, parent = self._unannounced[0]
            self._on_loop(lambda own: own.announce(version, parent))  # noqa: B023 - called at once
            self._unannounced.pop(0)

    def _on_loop(self, ask: "Callable[[WeightPublisher], Coroutine[Any, Any, T]]") -> T:
        assert self._thread is not None
        assert self._publisher is not None
        return self._thread.call(ask(self._publisher))

    def _note(
        self, manifest: Manifest, layout: _CheckpointFacts, publish_s: float, served_s: float
    ) -> None:
        if rank() != 0:
            return
        wire = manifest.wire_bytes + manifest.size
        density = manifest.changed / max(1, layout.elements)
        self.receipts.append(
            PolicyReceipt(manifest.version, wire, layout.full_bytes, density, publish_s, served_s)
        )


def _fitting(
    state: "Mapping[str, torch.Tensor]", layout: _CheckpointFacts
) -> "dict[str, torch.Tensor]":
    """Return the tensors of a state dict that the checkpoint has, by the checkpoint's names.

    Raises `UnfitWeightsError` for missing, unknown or differently shaped ones.
    """
    named = {checkpoint_name(name): tensor for name, tensor in state.items()}
    fitting = {name: tensor for name, tensor in named.items() if name in layout.shapes}
    kept = {_place(tensor) for tensor in fitting.values()}
    troubles = [
        f"the checkpoint has no {name}"
        for name, tensor in named.items()
        if name not in fitting and _place(tensor) not in kept
    ]
    troubles += [f"the trainer does not give {name}" for name in layout.shapes if name not in named]
    troubles += [
        f"{name} is {tuple(tensor.shape)}, not {layout.shapes[name]}"
        for name, tensor in fitting.items()
        if tuple(tensor.shape) != layout.shapes[name]
    ]
    if troubles:
        raise UnfitWeightsError("; ".join(sorted(troubles)[:SHOWN]))
    return fitting


def _place(tensor: "torch.Tensor") -> object:
    """Return the memory address of a tensor's local part, which tied names share; None if this rank
    holds no part.
    """
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.data_ptr() if local.numel() else None


def _made(settings: TrainerSettings, own_stores: bool) -> ShardedPolicyPublisher:
    return ShardedPolicyPublisher(settings, own_stores=own_stores)
