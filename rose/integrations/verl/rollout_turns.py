"""RolloutTurns: turns of verl's agent loops through ROSE's gateways, without Ray and without verl.

published(version, step)   from then on turns are of that version, or as old as the lag allows
generate                   sampling parameters in verl's words ──► fields of its `TokenOutput`
abort, resume              around each update of weights

ROSE's replicas take a version between two steps and continue their turns, so an abort ends none of
them; each answer has the versions that sampled it. With `ends_turns` an abort does end them: they
are returned as aborted, and nothing starts until `resume`.
"""

import asyncio
import itertools
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from rose.client import RolloutClient, Sampling, TokenChunk, Turn, VersionNotServed
from rose.errors import RefusedError
from rose.integrations.settings import TrainerSettings
from rose.integrations.verl.turns import (
    Lengths,
    PolicySteps,
    aborted_output,
    image_files,
    output_of,
    turn_sampling,
)

# Pause before a repeated turn whose version no replica had: gateways wait for one themselves.
PAUSE_S = 1.0
_REFUSED = ("video_data", "audio_data", "mm_processor_kwargs", "kv_transfer_params")


class _Names(TypedDict):
    request_id: str
    session_id: str
    min_version: int | None
    priority: int
    routed_experts: bool
    images: Sequence[bytes]


@dataclass(slots=True)
class _PartialTurn:
    """Tokens, logprobs and versions of one turn so far; `aborted`: True once verl aborted it."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    aborted: bool = False

    async def take(self, chunk: TokenChunk) -> None:
        self.tokens += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.versions.append(chunk.version)
        if chunk.oldest_version is not None:
            self.versions.append(chunk.oldest_version)


class RolloutTurns:
    """Client of ROSE's gateways that runs the turns of one of verl's servers, in one event loop."""

    def __init__(
        self,
        settings: TrainerSettings,
        lengths: Lengths,
        lag: int,
        *,
        ends_turns: bool = False,
        replays_routes: bool = False,
        seed: int | None = None,
    ) -> None:
        """Prepare the client without connecting. `lag`: number of versions that a turn may be
        behind the newest when it starts. replays_routes: True asks for each position's experts.
        seed: makes all turns deterministic, and is that of turns that name none.
        """
        self._seed = seed
        self._replays_routes = replays_routes
        self._settings, self._lengths, self._ends_turns = settings, lengths, ends_turns
        self._steps = PolicySteps(lag)
        self._sessions = TokenSessions()
        self._running: dict[asyncio.Task[Turn], _PartialTurn] = {}
        self._admits = asyncio.Event()
        self._admits.set()
        self._rejects = False
        self._numbers = itertools.count()
        self._client: RolloutClient | None = None

    def published(self, version: int, step: int) -> None:
        """Record that `version` was published after verl's global step `step`; turns that start now
        need it or one within the lag.
        """
        self._steps.told(version, step)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        request_id: str,
        priority: int = 0,
        image_data: Sequence[Any] | None = None,
        **more: object,
    ) -> dict[str, Any]:
        """Generate one turn and return the fields of verl's TokenOutput as a dict. Raises
        RolloutError, or RefusedError for unsupported input.

        sampling_params: in verl's words. image_data: images of PIL, whose tokens are in the prompt.
        more: other inputs of verl; videos and audio are refused.
        """
        for name in _REFUSED:
            if more.get(name):
                raise RefusedError(f"ROSE takes no {name}; use prompts of text and images")
        prompt = [int(token) for token in prompt_ids]
        images = await asyncio.to_thread(image_files, image_data) if image_data else ()
        fixed = {} if self._seed is None else {"seed": self._seed, "deterministic": True}
        sampling = turn_sampling({**fixed, **sampling_params}, self._lengths, len(prompt))
        session = self._sessions.session_of(prompt)
        names: _Names = {
            "request_id": request_id,
            "session_id": session,
            "min_version": None,
            "priority": priority,
            "routed_experts": self._replays_routes,
            "images": images,
        }
        output = await self._served(prompt, sampling, names)
        self._sessions.ended(session, [*prompt, *output["token_ids"]])
        return output

    async def _served(self, prompt: list[int], sampling: Sampling, names: _Names) -> dict[str, Any]:
        """Return the fields of one turn, which is sent again while no replica has its version,
        until the timeout: verl drops failed turns.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._settings.timeout_s
        while True:
            if self._rejects:
                return aborted_output([], [], [], self._steps)
            await self._admits.wait()
            # verl's own id may be a trajectory's, which has several turns.
            own = f"{names['request_id']}/{next(self._numbers)}"
            least = self._steps.least
            try:
                return await self._turn(
                    prompt, sampling, {**names, "request_id": own, "min_version": least}
                )
            except VersionNotServed:
                if loop.time() + PAUSE_S > deadline_s:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _turn(self, prompt: list[int], sampling: Sampling, names: _Names) -> dict[str, Any]:
        client = await self._opened()
        if not self._ends_turns:
            return output_of(await client.generate(prompt, sampling, **names), self._steps)
        part = _PartialTurn()
        stream = client.stream(prompt, sampling, **names)
        task = asyncio.ensure_future(stream.into(part.take))
        return await self._until_aborted(task, part)

    def abort(self, *, rejects: bool = False) -> int:
        """Cancel the running turns, hold back new ones until `resume`, and return the number of
        cancelled turns; do nothing and return 0 unless turns are to end.

        rejects: True answers turns that come before `resume` as aborted, instead of holding them
        back.
        """
        if not self._ends_turns:
            return 0
        self._admits.clear()
        self._rejects = rejects
        for task, part in self._running.items():
            part.aborted = True
            task.cancel()
        return len(self._running)

    def resume(self) -> None:
        """Let new turns start again after `abort`."""
        self._rejects = False
        self._admits.set()

    async def close(self) -> None:
        """Close the client, which cancels its running turns; the next turn opens a new one."""
        client, self._client = self._client, None
        if client is not None:
            await client.__aexit__(None, None, None)

    async def _opened(self) -> RolloutClient:
        if self._client is None:
            settings = self._settings
            client = RolloutClient(
                settings.gateway,
                settings.timeout_s,
                credentials=settings.credentials(),
                job=settings.job,
            )
            self._client = await client.__aenter__()
        return self._client

    async def _until_aborted(
        self, task: "asyncio.Task[Turn]", part: _PartialTurn
    ) -> dict[str, Any]:
        self._running[task] = part
        try:
            return output_of(await task, self._steps)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if not part.aborted or (current is not None and current.cancelling()):
                raise
            return aborted_output(part.tokens, part.logprobs, part.versions, self._steps)
        finally:
            del self._running[task]
            task.cancel()


