"""One turn as the gateway works on it, whatever API it came through."""

import secrets
from dataclasses import dataclass, field

import msgspec

from elastic_scheduler import TurnNeed
from rose.gateway.errors import BadRequest
from rose.gateway.origin import ANONYMOUS, Origin
from rose.gateway.sampling import MAX_TOKEN_ID, Sampling
from rose.gateway.text import TextPlan

MAX_NUMBER = 1 << 63
MAX_REQUEST_ID_CHARS = 1_024

_encode = msgspec.msgpack.Encoder().encode


def _new_life() -> str:
    return secrets.token_hex(4)


@dataclass(slots=True, eq=False)
class TurnRequest:
    """Tokens in, how to sample, and the caller's conditions.

    `priority`: lower goes first, as in vLLM. `timeout_s` counts from arrival. `named`: the caller
    chose the request id, so it can ask for the same turn again. `text` wants the output as text.
    `life` tells turns of one request id apart, of which the earlier ones came to nothing.
    """

    request_id: str
    token_ids: list[int]
    sampling: Sampling
    origin: Origin = ANONYMOUS
    min_version: int | None = None
    exact_version: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    named: bool = False
    text: TextPlan | None = None
    life: str = field(default_factory=_new_life)

    def attempt_id(self, attempt: int) -> str:
        """What a replica is told: an engine refuses an id that it knows still.

        A turn that was hung up on and is asked for anew begins with attempt 1 again, so the number
        alone would not do.
        """
        return f"{self.request_id}.{self.life}.{attempt}"

    def check(self) -> None:
        """Raise BadRequest for what the schema of a body alone cannot say."""
        if len(self.request_id) > MAX_REQUEST_ID_CHARS:
            raise BadRequest(
                f"request_id has {len(self.request_id)} characters: send at most "
                f"{MAX_REQUEST_ID_CHARS}",
                "request_id",
            )
        if not self.token_ids:
            raise BadRequest("the prompt is empty (token_ids is empty): send at least one token")
        if min(self.token_ids) < 0 or max(self.token_ids) >= MAX_TOKEN_ID:
            raise BadRequest("a prompt has token ids of at least 0 and below 2**32", "token_ids")
        if not -MAX_NUMBER <= self.priority < MAX_NUMBER:
            raise BadRequest("priority is a number of 64 bits", "priority")
        for name, version in (("min", self.min_version), ("exact", self.exact_version)):
            if version is not None and version < 0:
                raise BadRequest(f"{name}_version must be at least 0, got {version}")
        if self.min_version is not None and self.exact_version is not None:
            raise BadRequest("min_version and exact_version exclude each other: send one")
        if self.timeout_s is not None and not 0 < self.timeout_s < float("inf"):
            raise BadRequest("a timeout is a number of seconds above 0")
        self.sampling.check()

    def need(self) -> TurnNeed:
        """What the router has to know of a new turn."""
        return TurnNeed(
            self.origin.session,
            len(self.token_ids),
            self.sampling.max_tokens,
            self.min_version,
            self.exact_version,
            self.request_id,
            self.origin.job,
            self.origin.group,
        )

    def fingerprint(self) -> int:
        """Equal for requests that ask for the same tokens, however they want them delivered.

        Raises BadRequest for numbers that no replica could be sent.
        """
        stop = None if self.text is None else self.text.stop
        asked = (self.token_ids, self.sampling, self.min_version, self.exact_version, stop)
        try:
            return hash(_encode((*asked, self.cache_salt)))
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadRequest(f"a number or text of the request is out of range: {error}") from error
