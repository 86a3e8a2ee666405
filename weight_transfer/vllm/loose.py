"""Loose parameters: those whose loader transforms weights are copied from a fresh load, whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weight_transfer.vllm.flat import flat_view
from weight_transfer.vllm.loader_map import LoaderMap

if TYPE_CHECKING:
    import torch


class LooseCopy:
    """One exchange of all loose parameters, that can be taken back."""

    def __init__(self, loader_map: LoaderMap, fresh: Mapping[str, torch.Tensor]) -> None:
        self._live = {name: loader_map.parameter(name) for name in fresh}
        self._fresh = fresh
        self._old: dict[str, torch.Tensor] = {}

    def write(self) -> tuple[str, ...]:
        """Copy in place, so that nobody's pointer dangles; returns those that read otherwise."""
        import torch

        wrong = []
        with torch.inference_mode():
            for name, live in self._live.items():
                self._old.setdefault(name, flat_view(live).clone())
                fresh = self._fresh[name]
                if (live.shape, live.stride()) != (fresh.shape, fresh.stride()):
                    wrong.append(name)
                    continue
                flat_view(live).copy_(flat_view(fresh))
                if not torch.equal(flat_view(live), flat_view(fresh)):
                    wrong.append(name)
        return tuple(wrong)

    def write_back(self) -> None:
        """Put back what `write` found."""
        import torch

        with torch.inference_mode():
            for name, old in self._old.items():
                flat_view(self._live[name]).copy_(old)
