"""A replica's endpoint, in the engine's API process: turns for gateways, control for its node.

generate          GenerateBody ──► StreamLine, one JSON a line; before the first: a Refusal
drain, admit      EpochBody ──► Drained, Admitted
state             ──► ReplicaState
weights/…         contract/weights.py: gateways and clients need nothing of it, and start sooner
"""

from typing import Final

from msgspec import Struct, structs

from rose.contract.fields import (
    UNVERSIONED,
    Count,
    Epoch,
    Int32,
    Int64,
    Logprob,
    Name,
    PolicyVersion,
    SampledId,
    TokenId,
)

MAX_BODY_BYTES: Final = 4 << 20
MAX_CONTROL_BYTES: Final = 256 << 10
# A line holds one step's tokens; anything near this is not one.
MAX_LINE_BYTES: Final = 1 << 20

ROUTES: Final = "/rose/v1/"
GENERATE: Final = f"{ROUTES}generate"
DRAIN: Final = f"{ROUTES}drain"
ADMIT: Final = f"{ROUTES}admit"
STATE: Final = f"{ROUTES}state"


class Sampling(Struct, frozen=True, gc=False):
    """How to sample. The defaults leave the policy's distribution as it is, as RL needs it.

    `top_k` 0 is off. `allowed_token_ids` None allows all. Before `min_tokens` no stop is sampled.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int32 = 0
    max_tokens: Count = 16
    min_tokens: Count = 0
    stop_token_ids: tuple[TokenId, ...] | None = None
    allowed_token_ids: tuple[TokenId, ...] | None = None
    seed: Int64 | None = None

    def rest(self, max_tokens: int) -> "Sampling":
        """The same for a turn of which only `max_tokens` are still to be generated."""
        done = self.max_tokens - max_tokens
        if not done:
            return self
        min_tokens = max(0, self.min_tokens - done)
        return structs.replace(self, max_tokens=max_tokens, min_tokens=min_tokens)


class GenerateBody(Struct, frozen=True, gc=False):
    """A turn, or the rest of one.

    `job`: whose it is; a replica that is leased to another one refuses it. Empty: of whichever.
    """

    request_id: Name
    token_ids: list[TokenId]
    sampling: Sampling = Sampling()
    cache_salt: Name | None = None
    priority: Int32 = 0
    job: Name = ""


class StreamLine(Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens of one policy version with their logprobs, or how the stream ends, or both.

    `oldest_version` of their KV, where it may be older than `version` (`OnUpdate.KEEP`).
    """

    token_ids: list[SampledId] = []
    logprobs: list[Logprob] = []
    version: PolicyVersion = UNVERSIONED
    oldest_version: PolicyVersion | None = None
    finish_reason: str | None = None
    message: str | None = None


class Fault(Struct, frozen=True):
    """What went wrong: a name for programs, a sentence for people."""

    type: str
    message: str


class Refusal(Struct, frozen=True):
    """Body of every answer that is no 200."""

    error: Fault


class EpochBody(Struct, frozen=True, omit_defaults=True):
    """Opens or closes admission for a lease of `job`."""

    epoch: Epoch
    reason: Name = ""
    job: Name = ""


class Drained(Struct, frozen=True):
    """How many turns were ended."""

    aborted: int = 0


class Admitted(Struct, frozen=True):
    """Turns are taken from now on."""

    admitting: bool = True


class WarmUpState(Struct, frozen=True):
    """Whether the first turns' warm-up failed, and what it said."""

    failed: bool = False
    said: str = ""


class ReplicaState(Struct, frozen=True, gc=False, kw_only=True):
    """A replica's account of itself. What does not say that its weights are proven gives none.

    `job`: whose `policy_version` it is, "" for the model as it was started.
    """

    replica_id: str = ""
    role: str = ""
    policy_version: int
    proven: bool
    admitting: bool
    epoch: int
    running: int
    waiting: int
    tokens_total: int
    kv_tokens: int = 0
    warm: bool = False
    warm_up: WarmUpState = WarmUpState()
    job: str = ""
