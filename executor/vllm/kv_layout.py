"""Where the KV blocks of an engine lie in memory, read from what its vLLM allocated.

0.32 has one allocation, and its configuration says where layer l of block b begins in it. 0.25
allocates for each layer, or once with a stride (`reserved_worker.py` asks for that), and a layer's
tensor says where its blocks are: they come first in every layout that 0.25 has on CPU and NVIDIA.

The tensors belong to the attention layers, which the configuration names: a worker inside the
engine core (UniProcExecutor) shares these with the scheduler. A worker elsewhere leaves nothing
here to find.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from executor.host_pages import Extent


class Storage(NamedTuple):
    """One allocation of `size` bytes, on a kind of device."""

    device: str
    address: int
    size: int


class KvLayout(NamedTuple):
    """The allocations of a KV cache, and each layer's part of them."""

    storages: tuple[Storage, ...]
    extents: tuple[Extent, ...]


def kv_bytes(kv_cache_config: Any) -> int:  # noqa: ANN401 -- vLLM's type
    """Size of the KV cache, wherever it lies."""
    tensors = kv_cache_config.kv_cache_tensors
    sizes: list[int] = [tensor.size for tensor in tensors]
    if any(hasattr(tensor, "layers") or tensor.block_stride for tensor in tensors):
        return max(sizes)  # Each names the one allocation that they share.
    return sum(sizes)


def kv_layout(
    vllm_config: Any,  # noqa: ANN401 -- vLLM's types
    kv_cache_config: Any,  # noqa: ANN401 -- vLLM's types
) -> KvLayout | None:
    """None where the memory is out of reach or blocks overlay each other (several KV groups)."""
    if len(kv_cache_config.kv_cache_groups) != 1:
        return None
    layers = vllm_config.compilation_config.static_forward_context
    parts = [
        _by_configuration(tensor, layers, kv_cache_config)
        if hasattr(tensor, "layers")
        else _by_tensor(tensor, layers, kv_cache_config)
        for tensor in kv_cache_config.kv_cache_tensors
    ]
    found = [part for part in parts if part is not None]
    if not found or len(found) < len(parts):
        return None
    storages = dict.fromkeys(storage for part in found for storage in part.storages)
    return KvLayout(tuple(storages), tuple(extent for part in found for extent in part.extents))


def _by_configuration(tensor: Any, layers: Mapping[str, Any], config: Any) -> KvLayout | None:  # noqa: ANN401
    cache = _cache_of(tensor.layers, layers)
    storage = None if cache is None else _storage_of(cache, tensor.size)
    if storage is None:
        return None
    first = storage.address + tensor.offset
    extents = tuple(
        Extent(first + layer * tensor.layer_stride, tensor.block_stride, _page_bytes(config))
        for layer in range(len(tensor.layers))
    )
    return KvLayout((storage,), extents)


def _by_tensor(tensor: Any, layers: Mapping[str, Any], config: Any) -> KvLayout | None:  # noqa: ANN401
    cache = _cache_of(tensor.shared_by, layers)
    storage = None if cache is None else _storage_of(cache)
    if cache is None or storage is None:
        return None
    # A kernel may see a block as several of its own.
    kernel_blocks, rest = divmod(cache.shape[0], config.num_blocks)
    if rest or cache.stride(0) != max(cache.stride()):
        return None
    stride = kernel_blocks * cache.stride(0) * cache.element_size()
    return KvLayout((storage,), (Extent(cache.data_ptr(), stride, _page_bytes(config)),))


def _cache_of(names: list[str], layers: Mapping[str, Any]) -> Any:  # noqa: ANN401 -- a tensor
    """The tensor of the first layer that has one in this process, None without any."""
    caches = (getattr(layers.get(name), "kv_cache", None) for name in names)
    return next((cache for cache in caches if getattr(cache, "device", None) is not None), None)


def _storage_of(cache: Any, size: int | None = None) -> Storage | None:  # noqa: ANN401 -- a tensor
    """The allocation under it; None where that is not of the size that was asked for."""
    storage = cache.untyped_storage()
    if size is not None and storage.nbytes() != size:
        return None
    return Storage(cache.device.type, storage.data_ptr(), storage.nbytes())


def _page_bytes(config: Any) -> int:  # noqa: ANN401 -- vLLM's types
    (group,) = config.kv_cache_groups
    size: int = group.kv_cache_spec.page_size_bytes
    return size
