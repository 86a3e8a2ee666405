"""How a turn is sampled, in the one form that the gateway knows inside."""

from collections.abc import Mapping

import msgspec

from rose.gateway.errors import BadRequest

MAX_TOKEN_ID = 1 << 32
# Fields that must say nothing are not decoded: millions of small objects would hold up the loop.
NOTHING = msgspec.Raw(b"null")
MAX_NOTHING_BYTES = 64


class Sampling(msgspec.Struct, gc=False):
    """What every replica can do; also the `sampling` of a ROSE replica's body. `top_k` 0 is off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_tokens: int = 0
    stop_token_ids: list[int] | None = None
    allowed_token_ids: list[int] | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raise BadRequest for values that no engine takes."""
        if self.max_tokens < 1:
            raise BadRequest(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise BadRequest("min_tokens must be between 0 and max_tokens", "min_tokens")
        if not 0 <= self.temperature < float("inf"):
            raise BadRequest("temperature must be non-negative", "temperature")
        if not 0 < self.top_p <= 1:
            raise BadRequest(f"top_p must be in (0, 1], got {self.top_p}", "top_p")
        if self.top_k < -1:
            raise BadRequest(f"top_k must be 0 or -1 (off), or at least 1, got {self.top_k}")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadRequest("allowed_token_ids is empty: no token could be sampled")
        ids = [*(self.stop_token_ids or ()), *(self.allowed_token_ids or ())]
        if ids and not 0 <= min(ids) <= max(ids) < MAX_TOKEN_ID:
            raise BadRequest("stop_token_ids and allowed_token_ids are ids of at least 0")

    def rest(self, max_tokens: int) -> "Sampling":
        """The same sampling for a turn of which only `max_tokens` are still to be generated."""
        done = self.max_tokens - max_tokens
        return Sampling(
            max_tokens,
            self.temperature,
            self.top_p,
            self.top_k,
            max(0, self.min_tokens - done),
            self.stop_token_ids,
            self.allowed_token_ids,
            self.seed,
        )

    def child(self, index: int) -> "Sampling":
        """Sampling of sample `index` of several: a given seed must not make them all equal."""
        if self.seed is None or index == 0:
            return self
        other = self.rest(self.max_tokens)
        other.seed = self.seed + index
        return other


def unread(value: object) -> object:
    """What a field says that is read only to see that it says nothing; long ones are no nothing."""
    if not isinstance(value, msgspec.Raw):
        return value
    data = bytes(value)
    if len(data) > MAX_NOTHING_BYTES:
        return data
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadRequest(f"1 validation error: {error}", "body") from error


def refuse_unsupported(asked: object, neutral: Mapping[str, object]) -> None:
    """Raise BadRequest for any field of `asked` that is neither None nor at its neutral value.

    A field that would change the answer and cannot be honoured is never dropped in silence.
    """
    for name, value in neutral.items():
        given = getattr(asked, name)
        if given is NOTHING or given is None or given == value:
            # Not sent, as nearly all of them are not.
            continue
        given = unread(given)
        if given is None or given == value or (not given and not value):
            continue
        raise BadRequest(f"rollout replicas do not know {name}: leave it out", name)
