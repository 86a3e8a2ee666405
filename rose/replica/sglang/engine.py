"""SGLang's TokenizerManager as a replica's engine; its scheduler is called by `scheduler_calls`."""

import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from rose.contract.replica import GenerateBody
from rose.replica.engine import MOST_WARM_UP_TOKENS, WarmUpSizes
from rose.replica.sglang.requests import EngineRequest, SglangError
from rose.replica.token_versions import KvStaleness
from rose.tracing import TraceContext
from weight_transfer.apply.shared_segment import ranks_folder

KEPT_TOKENS: Final = 6
"""Tokens of a model's length that SGLang keeps for itself: a longer prompt is refused."""


class SglangEngine:
    """A TokenizerManager, in the process that serves HTTP."""

    failures: tuple[type[Exception], ...] = (SglangError,)
    updatable = True

    def __init__(self, manager: Any, arguments: Any, kv_tokens: int) -> None:  # noqa: ANN401 -- SGLang's
        """arguments: its ServerArgs."""
        self._manager = manager
        self._arguments = arguments
        self.kv_tokens = kv_tokens
        self.model_dir = str(arguments.model_path)
        self._ends = ends_of(manager, Path(self.model_dir))

    @property
    def sizes(self) -> WarmUpSizes:
        chunk = self._arguments.chunked_prefill_size or MOST_WARM_UP_TOKENS
        return WarmUpSizes(
            self._arguments.max_running_requests or 1,
            int(self._manager.context_len) - KEPT_TOKENS,
            min(chunk, MOST_WARM_UP_TOKENS),
            int(self._manager.model_config.vocab_size),
        )

    async def start(
        self, body: GenerateBody, ages: KvStaleness, trace: TraceContext | None = None
    ) -> EngineRequest:
        del trace  # SGLang sends spans of its own requests; a turn's come from the gateway.
        return await EngineRequest.start(self._manager, body, ages, self._ends)

    async def abort(self, requests: Sequence[EngineRequest]) -> None:
        for request in requests:
            request.end()

    async def pause(self, *, clear_cache: bool) -> None:
        await self.call_all("pause", clear_cache)

    async def resume(self) -> None:
        await self.call_all("resume")

    async def activate(self, version: int) -> None:
        await self.call_all("activate", version)

    async def call_all(self, method: str, *args: object) -> list[dict[str, Any]]:
        from sglang.srt.managers.io_struct import DumperControlReqInput

        asked = DumperControlReqInput(method="rose", body={"call": method, "args": list(args)})
        (said,) = await self._manager.dumper_control(asked)
        if not said.success:
            raise SglangError(said.error)
        return [answer["answer"] for answer in said.response]

    def meeting_place(self) -> str | None:
        # A new one for every try: files of an earlier one have another meaning.
        return None if self._arguments.tp_size == 1 else str(ranks_folder() / secrets.token_hex(8))

    async def reset_prefix_cache(self) -> bool:
        return bool((await self.call_all("flush"))[0])

    async def wake(self) -> None:
        await self.call_all("wake")


def ends_of(manager: Any, model_dir: Path) -> tuple[int, ...]:  # noqa: ANN401 -- SGLang's
    """Return the model's own ends of a sequence: its configuration's, and its tokenizer's."""
    try:
        text = (model_dir / "generation_config.json").read_bytes()
        said = msgspec.json.decode(text, type=dict[str, Any]).get("eos_token_id")
    except (OSError, msgspec.MsgspecError):
        said = None
    if said is None:
        said = list(manager.model_config.hf_eos_token_id or ())
    ids = [*said] if isinstance(said, list) else [said]
    ids.append(getattr(manager.tokenizer, "eos_token_id", None))
    size = int(manager.model_config.vocab_size)
    return tuple({each: None for each in ids if each is not None and 0 <= each < size})
