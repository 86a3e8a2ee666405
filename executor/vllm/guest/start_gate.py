"""An engine's start beside its host: each forward pass of it waits for the gate, as steps do later.

    profile run, warm-up, graph capture ──► model(...) ──► gate: host idle, grant live? ──► runs

The scheduler that asks the gate is made last, so nothing else holds back what a start computes. All
of it passes through the model's forward, whichever model runner a version of vLLM has.
"""

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, Self

import torch

from executor.control_page.page import ControlPage
from executor.step_decision import GateLimits, Run, decide
from executor.vllm.guest.gate_client import FIRST_MODEL, logger
from executor.vllm.settings import GUEST, EngineSettings

GATED_START: Final = "ROSE_GATED_START"

PAUSE_S: Final = 0.002


class StartGate:
    """Lets a pass go when the host is idle and somebody grants; how long passes take is unknown."""

    def __init__(
        self,
        page: ControlPage,
        limits: GateLimits | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._page = page
        self._limits = limits or GateLimits()
        self._clock_ns = clock_ns
        self._sleep = sleep
        self.passes = 0
        self.waited_ns = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self | None:
        """None for an engine that is no guest or whose node does not want it."""
        settings = EngineSettings.from_environ(environ)
        if settings.role != GUEST or environ.get(GATED_START) != "1":
            return None
        return cls(ControlPage.open(settings.page_path, settings.page_group))

    def wait(self) -> None:
        """Return when a pass may begin. Without an end: who has no right to be is ended outside."""
        began_ns = self._clock_ns()
        while not self._open:
            self._sleep(PAUSE_S)
        self.passes += 1
        self.waited_ns += self._clock_ns() - began_ns

    @property
    def _open(self) -> bool:
        grant = self._page.grant.peek()
        # Whatever is lent: slack is for passes of which one knows how long they take.
        idle_time_only = None if grant is None else replace(grant, slack_share=0.0)
        view, now_ns = self._page.host_view(), self._clock_ns()
        return isinstance(decide(view, idle_time_only, FIRST_MODEL, now_ns, self._limits), Run)


class GatedStart:
    """For a worker class to inherit before vLLM's own; `start_gate` is None where none gates."""

    model_runner: Any
    start_gate: StartGate | None = None
    _start_hook: Any = None

    def load_model(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 -- vLLM's own
        """Load, and hold the model's passes from here on. Raises ExecutorError without a page."""
        super().load_model(*arguments, **options)  # type: ignore[misc]
        self.start_gate = gate = StartGate.from_environ(os.environ)
        if gate is not None:
            model = self.model_runner.get_model()
            self._start_hook = model.register_forward_pre_hook(lambda *_: _pass(gate))

    def compile_or_warm_up_model(self) -> Any:  # noqa: ANN401 -- vLLM's own
        """Warm up and capture; the passes that follow are steps, which the scheduler gates."""
        try:
            return super().compile_or_warm_up_model()  # type: ignore[misc]
        finally:
            if self._start_hook is not None:
                self._start_hook.remove()
                _tell(self.start_gate)


def _pass(gate: StartGate) -> None:
    # What is captured is not run.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not (used and torch.cuda.is_current_stream_capturing()):
        gate.wait()


def _tell(gate: StartGate | None) -> None:
    if gate is not None and gate.passes:
        waited_s = gate.waited_ns / 1e9
        logger.info("%d passes of the start waited %.1f s for the host", gate.passes, waited_s)
    else:
        logger.warning("the start asked the gate for no pass: this model runs beside its host")
