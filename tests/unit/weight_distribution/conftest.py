"""Pauses of readers are short in these tests."""

import pytest

from weight_transfer.fetch import download, fetcher


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fetcher, download):
        monkeypatch.setattr(module, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(fetcher, "KNOWN_WITHIN_S", 0.3)
