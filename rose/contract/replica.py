"""A replica's endpoint, in the engine's API process: turns for gateways, control for its node.

generate          GenerateBody ──► StreamLine, one JSON a line; before the first: a Refusal
generate_batch    BatchBody ──► BatchLine, one JSON a line, of all its turns as they come
generate_batch/…  LeaveBody: some of them are not wanted any more
POOLING           vLLM's bodies and answers ──► behind the same lease
drain, admit      EpochBody ──► Drained, Admitted
state             ──► ReplicaState
weights/…         contract/weights.py: gateways and clients do not load it, and start sooner
"""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Self

from msgspec import Meta, Struct, structs

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
GENERATE_BATCH: Final = f"{ROUTES}generate_batch"
LEAVE_BATCH: Final = f"{GENERATE_BATCH}/leave"
# All routes of turns.
TURNS: Final = (GENERATE, GENERATE_BATCH, LEAVE_BATCH)
MAX_BATCH_TURNS: Final = 256
# vLLM's own routes for models that are not generative, for the callers of turns.
POOLING: Final = ("/pooling", "/score", "/classify")
JOB_QUERY: Final = "rose_job"
DRAIN: Final = f"{ROUTES}drain"
ADMIT: Final = f"{ROUTES}admit"
STATE: Final = f"{ROUTES}state"


class StructuredOutputs(Struct, frozen=True, gc=False, omit_defaults=True):
    """Constraint on the output's text, in vLLM's words; exactly one of the first six.

    `json` and `structural_tag` are JSON in text.
    """

    json: str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False


class Sampling(Struct, frozen=True, gc=False):
    """Sampling parameters. The defaults leave the policy's distribution as it is, as RL needs it.

    `top_k` 0 is off. `allowed_token_ids` None allows all. Before `min_tokens` no stop is sampled.
    `repetition_penalty` counts the prompt's tokens too, the other penalties the output's alone. A
    turn ends at the model's own end of sequence too, unless `ignore_eos`. `prompt_logprobs`: of the
    prompt's tokens, and of this many alternatives to each.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Int32 = 0
    max_tokens: Count = 16
    min_tokens: Count = 0
    stop_token_ids: tuple[TokenId, ...] | None = None
    allowed_token_ids: tuple[TokenId, ...] | None = None
    seed: Int64 | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    ignore_eos: bool = False
    prompt_logprobs: Count | None = None
    structured_outputs: StructuredOutputs | None = None

    def rest(self, max_tokens: int) -> Self:
        """Return the sampling of a turn with only `max_tokens` left to generate.

        Its prompt's logprobs came before its first token.
        """
        done = self.max_tokens - max_tokens
        if not done:
            return self
        min_tokens = max(0, self.min_tokens - done)
        return structs.replace(
            self, max_tokens=max_tokens, min_tokens=min_tokens, prompt_logprobs=None
        )

    @property
    def counts_output(self) -> bool:
        """True if the next token depends on which of the tokens before it are output.

        Such a turn cannot continue elsewhere from its tokens: they would be a prompt there.
        """
        return bool(
            self.frequency_penalty or self.presence_penalty or self.structured_outputs is not None
        )


def sampling_of(fields: Mapping[str, Any]) -> Sampling:
    """Return the sampling of a request's fields; one that is missing or None has no effect.

    Fields of other names are ignored.
    """
    given = {name: fields.get(name) for name in Sampling.__struct_fields__}
    return Sampling(**{name: value for name, value in given.items() if value is not None})


class GenerateBody(Struct, frozen=True, gc=False):
    """A turn, or the rest of one.

    job: of the turn; a replica that is leased to another one refuses it. Empty: any job.
    """

    request_id: Name
    token_ids: list[TokenId]
    sampling: Sampling = Sampling()
    cache_salt: Name | None = None
    priority: Int32 = 0
    job: Name = ""


PromptLogprobs = list[list[tuple[TokenId, float, int | None]] | None]
"""Each place's logprobs as (token, logprob, rank), the prompt's token first; None for the first."""
PROMPT_PLACES: Final = 2_048
"""Places of a prompt that one line has, at most, with 20 alternatives below MAX_LINE_BYTES."""


class StreamLine(Struct, frozen=True, gc=False, omit_defaults=True):
    """Tokens of one policy version with their logprobs, or how the stream ends, or both.

    `oldest_version` of their KV, if it may be older than `version` (`OnUpdate.KEEP`).
    `prompt_logprobs` are of the version of the first tokens, and come before them in lines of their
    own.
    """

    token_ids: list[SampledId] = []
    logprobs: list[Logprob] = []
    version: PolicyVersion = UNVERSIONED
    oldest_version: PolicyVersion | None = None
    finish_reason: str | None = None
    message: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


BatchPlace = Annotated[int, Meta(ge=0, lt=MAX_BATCH_TURNS)]


class BatchBody(Struct, frozen=True, gc=False):
    """Turns that begin at one moment, each as if it had been requested alone.

    batch: a random name, by which the caller may cancel some of them.
    """

    batch: Name
    turns: Annotated[list[GenerateBody], Meta(min_length=1, max_length=MAX_BATCH_TURNS)]


class BatchLine(Struct, frozen=True, gc=False, array_like=True, omit_defaults=True):
    """A line of the turn at place `turn`; with a `status` the replica refuses that turn alone."""

    turn: BatchPlace
    line: StreamLine
    status: int = 0


class LeaveBody(Struct, frozen=True, gc=False):
    """Turns of a batch that are not wanted any more."""

    batch: Name
    turns: Annotated[list[BatchPlace], Meta(max_length=MAX_BATCH_TURNS)]


class Left(Struct, frozen=True):
    """Answer to LeaveBody: those turns end, unless they had ended before."""


class Fault(Struct, frozen=True):
    """An error: a name for programs, a sentence for people."""

    type: str
    message: str


class Refusal(Struct, frozen=True):
    """Body of every answer that is not a 200."""

    error: Fault


class EpochBody(Struct, frozen=True, omit_defaults=True):
    """Opens or closes admission for a lease of `job`."""

    epoch: Epoch
    reason: Name = ""
    job: Name = ""


class Drained(Struct, frozen=True):
    """Number of ended turns."""

    aborted: int = 0


class Admitted(Struct, frozen=True):
    """Turns are taken from now on."""

    admitting: bool = True


class WarmUpState(Struct, frozen=True):
    """Result of the first turns' warm-up: its error, if it failed."""

    failed: bool = False
    said: str = ""


class ReplicaState(Struct, frozen=True, gc=False, kw_only=True):
    """A replica's account of itself. Without a statement that its weights are proven they are not.

    `job`: of `policy_version`, "" for the model as it was started.
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
