"""Plugin `rose_replica` of SGLang: the endpoint in its API process, calls in its scheduler.

Inert unless ROSE_ROLE makes a replica of the engine.
"""

import os
from collections.abc import Sequence
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from executor.engine_settings import GUEST
from executor.errors import ExecutorError
from executor.sglang import surfaces
from executor.sglang.compat import (
    GUEST_NEEDED,
    NEEDED,
    SCHEDULER,
    EnginePart,
    Hook,
    check_features,
    check_version,
    give_up,
    install,
    part_of_engine,
    stamped_run,
)
from rose.replica.asgi import ROLES, AccessFilter, GenerateShortcut
from rose.replica.endpoint import ReplicaEndpoint
from rose.replica.sglang.engine import ALLOWED, SglangEngine

_ARGUMENTS: Final = "sglang.srt.server_args.ServerArgs.resolve_once"
_HTTP: Final = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
_BATCH: Final = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_STOPS: Final = "sglang.srt.managers.schedule_batch.Req._check_token_based_finish"


class Begin:
    """ASGI middleware that starts the replica's endpoint when the server starts, in the server's
    event loop.
    """

    def __init__(self, app: ASGIApp, endpoint: ReplicaEndpoint, engine: SglangEngine) -> None:
        self._app = app
        self._endpoint = endpoint
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Start the endpoint at the lifespan message; pass every request on."""
        if scope["type"] == "lifespan":
            self._endpoint.begin(self._engine, scope["app"].state)
        await self._app(scope, receive, send)


def serve(
    original: Hook,
    server_args: Any,  # noqa: ANN401 -- SGLang's
    tokenizer_manager: Any,  # noqa: ANN401 -- SGLang's
    template_manager: Any,  # noqa: ANN401 -- SGLang's
    port_args: Any,  # noqa: ANN401 -- SGLang's
    scheduler_infos: list[dict[str, Any]],
    *more: Any,  # noqa: ANN401
    **named: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    """Call SGLang's server start with ROSE's routes, middleware and access filter added (hook)."""
    from sglang.srt.entrypoints.http_server import app

    kv_tokens = int(scheduler_infos[0].get("max_total_num_tokens", 0))
    endpoint = ReplicaEndpoint()
    endpoint.attach(app)
    engine = SglangEngine(tokenizer_manager, server_args, kv_tokens)
    app.add_middleware(Begin, endpoint=endpoint, engine=engine)
    app.add_middleware(AccessFilter)
    # Turns skip all middleware: the last is the outermost.
    app.add_middleware(GenerateShortcut)
    return original(
        server_args,
        tokenizer_manager,
        template_manager,
        port_args,
        scheduler_infos,
        *more,
        **named,
    )


def checked(original: Hook, server_args: Any) -> Any:  # noqa: ANN401 -- SGLang's
    """Check SGLang's arguments before it resolves them, and end the process if a replica or guest
    cannot run with them (hook).

    SGLang would otherwise load a draft's weights, or adapt other arguments, before that.
    """
    guest = os.environ.get("ROSE_ROLE") == GUEST
    try:
        if guest:
            check_features(server_args, {**NEEDED, **GUEST_NEEDED}, "a guest")
        else:
            check_features(server_args)
    except ExecutorError as error:
        give_up(error)
    return original(server_args)


def register() -> None:
    """Install the replica's hooks in this process of SGLang; entry point of `sglang.srt.plugins`,
    which does nothing without ROSE_ROLE.
    """
    if os.environ.get("ROSE_ROLE") not in ROLES:
        return
    try:
        check_version(surfaces.REPLICA)
    except ExecutorError as error:
        give_up(error)
    match part_of_engine():
        case EnginePart.SERVER:
            install({_HTTP: serve, _ARGUMENTS: checked})
        case EnginePart.SCHEDULER:
            install(_scheduler_hooks())


def _scheduler_hooks() -> dict[str, Hook]:
    # Import it here: only the scheduler's process uses it.
    from rose.replica.sglang.scheduler_calls import SchedulerCalls

    calls = SchedulerCalls()
    hooks: dict[str, Hook] = {
        _BATCH: biased_batch,
        _STOPS: ended_at_stop,
        f"{SCHEDULER}.handle_dumper_control": calls.handle,
        f"{SCHEDULER}._record_scheduler_state_for_paused_engine": calls.rest,
    }
    if os.environ.get("ROSE_ROLE") != GUEST:  # A guest's own hooks stamp.
        hooks[f"{SCHEDULER}.run_batch"] = stamped_run
    return hooks


def biased_batch(original: Any, kind: Any, batch: Any, vocab_size: int) -> Any:  # noqa: ANN401 -- SGLang's
    """Return SGLang's sampling batch with a logit bias of -inf on all tokens that a turn does not
    allow (hook of `SamplingBatchInfo.from_schedule_batch`).

    SGLang has no parameter for allowed tokens. It filters and merges the bias with its batches,
    samples from it, and takes logprobs of it.
    """
    import torch

    found = original(kind, batch, vocab_size)
    for row, request in enumerate(batch.reqs):
        allowed = (request.sampling_params.custom_params or {}).get(ALLOWED)
        if allowed is None:
            continue
        if found.logit_bias is None:
            found.logit_bias = torch.zeros(len(batch.reqs), vocab_size, device=batch.device)
        forbidden = torch.full((vocab_size,), float("-inf"), device=batch.device)
        inside = [token for token in allowed if 0 <= token < vocab_size]
        forbidden[torch.tensor(inside, dtype=torch.int64, device=batch.device)] = 0.0
        found.logit_bias[row] += forbidden
    return found


def ended_at_stop(original: Any, request: Any, new: Sequence[int]) -> bool:  # noqa: ANN401 -- SGLang's
    """Return True if a request ends at one of its stop tokens, even if it ignores the model's ends
    (hook of `Req._check_token_based_finish`).

    SGLang checks no stop tokens of a request that ignores the model's ends.
    """
    asked = request.sampling_params
    if not (asked.ignore_eos and asked.stop_token_ids):
        return bool(original(request, new))
    place = next((n for n, token in enumerate(new) if token in asked.stop_token_ids), None)
    if place is None:
        return False
    from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

    request.finished_reason = FINISH_MATCHED_TOKEN(matched=new[place])
    request.finished_len = len(request.output_ids) - len(new) + place + 1
    return True
