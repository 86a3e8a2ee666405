"""What torch says of the device that it uses."""

from typing import Any

from rose.bench.gpu.errors import PieceError


def insist_device(place: str) -> None:
    """Raise PieceError when torch cannot use it."""
    import torch

    if place.startswith("cuda") and not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"is built for CUDA {built}" if built else "is built without CUDA"
        raise PieceError(
            f"torch {torch.__version__} {why} and sees no GPU; use a Python whose torch does"
        )


def told(place: str) -> dict[str, Any]:
    """Name, capability and CUDA of a torch device."""
    import torch

    if not place.startswith("cuda"):
        return {"device": {"name": place}}
    properties = torch.cuda.get_device_properties(place)
    return {
        "device": {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "torch_cuda": torch.version.cuda,
            "most_bytes_allocated": torch.cuda.max_memory_allocated(place),
        }
    }
