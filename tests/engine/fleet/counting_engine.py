"""The stand-in engine of a node's tests, which also makes turns. argv: port, journal, model.

A turn counts on from the last token of its prompt, so an answer is right when it is one unbroken
count, whoever made which part of it; token t has the logprob -t / 1000. A turn ends `revoked` once
its lease is over. The journal says how each ended.
"""

import json
import sys
import time
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "node"))

from standin_engine import SAID, EngineHandler, main, note

STEP_S = 0.04
TOKENS_A_STEP = 4


class CountingHandler(EngineHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        if self.path != "/rose/v1/generate":
            super().do_POST()
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        epoch = SAID["epoch"]
        if not SAID["admitting"]:
            self.answer(503, {"error": {"type": "draining", "message": "no lease"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        made = 0
        try:
            for line in steps(body, epoch):
                self._chunk(json.dumps(line).encode() + b"\n")
                made += len(line.get("token_ids", ()))
            self._chunk(b"")
            note("turn", id=body["request_id"], made=made, end=line["finish_reason"])
        except OSError:
            self.close_connection = True
            note("turn", id=body["request_id"], made=made, end="left")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))


def steps(body: dict[str, Any], epoch: int) -> Any:
    """Lines of one turn under the lease `epoch`."""
    first, budget = body["token_ids"][-1] + 1, body["sampling"]["max_tokens"]
    for at in range(0, budget, TOKENS_A_STEP):
        time.sleep(STEP_S)
        if not SAID["admitting"] or SAID["epoch"] != epoch:
            yield {"finish_reason": "revoked"}
            return
        tokens = [*range(first + at, first + min(at + TOKENS_A_STEP, budget))]
        logprobs = [-token / 1000 for token in tokens]
        yield {"token_ids": tokens, "logprobs": logprobs, "version": SAID["policy_version"]}
    yield {"finish_reason": "length"}


if __name__ == "__main__":
    main(ThreadingHTTPServer, CountingHandler)
