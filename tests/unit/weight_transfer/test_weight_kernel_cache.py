"""A kernel is compiled also where it can be kept nowhere: no home, an install that is read-only."""

import numba.core.caching
import numpy as np
import pytest

from weight_transfer.kernels.simd import compiled


def test_a_kernel_without_a_folder_to_keep_it_in_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(numba.core.caching.CacheImpl, "_locator_classes", [])

    @compiled
    def twice(number: np.int64) -> int:
        return 2 * number

    assert twice(21) == 42
