"""Types of fields with their limits, which are checked where a message is decoded."""

from typing import Annotated, Final

from msgspec import Meta

TOKEN_IDS: Final = 1 << 32
"""Exclusive upper bound of the token ids in a prompt, as engines take them."""

UNVERSIONED: Final = -1
"""Policy version of tokens that a stock engine sampled, which reports none."""

TokenId = Annotated[int, Meta(ge=0, lt=TOKEN_IDS)]
# Bounds of sampled tokens: no vocabulary is near 2**31, and a logprob is at most that of 1,
# rounded in half precision.
SampledId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Logprob = Annotated[float, Meta(le=1e-2)]
PolicyVersion = Annotated[int, Meta(le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, lt=1 << 31)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Int64 = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Epoch = Annotated[int, Meta(ge=0, le=1 << 53)]
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Name = Annotated[str, Meta(max_length=4_096)]
