"""Calls of a replica's API process in SGLang's scheduler, on every rank, in the order of requests.

They use a control request that SGLang has for debugging, whose body and answer are JSON: it is
broadcast to all ranks like a turn, so that all get it between the same two steps.

    pause     requests stay; with `clear` they go back to the queue and all prefixes are dropped
    activate  tokens from here on are of this version, and outputs of encoders so far are forgotten
    resume    continue
    flush     drop all prefixes
    wake      look for work
    others    methods of the weight worker (`weight_transfer.sglang`)

Overlapped scheduling is off, so no step is in flight when a call is made.
"""

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Final

from executor.engine_settings import POLICY_VERSION
from weight_transfer.sglang import SglangWeightWorker

METHOD: Final = "rose"
PAUSED_SLEEP_S: Final = 0.0005
_LOG = logging.getLogger("rose.replica")


class SchedulerCalls:
    """Handler of the replica's calls in one scheduler process of SGLang, with the weight worker
    beside it.
    """

    def __init__(self) -> None:
        self._worker: SglangWeightWorker | None = None

    def handle(self, original: Callable[..., Any], scheduler: Any, asked: Any) -> None:  # noqa: ANN401 -- SGLang's
        """Run a replica's call on this rank and send the answers of all ranks back; pass other
        requests to SGLang (hook of `handle_dumper_control`).
        """
        if asked.method != METHOD:
            original(scheduler, asked)
            return
        from sglang.srt.managers.io_struct import DumperControlReqOutput

        mine: dict[str, Any]
        try:
            mine = {"answer": self._call(scheduler, asked.body["call"], asked.body["args"])}
        except Exception as error:  # noqa: BLE001 -- told to whoever called, as text
            _LOG.warning("%s: %s", asked.body["call"], error)
            mine = {"error": f"{type(error).__name__}: {error}"}
        answers = _of_all_ranks(scheduler, mine)
        wrong = next((answer["error"] for answer in answers if "error" in answer), "")
        scheduler.ipc_channels.send_to_tokenizer.send_output(
            DumperControlReqOutput(success=not wrong, response=answers, error=wrong), asked
        )

    def rest(self, original: Callable[..., Any], scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's
        """Sleep half a millisecond in each round of a paused scheduler's idle loop, which would
        spin (hook).
        """
        original(scheduler)
        time.sleep(PAUSED_SLEEP_S)

    def _call(self, scheduler: Any, name: str, arguments: list[Any]) -> Any:  # noqa: ANN401 -- JSON
        own: dict[str, Callable[..., Any]] = {
            "pause": self._pause,
            "resume": self._resume,
            "activate": self._activate,
            "flush": self._flush,
            "wake": lambda _: None,
        }
        if name in own:
            return own[name](scheduler, *arguments)
        if not name.startswith("rose_weights_"):
            raise ValueError(f"a replica has no call {name}")
        if self._worker is None:
            self._worker = SglangWeightWorker(scheduler)
        return getattr(self._worker, name)(*arguments)

    def _pause(self, scheduler: Any, clear: bool) -> None:  # noqa: ANN401 -- SGLang's
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        scheduler.pause_generation(PauseGenerationReqInput(mode="retract" if clear else "in_place"))
        if clear and not scheduler.flush_cache():
            raise RuntimeError("the prefixes stayed in the cache")

    def _resume(self, scheduler: Any) -> None:  # noqa: ANN401 -- SGLang's
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        scheduler.continue_generation(ContinueGenerationReqInput())

    def _activate(self, scheduler: Any, version: int) -> None:  # noqa: ANN401 -- SGLang's
        from sglang.srt.managers import mm_schedule

        # Its keys are hashes of images alone, and neither a pause nor a flush clears it.
        if mm_schedule.embedding_cache is not None:
            mm_schedule.embedding_cache.clear()
        os.environ[POLICY_VERSION] = str(version)
        scheduler.record_weight_version_change(new_version=str(version))

    def _flush(self, scheduler: Any) -> bool:  # noqa: ANN401 -- SGLang's
        return bool(scheduler.flush_cache())


def _of_all_ranks(scheduler: Any, mine: dict[str, Any]) -> list[dict[str, Any]]:  # noqa: ANN401 -- SGLang's
    """Return the answers of all ranks, in rank order, on every rank."""
    import torch.distributed

    group = scheduler.tp_group.cpu_group
    size = torch.distributed.get_world_size(group)
    if size == 1:
        return [mine]
    answers: list[dict[str, Any]] = [{}] * size
    torch.distributed.all_gather_object(answers, mine, group=group)
    return answers
