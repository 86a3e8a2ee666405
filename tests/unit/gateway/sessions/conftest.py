from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rose.gateway import Gateway
from tests.fakes.replica import StandInReplica
from tests.unit.gateway.sessions.session_cases import save_session_tokenizer, sessions_served
from tests.unit.gateway.wire_cases import ask


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_session_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving_all(tokenizer: Path) -> AsyncIterator[tuple[StandInReplica, Gateway, Any]]:
    async with sessions_served(tokenizer) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module")
async def served(serving_all: Any) -> AsyncIterator[tuple[StandInReplica, Gateway, Any]]:
    """A gateway for all of a file's tests, each of which has the session "s" for itself."""
    yield serving_all
    await ask(serving_all[2], "/finish_session", {"session_id": "s"})
