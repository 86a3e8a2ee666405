"""Policy version of every token, attached to it where it is sampled.

SGLang reports the weights of a request's tokens at its end, and a killed request never ends. Values
that a model returns beside its logits travel with each token: so does this one.
"""

import os
from collections.abc import Mapping
from typing import Any, Final

from executor.engine_settings import POLICY_VERSION

STAMP: Final = "rose_version"


def stamp(batch: Any, result: Any, environ: Mapping[str, str] = os.environ) -> None:  # noqa: ANN401 -- SGLang's
    """Stamp a step's tokens with the version that its process has active."""
    output = getattr(result, "logits_output", None)
    if output is None:
        return
    versions = [int(environ.get(POLICY_VERSION, "0"))] * len(batch.reqs)
    output.customized_info = {**(output.customized_info or {}), STAMP: versions}


def stamped_run(original: Any, scheduler: Any, batch: Any, *more: Any, **named: Any) -> Any:  # noqa: ANN401
    """Hook around the scheduler's `run_batch`, for an engine without a gate."""
    result = original(scheduler, batch, *more, **named)
    stamp(batch, result)
    return result
