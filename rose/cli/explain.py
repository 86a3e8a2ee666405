"""`rose explain TRAJECTORY`: where its turns were placed, and why."""

import http.client
import json
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping

from rose.errors import ConfigError, RefusedError

DEFAULT_GATEWAY = "http://127.0.0.1:8000"
CALL_TIMEOUT_S = 5.0
# A choice in a large fleet weighs a dozen replicas; the cheapest few say why.
SHOWN = 5


def explain(gateway: str, subject: str) -> int:
    """Print each remembered choice, oldest first. Raises RoseError when there is nothing to say."""
    for decision in _ask(gateway, subject):
        sys.stdout.write(line_of(decision) + "\n")
    return 0


def line_of(decision: Mapping[str, object]) -> str:
    """`12.0 s ago  q1  -> guest-0: cheapest; 9 tokens expected (guest-0 0.41 s, own-1 0.5 s)`."""
    age_s, expected = decision["age_s"], decision["expected_tokens"]
    weighed = decision["weighed"]
    assert isinstance(weighed, list)
    assert isinstance(age_s, float | int)
    cheapest = sorted(weighed, key=lambda pair: float(pair[1]))[:SHOWN]
    costs = ", ".join(f"{name} {cost_s:.3g} s" for name, cost_s in cheapest)
    long = ", likely among the longest" if decision["is_long"] else ""
    return (
        f"{age_s:8.1f} s ago  {decision['request_id'] or '-'}  -> {decision['replica'] or 'wait'}:"
        f" {decision['why']}; {expected} tokens expected{long} ({costs or 'nobody'})"
    )


def _ask(gateway: str, subject: str) -> list[dict[str, object]]:
    base = gateway.rstrip("/")
    if urllib.parse.urlsplit(base).scheme not in ("http", "https"):
        raise ConfigError(f"--gateway {gateway} is no URL; write http://HOST:PORT")
    url = f"{base}/rose/v1/explain/{urllib.parse.quote(subject, safe='')}"
    try:
        with urllib.request.urlopen(url, timeout=CALL_TIMEOUT_S) as reply:  # noqa: S310 - checked
            decisions: list[dict[str, object]] = json.load(reply)["decisions"]
            return decisions
    except urllib.error.HTTPError as error:
        if error.code == http.client.NOT_FOUND:
            raise RefusedError(
                f"the gateway remembers no choice for {subject!r}: name a request id or a session"
                " of one of its latest turns"
            ) from error
        raise RefusedError(f"{base} answers HTTP {error.code}; is it a rose gateway?") from error
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        raise ConfigError(
            f"no gateway answers at {base} ({error}); start one, or give --gateway"
        ) from error
