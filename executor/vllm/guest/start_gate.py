"""vLLM's start beside its host: a worker class whose model passes wait for the gate.

All computation of a start passes through the model's forward, in every version's model runner.
"""

import os
from typing import Any

import torch

from executor.guest.start_gate import StartGate


class GatedStart:
    """Base of a worker class, before vLLM's own; `start_gate` is None without a gate."""

    model_runner: Any
    start_gate: StartGate | None = None
    _start_hook: Any = None

    def load_model(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 -- vLLM's own
        """Load, and gate the model's passes from here on. Raises ExecutorError without a page."""
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
                if self.start_gate is not None:
                    self.start_gate.tell()


def _pass(gate: StartGate) -> None:
    # A captured pass is not run.
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not (used and torch.cuda.is_current_stream_capturing()):
        gate.wait()