# ---- sessions ----

BLOCK = 16
# Number of ended turns to remember: several times as many as an agent loop runs at once.
MOST = 65_536
_Key = tuple[int, tuple[int, ...]]


class TokenSessions:
    """Sessions by the tokens with which their turns ended, since verl gives each turn an id of its
    own.

    A turn whose prompt begins with all tokens of an earlier turn belongs to that turn's session,
    and goes to the replica that has its prefix. Prompts are hashed in blocks, a chain of them; the
    remainder is compared. A wrong match only costs that the prefix is computed again. The oldest of
    `most` turns are forgotten.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._ended: OrderedDict[_Key, str] = OrderedDict()
        # Lengths of the remainders by the hash of the blocks before: most have one.
        self._rests: dict[int, list[int]] = {}

    def session_of(self, prompt: Sequence[int]) -> str:
        """Return the id of the session whose turn ended with the longest beginning of this prompt,
        or a new random id.
        """
        for chain, at in reversed([*_chains(prompt)]):
            for length in sorted(self._rests.get(chain, ()), reverse=True):
                key = chain, tuple(prompt[at : at + length])
                if session := self._ended.get(key):
                    return session
        return uuid.uuid4().hex

    def ended(self, session: str, tokens: Sequence[int]) -> None:
        """Record the tokens, prompt included, with which a turn of the session ended."""
        chain, at = [*_chains(tokens)][-1]
        key = chain, tuple(tokens[at:])
        if key not in self._ended:
            self._rests.setdefault(chain, []).append(len(key[1]))
        self._ended[key] = session
        self._ended.move_to_end(key)
        if len(self._ended) > self._most:
            self._forget(self._ended.popitem(last=False)[0])

    def _forget(self, key: _Key) -> None:
        lengths = self._rests[key[0]]
        lengths.remove(len(key[1]))
        if not lengths:
            del self._rests[key[0]]


def _chains(tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (hash of the first n blocks, number of their tokens) for n from 0 to the number of
    whole blocks.
    """
    chain = 0
    yield chain, 0
    for at in range(BLOCK, len(tokens) + 1, BLOCK):
        chain = hash((chain, *tokens[at - BLOCK : at]))
        yield chain, at
