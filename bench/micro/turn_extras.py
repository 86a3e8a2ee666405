"""Cost of what a turn may ask for beside tokens: bytes and processor time of each token.

    python -m bench.micro.turn_extras [--rounds N] [--tokens N] [--out FILE]

Prints one JSON object. One turn of that many tokens is taken through the replica's line, the
gateway's decoder, journal and answer, and the client's decoder, a token a line, without an engine
and without sockets: an engine's own work, a larger top-k for example, comes on top. `line_bytes`
and `answer_bytes` are of one token, `added_us` the median over rounds of the time beyond the same
round's plain turn, of one token in all four places together. `images`: bytes of a request with an
image of 1 MiB, and the median time in which the gateway reads it: with the file, and with its hash.
"""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, Final

import msgspec

from bench.common.report import parser_of, put_judged
from elastic_scheduler import End, TurnJournal
from rose.client.wire import decode_turn
from rose.contract.gateway import ImageName
from rose.contract.replica import RoutedExperts, StreamLine, top_rows
from rose.gateway.apis.vllm import VllmFrontend
from rose.gateway.images import KeptImages
from rose.gateway.text_codec import ServedModel
from rose.gateway.turns.token_stream import ROUTED_EXPERTS, TOP_LOGPROBS, TokenStream
from rose.images import Image

PLAIN: Final = "plain"
LAYERS, CHOICES = 48, 8
ARMS: Final[dict[str, tuple[int, bool, bool]]] = {
    PLAIN: (0, False, False),
    "20 logprobs, packed": (20, True, False),
    "256 logprobs, packed": (256, True, False),
    "256 logprobs, JSON": (256, False, False),
    f"experts, {LAYERS} layers of {CHOICES}": (0, False, True),
}
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StreamLine).decode


def lines_of(most: int, routes: bool, tokens: int) -> list[StreamLine]:
    """Return a turn's lines, of a token each, with the data that it asks for."""
    top = top_rows(most).pack(*range(most), *[-1.5 - k / 7 for k in range(most)])
    experts = RoutedExperts(LAYERS, CHOICES, 1, os.urandom(LAYERS * CHOICES))
    return [
        StreamLine(
            [1_000 + k],
            [-0.123456789],
            7,
            top_logprobs=top if most else None,
            routed_experts=experts if routes else None,
        )
        for k in range(tokens)
    ]


def taken(arm: str, tokens: int) -> dict[str, float]:
    """Take one turn through all four places; return its bytes and microseconds a token."""
    most, packed, routes = ARMS[arm]
    lines = lines_of(most, routes, tokens)
    asked = {"token_ids": [5], "packed": packed, "sampling_params": {"logprobs": most}}
    frontend = VllmFrontend(ServedModel("m", 1 << 20), 1)
    body = _encode({**asked, "request_id": "r"})
    answer = asyncio.run(frontend.read(body, {})).answer
    began_s = time.perf_counter()
    sent = [_encode(line) for line in lines]
    journal = TurnJournal([5], tokens, max_attempts=1)
    journal.begin("r0", "dedicated")
    stream = TokenStream(journal)
    for data in sent:
        line = _decode(data)
        columns = {}
        if line.top_logprobs is not None:
            columns[TOP_LOGPROBS] = line.top_logprobs
        if line.routed_experts is not None:
            columns[ROUTED_EXPERTS] = line.routed_experts.data
            stream.routes = line.routed_experts
        journal.append(1, line.token_ids, line.logprobs, line.version, columns=columns)
    journal.end(1, End.FINISHED, "length")
    asyncio.run(answer.prepare([stream]))
    whole = answer.whole([stream])
    decode_turn(whole)
    return {
        "line_bytes": sum(map(len, sent)) / tokens,
        "answer_bytes": len(whole) / tokens,
        "us": 1e6 * (time.perf_counter() - began_s) / tokens,
    }


def measure(rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Measure all arms, one after the other in each round."""
    found: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for _ in range(rounds + 1):
        for arm, blocks in found.items():
            blocks.append(taken(arm, tokens))
    rows = []
    for arm, (_, *blocks) in found.items():
        added = [b["us"] - p["us"] for b, p in zip(blocks, found[PLAIN][1:], strict=True)]
        row = {name: round(blocks[0][name], 1) for name in ("line_bytes", "answer_bytes")}
        us = round(median(block["us"] for block in blocks), 2)
        rows.append({"name": arm, **row, "us": us, "added_us": round(median(added), 2)})
    return rows


def images(rounds: int) -> list[dict[str, Any]]:
    """Measure a request that brings an image's bytes, and one that names it."""
    data = b"\x89PNG\r\n\x1a\n" + os.urandom(1 << 20)
    kept = KeptImages(64 << 20, lambda caller, job: job)
    frontend = VllmFrontend(ServedModel("m", 1 << 20), 1, None, kept)
    bodies = {PLAIN: [], "bytes": [data], "hash": [ImageName(Image.of(data).sha256)]}
    found: dict[str, list[float]] = {name: [] for name in bodies}
    sizes = dict[str, int]()
    for _ in range(rounds + 1):
        for name, given in bodies.items():
            body = _encode({"token_ids": [5], "request_id": "r", "images": given})
            sizes[name] = len(body)
            began_s = time.perf_counter()
            asyncio.run(frontend.read(body, {}))
            found[name].append(1e6 * (time.perf_counter() - began_s))
    plain = median(found[PLAIN][1:])
    return [
        {
            "name": name,
            "request_bytes": sizes[name] - sizes[PLAIN],
            "added_us": round(median(found[name][1:]) - plain, 1),
        }
        for name in ("bytes", "hash")
    ]


def main(argv: Sequence[str] | None = None) -> int:
    args = parser_of(__doc__, "bench.micro.turn_extras", rounds=7, tokens=2_048).parse_args(argv)
    arms = measure(args.rounds, args.tokens)
    made = {"tokens": args.tokens, "arms": arms, "images": images(args.rounds)}
    return put_judged(made, args.out, good=True)


if __name__ == "__main__":
    sys.exit(main())
