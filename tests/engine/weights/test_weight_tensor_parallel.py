"""Real vLLM at tensor parallel size 2: two processes, one copy of the checkpoint, one decode."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_starts import EngineStarts
from test_adapters import greedy, load, slot, stock
from test_weight_apply import ServedEngine, proofs_hold, served_model, sgd_like

from tests.harness.adapters import adapter_of, moved, settings_of
from weight_transfer.apply.replica_weights import merged

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, engine_starts: EngineStarts
) -> Iterator[ServedEngine]:
    engine_starts.note()
    with over_two_ranks(tmp_path_factory.mktemp("ranks")) as served:
        yield served


@contextmanager
def over_two_ranks(root: Path, **options: Any) -> Iterator[ServedEngine]:
    place = str(root / "place" / "engine")
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with served_model(root, place, **ranks, **options) as served:
        yield served


def on_all(served: ServedEngine, method: str, *args: object) -> list[Any]:
    return list(served.llm.collective_rpc(method, args=args))


def apply(served: ServedEngine, version: int) -> dict[str, Any]:
    manifest = str(served.store.manifest_path(version))
    chunks, attempt = str(served.store.chunks_dir), secrets.token_hex(8)
    on_all(served, "rose_weights_decode", [manifest], chunks, attempt)
    assert all(answer["done"] for answer in on_all(served, "rose_weights_load"))
    report = merged(on_all(served, "rose_weights_commit"))
    on_all(served, "rose_weights_settle")
    served.llm.reset_prefix_cache()
    return report


def segments(label: str) -> list[set[str]]:
    """Return the segments of this label that each process maps, if any."""
    found = []
    for process in psutil.Process().children(recursive=True):
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        mine = {line.split()[4] for line in maps if f"memfd:{label}" in line}
        if mine:
            found.append(mine)
    return found


def test_two_ranks_follow_versions_on_one_copy(served: ServedEngine) -> None:
    before = served.greedy()
    new = sgd_like(served.base, seed=1, size=1e-3)
    served.publisher.publish(1, 0, served.base, new)
    served.publisher.publish(2, 1, new, served.base)
    report = apply(served, 1)
    assert proofs_hold(report), report
    changed = served.greedy()
    report = apply(served, 2)
    assert proofs_hold(report), report
    assert changed != before == served.greedy()
    maps = segments("rose-weights")
    assert len(maps) == 2
    assert maps[0] == maps[1]
    assert len(maps[0]) == 1, "one memory, and both ranks have it"


def test_after_it_all_live_weights_are_the_published_ones(served: ServedEngine) -> None:
    from weight_transfer.apply.probe import Part, judge

    answers = on_all(served, "rose_weights_audit", 1 << 40, True)
    parts = [Part(t, tuple(key), n, total) for a in answers for t, key, n, total in a["parts"]]
    known = on_all(served, "rose_weights_digests")
    assert known[0] == known[1]
    assert segments("rose-update") == [], "what was decoded is gone once it is settled"
    found = judge(parts, known[0]["digests"], known[0]["elements"])
    assert (found.flipped, found.unjudged) == ((), ())


def test_each_rank_has_its_part_of_an_adapter(tmp_path: Path, engine_starts: EngineStarts) -> None:
    engine_starts.note()
    with over_two_ranks(tmp_path, enable_lora=True, max_loras=3, max_lora_rank=8) as served:
        served.publisher.adapter = settings_of(served.base)
        first = adapter_of(served.base, seed=1)
        second = moved(first, seed=2)
        served.publisher.publish_base(1, first)
        served.publisher.publish(2, 1, first, second)
        answers = []
        for version, adapter in ((1, first), (2, second)):
            load(served, version, base=version == 1)
            report = merged(on_all(served, "rose_weights_commit"))
            assert proofs_hold(report), report
            mine = slot(served.attempts)
            answers.append(greedy(served, mine))
            served.rpc("rose_adapters_drop", [mine.lora_name])
            assert stock(served, tmp_path / f"v{version}", 70 + version, adapter) == answers[-1]
        assert answers[0] != answers[1] != greedy(served)
