"""Engines listen on loopback alone: one that other machines reach gets no turns, and is ended."""

from pathlib import Path

from node_bench import Bench


async def test_an_engine_that_others_reach_is_never_offered(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "dedicated")
    (bench.folder / "open").touch()
    await bench.start()
    try:
        bench.spawn()
        ended = await bench.until_noted("engine_reclaimed")
        assert ended["reason"] == "it listens at 0.0.0.0 and not on loopback alone"
        assert bench.calls("admit") == []
        (bench.folder / "open").unlink()
        await bench.until("leased", lambda row: row.healthy and row.leased)
    finally:
        await bench.close()
