"""A replica's endpoint, in the engine's API process: turns for gateways, control for its node.

generate          GenerateBody ──► StreamLine, one JSON a line; before the first: a Refusal
generate_batch    BatchBody ──► BatchLine, one JSON a line, of all its turns as they come
generate_batch/…  LeaveBody: some of them are not wanted any more
images            an image's bytes ──► ImageHeld; turns then name it by its hash
POOLING           vLLM's bodies and answers ──► behind the same lease
drain, admit      EpochBody ──► Drained, Admitted
state             ──► ReplicaState
weights/…         contract/weights.py: gateways and clients do not load it, and start sooner
"""

import struct
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Final, Self

from msgspec import UNSET, Meta, Struct, UnsetType, structs

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
    Sha256,
    TokenId,
)

MAX_BODY_BYTES: Final = 4 << 20
MAX_CONTROL_BYTES: Final = 256 << 10
MAX_IMAGE_BYTES: Final = 16 << 20
# A line holds one step's tokens; anything near this is not one.
MAX_LINE_BYTES: Final = 1 << 20

ROUTES: Final = "/rose/v1/"
GENERATE: Final = f"{ROUTES}generate"
GENERATE_BATCH: Final = f"{ROUTES}generate_batch"
LEAVE_BATCH: Final = f"{GENERATE_BATCH}/leave"
IMAGES: Final = f"{ROUTES}images"
# All routes of turns.
TURNS: Final = (GENERATE, GENERATE_BATCH, LEAVE_BATCH, IMAGES)
NO_IMAGE: Final = 428
"""HTTP status for a turn that names an image whose bytes have to be sent first."""
MAX_BATCH_TURNS: Final = 256
MOST_OFFERS: Final = 64
# vLLM's own routes for models that are not generative, for the callers of turns.
POOLING: Final = ("/pooling", "/score", "/classify")
JOB_QUERY: Final = "rose_job"
DRAIN: Final = f"{ROUTES}drain"
ADMIT: Final = f"{ROUTES}admit"
STATE: Final = f"{ROUTES}state"


class StructuredOutputs(Struct, frozen=True, gc=False, omit_defaults=True):
    """Constraint on the output's text, in vLLM's words: exactly one of the first six fields.

    `json` and `structural_tag` are JSON documents as text.
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
    """Sampling parameters; the defaults leave the policy's distribution unchanged, as RL needs it.

    `top_k` 0 is off. `allowed_token_ids` None allows all. No stop token is sampled before
    `min_tokens`. `repetition_penalty` counts the prompt's tokens too, the other penalties the
    output's alone. A turn also ends at the model's own end-of-sequence token, unless `ignore_eos`.
    `prompt_logprobs` N requests logprobs of each prompt token and of N alternatives to it,
    `logprobs` N those of the N most likely tokens at each output token.
    `routed_experts_prompt_start` N requests the experts of each position from N on.
    `deterministic` requests that the same turn under the same version gives the same bits on every
    replica, whatever else it computes; a replica whose engine is not batch-invariant refuses it.
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
    logprobs: Count = 0
    routed_experts_prompt_start: Count | None = None
    deterministic: bool = False

    def rest(self, max_tokens: int, length: int = 0) -> Self:
        """Return the sampling of a turn that continues with only `max_tokens` left to generate.

        `min_tokens` shrinks by the tokens generated before; prompt logprobs are not requested
        again, nor experts of positions that had a forward pass. length: tokens so far, of which
        the last one had none.
        """
        done = self.max_tokens - max_tokens
        if not done:
            return self
        min_tokens = max(0, self.min_tokens - done)
        start = self.routed_experts_prompt_start
        return structs.replace(
            self,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            prompt_logprobs=None,
            routed_experts_prompt_start=None if start is None else length - 1,
        )

    @property
    def counts_output(self) -> bool:
        """True if the next token depends on how earlier output came to be: on penalties, on
        structured output, or on random numbers of a deterministic turn.

        Such a turn cannot continue elsewhere, with its tokens as a prompt.
        """
        return bool(
            self.frequency_penalty
            or self.presence_penalty
            or self.structured_outputs is not None
            or (self.deterministic and self.temperature)
        )


def sampling_of(fields: Mapping[str, Any]) -> Sampling:
    """Return the Sampling in a request's fields; a field that is missing or None keeps its default.

    Fields of other names are ignored.
    """
    given = {name: fields.get(name) for name in Sampling.__struct_fields__}
    return Sampling(**{name: value for name, value in given.items() if value is not None})


class GenerateBody(Struct, frozen=True, gc=False):
    """Request body of `generate`: a turn, or the rest of one whose tokens so far end the prompt.

    job: whose policy is to run; a replica that another job leases refuses the turn. Empty: any job.
    images: those in the prompt, in order. The prompt has the tokens of each, as the model's
    processor writes them, or one placeholder in their place.
    """

    request_id: Name
    token_ids: list[TokenId]
    sampling: Sampling = Sampling()
    cache_salt: Name | None = None
    priority: Int32 = 0
    job: Name = ""
    images: tuple[Sha256, ...] | UnsetType = UNSET


class ImageHeld(Struct, frozen=True):
    """Answer to `images`: the hash of the bytes, by which turns may name the image from now on."""

    sha256: Sha256


