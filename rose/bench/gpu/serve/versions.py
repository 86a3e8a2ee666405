"""Versions of a guest's weights: the trainer's side, without a trainer."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from rose.bench.gpu.errors import PieceError
from weight_transfer import ChunkStore, Publisher, SigningKey, TensorBits, read_safetensors

CHANGED = 0.02
APPLY_TIMEOUT_S = 240.0


class GuestVersions:
    """Publishes steps there and back between two sets of weights, and has a guest apply them."""

    def __init__(self, weights: Path, folder: Path, key: SigningKey, seed: int) -> None:
        """`weights`: version 0, a safetensors file. Reads all of it."""
        self._store = ChunkStore(folder)
        self._publisher = Publisher(self._store, job="gpu", trainer="bench", key=key)
        base = read_safetensors(weights)
        self._sets = base, stepped(base, seed)
        self.published = 0

    def publish(self) -> dict[str, Any]:
        """Publish the next version; what that took."""
        version = self.published + 1
        began_s = time.perf_counter()
        old, new = self._sets[self.published % 2], self._sets[version % 2]
        manifest = self._publisher.publish(version, self.published, old, new)
        self.published = version
        return {
            "publish_s": time.perf_counter() - began_s,
            "changed_share": manifest.changed / sum(t.bits.size for t in old.values()),
            "wire_bytes": manifest.wire_bytes,
        }

    async def apply(
        self, http: aiohttp.ClientSession, url: str, headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Have the guest apply the newest one; its report. Raises PieceError in one line."""
        body = {
            "manifest": str(self._store.manifest_path(self.published)),
            "chunks": str(self._store.chunks_dir),
        }
        timeout = aiohttp.ClientTimeout(total=APPLY_TIMEOUT_S)
        began_s = time.monotonic()
        try:
            async with http.post(
                f"{url}/rose/v1/weights/apply", json=body, timeout=timeout, headers=headers
            ) as answer:
                report: dict[str, Any] = await answer.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise PieceError(f"the guest did not answer an update: {error!r}") from error
        if answer.status != 200 or report.get("version") != self.published:
            raise PieceError(f"version {self.published} is not active: {answer.status} {report}")
        return report | {"applied_s": time.monotonic() - began_s}


def stepped(base: Mapping[str, TensorBits], seed: int) -> dict[str, TensorBits]:
    """The same weights after a step that moves about CHANGED of them by one unit."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, tensor in base.items():
        bits = tensor.bits.copy()
        moved = rng.integers(0, bits.size, max(1, int(CHANGED * bits.size)))
        bits[moved] = tensor.bits[moved] ^ 1
        new[name] = TensorBits(name, tensor.dtype, tensor.shape, bits)
    return new
