"""Guest plugin of any engine: its gate and its balloon before each step.

    permit ──► gate: tokens and sequences ──► KV to the grant's cap ──► oversized requests go back

A request that outgrew the guest's KV cap is ended at once, so that it continues elsewhere: an
engine would wait for blocks that do not come, and block everything behind the request with it.

A guest starts with profiles of its own and of its host's steps. A configured profile that cannot be
used ends the engine's start: with a guess in its place the gate would lend other slack than the
operator measured, and nobody would notice.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import ClassVar

from executor.control_page.page import ControlPage
from executor.engine_settings import EngineSettings
from executor.errors import ExecutorError
from executor.guest.gate_client import FIRST_MODEL, EngineLoad, GateClient, GrantLiveness, Watchdog
from executor.guest.kv_balloon import GuestKv
from executor.kv.backing import HeldGranules, PageBackend
from executor.kv.shrink_plan import Rollout
from executor.step_decision import GateLimits, Run
from slo import ProfileError, StepModel, StepProfile


def step_model(settings: EngineSettings) -> StepModel:
    """Return the guest's step model from its profile; FIRST_MODEL without one.

    Raises ExecutorError for a profile that cannot be used.
    """
    if not settings.step_profile:
        return FIRST_MODEL
    return StepModel(_read("ROSE_STEP_PROFILE", settings.step_profile))


def gate_limits(settings: EngineSettings) -> GateLimits:
    """Return the gate's limits, with the host's cost of a queued token if its steps were profiled.

    Raises ExecutorError for a profile that cannot be used.
    """
    if not settings.host_step_profile:
        return GateLimits()
    profile = _read("ROSE_HOST_STEP_PROFILE", settings.host_step_profile)
    return GateLimits(host_prefill_ns_per_token=math.ceil(profile.per_token_s * 1e9))


def _read(variable: str, path: str) -> StepProfile:
    try:
        return StepProfile.from_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ExecutorError(f"{variable} {path} cannot be read: {error.strerror}") from None
    except (ProfileError, UnicodeDecodeError) as error:
        raise ExecutorError(f"{variable} {path}: {error}") from None


def watch(
    settings: EngineSettings,
    pages: PageBackend,
    page: ControlPage | None = None,
    beat: Callable[[int], None] = lambda _now_ns: None,
) -> None:
    """Start the thread that ends this process, and those of `pages`, when one of them has to end.

    beat: called with the time at each tick. Raises ExecutorError if the page cannot be used.
    """
    page = page or ControlPage.open(settings.page_path, settings.page_group)
    orphan = GrantLiveness(time.monotonic_ns(), round(settings.orphan_s * 1e9))
    Watchdog(page, orphan, beat, ranks=pages.processes).start()


class GuestPlugin(ABC):
    """Base of the guest plugins: gate and balloon of one engine's scheduler.

    Only the scheduler's thread may call it.
    """

    log: ClassVar[logging.Logger]
    gated = False
    """True once the plugin is attached; until then nothing asks the gate."""
    _gate: GateClient
    _kv: GuestKv

    def attach(self, settings: EngineSettings, pool: HeldGranules, block_tokens: int) -> None:
        """Open the control page, publish on it, and start the watchdog; grants bind from now on.

        Raises ExecutorError if the page or a profile cannot be used.
        """
        model, limits = step_model(settings), gate_limits(settings)
        page = ControlPage.open(settings.page_path, settings.page_group)
        self._kv = GuestKv(pool, self._rollouts, self._preempt)
        self._gate = GateClient(page, self._kv.mapped, limits, model, block_tokens)
        watch(settings, pool.pages, page, self._gate.beat)
        self.gated = True

    def permit(self) -> tuple[int, int]:
        """Return the most tokens and sequences of the next step; (0, 0) if none may begin.

        It also fits the KV memory to the grant's cap, and ends waiting requests that no longer fit.
        """
        load, allowed = self._load(), (0, 0)
        if load.running or load.waiting:
            verdict = self._gate.ask(load, self.memory_wanted)
            if isinstance(verdict, Run):
                allowed = verdict.token_budget, verdict.max_sequences
        else:
            self._gate.idle(load)
        fits = self._kv.fit(self._gate.grant())
        self._gate.mapped(self._kv.mapped, self._load())
        if self._kv.ballooned:
            self._hand_back_too_large()
        return allowed if fits else (0, 0)

    def memory_wanted(self) -> bool:
        """Return True if KV memory is to be returned: an idle engine returns it only in a step."""
        return self._kv.must_shrink(self._gate.grant())

    def _hand_back_too_large(self) -> None:
        """End waiting requests whose tokens so far do not fit, even alone in the guest.

        Tokens that a request may still generate do not count: it may stop before, and its tokens
        are with its client already.
        """
        most = self._kv.capacity_blocks
        lost = [name for name, tokens in self._waiting_sizes() if self._blocks_for(tokens) > most]
        if lost:
            self.log.info("%d requests do not fit the KV cap and are handed back", len(lost))
            self._hand_back(lost)

    @abstractmethod
    def _load(self) -> EngineLoad:
        """Return the running and waiting requests and the KV blocks in use now."""

    @abstractmethod
    def _rollouts(self) -> Sequence[Rollout]:
        """Return the running requests, with the cost of preempting each and its blocks."""

    @abstractmethod
    def _preempt(self, request_ids: Collection[str]) -> None:
        """Send these running requests back to the queue, their KV freed."""

    @abstractmethod
    def _waiting_sizes(self) -> Iterable[tuple[str, int]]:
        """Return each waiting request's id and number of tokens so far."""

    @abstractmethod
    def _blocks_for(self, tokens: int) -> int:
        """Return the blocks that a request of this many tokens needs for its next step."""

    @abstractmethod
    def _hand_back(self, request_ids: Collection[str]) -> None:
        """End these waiting requests at their clients, so that they continue elsewhere."""