PromptLogprobs = list[list[tuple[TokenId, float, int | None]] | None]
"""Logprobs of each prompt token and its alternatives as (token, logprob, rank), the prompt's own
token first; None for the first prompt token.
"""
PROMPT_PLACES: Final = 2_048
"""Most prompt tokens in one line; with 20 alternatives each, a line stays below MAX_LINE_BYTES."""
MOST_LOGPROBS: Final = 1_024
"""Most likely tokens whose logprobs a turn may request, at each token."""
PROMPT_IDS: Final = 65_536
"""Most prompt token ids in one line."""


@cache
def top_rows(most: int) -> struct.Struct:
    """Return the packing of `most` ids and logprobs, as `StreamLine.top_logprobs` has them."""
    return struct.Struct(f"<{most}i{most}f")


def top_row_bytes(most: int) -> int:
    """Return the bytes of the `most` most likely tokens at one output token."""
    return top_rows(most).size


class RoutedExperts(Struct, frozen=True, gc=False, array_like=True):
    """Experts that the model's router chose at some positions, in each of its layers.

    data: for each position `layers` times `choices` expert ids of `width` bytes, little-endian.
    """

    layers: Annotated[int, Meta(gt=0, lt=1 << 16)]
    choices: Annotated[int, Meta(gt=0, lt=1 << 16)]
    width: Annotated[int, Meta(ge=1, le=2)]
    data: bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one position."""
        return self.layers * self.choices * self.width


class StreamLine(Struct, frozen=True, gc=False, omit_defaults=True):
    """One line of the answer to `generate`: tokens of one policy version, or the end, or both.

    Each token has its logprob. `oldest_version`: of the tokens' KV, if it may be older than
    `version` (`OnUpdate.KEEP`). `finish_reason`: set in the last line. `prompt_logprobs` come in
    lines of their own, before the first token, and are of the same version. `top_logprobs`: for
    each token the `Sampling.logprobs` most likely ones, most likely first, as little-endian arrays:
    their ids (int32), then their logprobs (float32). `routed_experts`: of the position before each
    token; those of earlier positions come in lines of their own, before the first token, and are of
    the same version. `prompt_token_ids`: the prompt with the tokens of its images in the place of
    placeholders, in the first lines, of at most PROMPT_IDS each.
    """

    token_ids: list[SampledId] = []
    logprobs: list[Logprob] = []
    version: PolicyVersion = UNVERSIONED
    oldest_version: PolicyVersion | None = None
    finish_reason: str | None = None
    message: str | None = None
    prompt_logprobs: PromptLogprobs | None = None
    top_logprobs: bytes | None = None
    routed_experts: RoutedExperts | None = None
    prompt_token_ids: list[TokenId] | None = None


BatchPlace = Annotated[int, Meta(ge=0, lt=MAX_BATCH_TURNS)]


class BatchBody(Struct, frozen=True, gc=False):
    """Request body of `generate_batch`: turns that begin together, each as if sent alone.

    batch: a random name, with which the caller may later cancel some of the turns.
    """

    batch: Name
    turns: Annotated[list[GenerateBody], Meta(min_length=1, max_length=MAX_BATCH_TURNS)]


class BatchLine(Struct, frozen=True, gc=False, array_like=True, omit_defaults=True):
    """One line of a batch's answer: `line` of the turn at index `turn` of the request.

    `status` not 0: the replica refuses that turn alone, with this HTTP status.
    """

    turn: BatchPlace
    line: StreamLine
    status: int = 0


class LeaveBody(Struct, frozen=True, gc=False):
    """Request body of `generate_batch/leave`: indices of a batch's turns to cancel."""

    batch: Name
    turns: Annotated[list[BatchPlace], Meta(max_length=MAX_BATCH_TURNS)]


class Left(Struct, frozen=True):
    """Empty answer to LeaveBody: the named turns are cancelled, unless they had ended before."""


class Fault(Struct, frozen=True):
    """Error in an answer: `type` is a name for programs, `message` a sentence for people."""

    type: str
    message: str


class Refusal(Struct, frozen=True):
    """Body of every answer that is not a 200: one error."""

    error: Fault


class EpochBody(Struct, frozen=True, omit_defaults=True):
    """Request body of `drain` and `admit`, which close and open a replica for turns of a lease.

    epoch: of the lease. job: that holds it. latest: newest version of the job, None if unknown; at
    0 turns may begin with the base beside adapters of other jobs. offer: number of the lease among
    those that a replica for several jobs has at a time.
    """

    epoch: Epoch
    reason: Name = ""
    job: Name = ""
    latest: PolicyVersion | None = None
    offer: Annotated[int, Meta(ge=0, lt=MOST_OFFERS)] = 0


class Drained(Struct, frozen=True):
    """Answer to `drain`: number of turns that it ended."""

    aborted: int = 0


class Admitted(Struct, frozen=True):
    """Answer to `admit`: the replica takes turns from now on."""

    admitting: bool = True


class WarmUpState(Struct, frozen=True):
    """Result of the warm-up before the first turns; `said` is its error if it `failed`."""

    failed: bool = False
    said: str = ""


class ReplicaState(Struct, frozen=True, gc=False, kw_only=True):
    """Answer to `state`: work, lease and policy version of a replica.

    `proven`: the weights were checked against the version's digest. `job`: whose `policy_version`
    it is, "" for the model as started. `tokens_total`: output tokens so far. `kv_tokens`: tokens
    that the KV cache holds. `adapters`: newest LoRA adapter in a slot, by job. `epoch` and
    `admitting` are of the first offer.
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
    adapters: dict[str, int] = {}
