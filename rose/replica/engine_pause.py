"""The engine's pause, as `AsyncLLM.pause_generation` asks for it, without the sleep at its end.

That is 20 ms, so that a caller has seen the last outputs first. Versions do not depend on that:
tokens are stamped by the engine, or counted where they come in (`stamps`).
"""

from typing import Any


async def pause(engine: Any, *, clear_cache: bool) -> None:  # noqa: ANN401 -- vLLM's AsyncLLM
    """Return once no step is in flight; requests stay where they are and go on when it resumes."""
    if clear_cache:
        await engine.renderer.clear_mm_cache_async()
    await engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=clear_cache)
