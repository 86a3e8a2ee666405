"""A scheduler over gRPC for each test that asks for one."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from service_cases import Bench, running

from tests.fakes.memory_store import InMemoryStore


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with running(Bench(InMemoryStore(), tmp_path)) as bench:
        yield bench
