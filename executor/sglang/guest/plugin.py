"""Plugin `rose_guest` of SGLang: sets the guest's hooks; inert unless ROSE_ROLE is guest.

Scheduler.run_event_loop              attach: page, gate, balloon, watchdog
Scheduler._should_defer_prefill       gate: may a step begin, how large; KV to the grant's cap
Scheduler._get_new_batch_prefill_raw  tokens of a prefill, its chunks included
Scheduler.get_num_allocatable_reqs    sequences Scheduler.update_running_batch        no decode
without the gate's permission Scheduler.run_batch                   a step begins; its tokens are
stamped Scheduler.process_batch_result        a step is done IdleSleeper.maybe_sleep
an idle guest notices that its memory is wanted allocator.clear                       held granules
stay held
"""

import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from executor.engine_settings import GUEST, EngineSettings
from executor.errors import ExecutorError
from executor.guest.start_gate import StartGate
from executor.sglang.compat import (
    GUEST_NEEDED,
    NEEDED,
    SCHEDULER,
    Hook,
    Part,
    check_features,
    check_version,
    give_up,
    install,
    part_of_engine,
)
from executor.sglang.guest.scheduler import GuestScheduler

_SLEEPER: Final = "sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep"
_ALLOCATORS: Final = (
    "sglang.srt.mem_cache.allocator.token.TokenToKVPoolAllocator.clear",
    "sglang.srt.mem_cache.allocator.paged.PagedTokenToKVPoolAllocator.clear",
)
_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner.forward"

logger = logging.getLogger("rose.sglang")


class GuestHooks:
    """The guest of this process, from the moment its scheduler is about to run, and its hooks."""

    def __init__(self, settings: EngineSettings, start: StartGate | None = None) -> None:
        self._settings = settings
        self._start = start
        self._guest: GuestScheduler | None = None

    @property
    def hooks(self) -> Mapping[str, Hook]:
        """Hooks by the names of the functions that they are set around."""
        named: dict[str, Hook] = {
            f"{SCHEDULER}.run_event_loop": self.run_event_loop,
            f"{SCHEDULER}._should_defer_prefill": self.should_defer_prefill,
            f"{SCHEDULER}._get_new_batch_prefill_raw": self.get_new_batch_prefill,
            f"{SCHEDULER}.get_num_allocatable_reqs": self.get_num_allocatable_reqs,
            f"{SCHEDULER}.update_running_batch": self.update_running_batch,
            f"{SCHEDULER}.run_batch": self.run_batch,
            f"{SCHEDULER}.process_batch_result": self.process_batch_result,
            _SLEEPER: self.maybe_sleep,
        }
        named |= dict.fromkeys(_ALLOCATORS, self.clear)
        if self._start is not None:
            named[_RUNNER] = self.forward
        return named

    def run_event_loop(self, original: Hook, scheduler: Any) -> Any:  # noqa: ANN401 -- SGLang's
        """Attach to a complete scheduler. Raises ExecutorError; SGLang then ends."""
        check_features(scheduler.server_args, {**NEEDED, **GUEST_NEEDED})
        self._guest = GuestScheduler(scheduler, self._settings)
        if self._start is not None:
            self._start.tell()
        return original(scheduler)

    def should_defer_prefill(self, original: Hook, scheduler: Any, running_batch: Any) -> bool:  # noqa: ANN401
        """Ask the gate; without permission prefill is deferred as SGLang itself does."""
        if self._guest is None or not self._guest.begin(running_batch):
            return True
        return bool(original(scheduler, running_batch))

    def get_new_batch_prefill(self, original: Hook, scheduler: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
        """Plan a prefill of no more tokens than granted."""
        if self._guest is None:
            return original(scheduler, *a, **named)
        with self._guest.capped() as room:
            if not room:
                return None, named.get("running_batch", a[-1] if a else None)
            return original(scheduler, *a, **named)

    def get_num_allocatable_reqs(
        self,
        original: Hook,
        scheduler: Any,  # noqa: ANN401 -- SGLang's
        running_bs: int,
        *a: Any,  # noqa: ANN401
        **named: Any,  # noqa: ANN401
    ) -> int:
        """Return no more sequences than granted."""
        found = int(original(scheduler, running_bs, *a, **named))
        return found if self._guest is None else min(found, self._guest.sequences - running_bs)

    def update_running_batch(self, original: Hook, scheduler: Any, batch: Any) -> Any:  # noqa: ANN401
        """Without permission return None, which skips decode in this step."""
        if self._guest is not None and not self._guest.tokens:
            return None
        return original(scheduler, batch)

    def run_batch(self, original: Hook, scheduler: Any, batch: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
        """Publish the begin of a step, run it, stamp its tokens."""
        if self._guest is None:
            return original(scheduler, batch, *a, **named)
        self._guest.scheduled(batch)
        result = original(scheduler, batch, *a, **named)
        self._guest.sampled(batch, result)
        return result

    def process_batch_result(self, original: Hook, scheduler: Any, batch: Any, result: Any) -> Any:  # noqa: ANN401
        """Process a step's output as SGLang does, then publish it."""
        if self._guest is None:
            return original(scheduler, batch, result)
        before = self._guest.output_tokens(batch)
        done = original(scheduler, batch, result)
        self._guest.stepped(batch, self._guest.output_tokens(batch) - before)
        return done

    def maybe_sleep(self, original: Hook, sleeper: Any) -> Any:  # noqa: ANN401 -- SGLang's
        """Sleep until there is work, or KV memory is wanted."""
        if self._guest is None:
            return original(sleeper)
        return self._guest.sleep(sleeper.poller)

    def clear(self, original: Hook, allocator: Any) -> Any:  # noqa: ANN401 -- SGLang's
        """Keep the held granules out of an allocator that begins anew."""
        done = original(allocator)
        if self._guest is not None:
            self._guest.cleared(allocator)
        return done

    def forward(self, original: Hook, runner: Any, *a: Any, **named: Any) -> Any:  # noqa: ANN401
        """Let a pass of the start wait for the host; the scheduler asks the gate for steps."""
        if self._guest is None and self._start is not None:
            self._start.wait()
        return original(runner, *a, **named)


def register() -> None:
    """Entry point of `sglang.srt.plugins`."""
    if os.environ.get("ROSE_ROLE") != GUEST or part_of_engine() is not Part.SCHEDULER:
        return
    try:
        check_version()
        settings = EngineSettings.from_environ(os.environ)
        start = StartGate.from_environ(os.environ)
    except ExecutorError as error:
        give_up(error)
    install(GuestHooks(settings, start).hooks)
