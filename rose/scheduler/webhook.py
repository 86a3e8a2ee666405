"""Webhook of a scheduler: audit records that people should know of, posted as CloudEvents.

    audit record ──► EVENTS: its severity ──► queue ──► POST, signed ──► 2xx: delivered
                                               │ full      ▲    │ 408, 429, 5xx, no answer: again
                                               ▼ dropped   └────┘ else, or the fifth time: failed

The body is a CloudEvent 1.0 in structured mode, signed as https://www.standardwebhooks.com says.
Its id is the same at each try. The queue is bounded and one task posts, in order: a record never
waits for the receiver. The audit log has what was not delivered.
"""

import argparse
import asyncio
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlsplit

import aiohttp
from cloudevents.core.bindings.http import HTTPMessage, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from standardwebhooks import Webhook as Signer

from rose.errors import ConfigError
from rose.process.http_port import FewRecords
from rose.scheduler.service import AuditSink
from rose.security.watched_files import WatchedFiles, read_bounded

MOST_PENDING: Final = 1_024
ANSWER_S: Final = 10.0
# Five tries within four minutes, those that wait for an answer included.
PAUSES_S: Final = (1.0, 5.0, 25.0, 125.0)
CLOSE_S: Final = 2.0
MOST_CHARS: Final = 400
UNREAD: Final = "--webhook-secret-file {} cannot be read"
# Standard Webhooks' form of 24 to 64 bytes.
SECRET: Final = re.compile(
    "whsec_(?:[A-Za-z0-9+/]{4}){8,21}(?:[A-Za-z0-9+/]{2}(?:==|[A-Za-z0-9+/]=))?"
)
# Statuses after which a request may be made again, beside all of 500 and above.
AGAIN: Final = (408, 429)


class Severity(IntEnum):
    """Severity of an event, in the words of the alerts and the numbers of OpenTelemetry's logs."""

    INFO = 9
    TICKET = 13
    PAGE = 17


EVENTS: Final = {
    event: severity
    for severity, events in {
        Severity.PAGE: "canary_halted store_answers store_stalled tick_broken",
        Severity.TICKET: "SetHarvestRequest activation_failed call_refused job_dropped"
        " object_refused objects_heard objects_unheard peer_broken peer_refused policy_applied"
        " policy_deleted run_taken_over scheduler_steps_down stop_read task_died",
        Severity.INFO: "RegisterJobRequest capacity_freed capacity_held job_ended node_lost"
        " offer_refused run_began run_ended scheduler_leads switch_refused",
    }.items()
    for event in events.split()
}
"""Severity by the audit log's name of each event that is sent. Leases and versions are not: they
begin and end all day."""
NAMES: Final = {"SetHarvestRequest": "harvest_set", "RegisterJobRequest": "job_registered"}
# Fields of a record that are sent; all others stay in the audit log.
FIELDS: Final = (
    "node", "replica", "job", "deployment", "policy", "mode", "stopPolicy", "run", "holder",
    "from", "version", "versions", "reason", "why", "message", "task", "term", "objects",
    "by",
)  # fmt: skip
MODE: Final = "HARVEST_MODE_"
SUBJECTS: Final = ("replica", "node", "job", "policy", "deployment", "task")

_log = logging.getLogger(__name__)
_log.addFilter(FewRecords())


def notice_of(
    event: str, fields: Mapping[str, object], by: str, source: str
) -> tuple[str, HTTPMessage] | None:
    """Return the id and the HTTP message of an audit record that is sent; None for others."""
    if event not in EVENTS:
        return None
    policy = fields.get("policy")
    if isinstance(policy, Mapping):
        fields = {**policy, "policy": policy.get("name", "")}
    fields = {**fields, "by": by}
    data = {
        # A request has its mode as Protocol Buffers name it.
        name: value if isinstance(value, int) else str(value).removeprefix(MODE)[:MOST_CHARS]
        for name in FIELDS
        if (value := fields.get(name)) not in (None, "")
    }
    attributes = {
        "id": str(uuid.uuid4()),
        "source": source,
        "type": f"dev.rose.{NAMES.get(event, event)}",
        "time": datetime.now(UTC),
        "datacontenttype": "application/json",
        # CloudEvents' extension for severities.
        "severitytext": EVENTS[event].name.lower(),
        "severitynumber": int(EVENTS[event]),
    }
    if subject := next((f"{each}/{data[each]}" for each in SUBJECTS if each in data), None):
        attributes["subject"] = subject
    return str(attributes["id"]), to_structured(CloudEvent(attributes, data), JSONFormat())


def read_secrets(path: Path) -> list[Signer]:
    """Return a signer for each line of a secret file. Raises ConfigError.

    While a secret is replaced the file has both: a receiver accepts any signature that is valid.
    """
    secrets = read_bounded(path, 4_096, UNREAD).decode("utf-8", "replace").split()
    if not secrets or not all(map(SECRET.fullmatch, secrets)):
        raise ConfigError(
            f"--webhook-secret-file {path} has to hold whsec_ and 24 to 64 bytes in base64, a"
            " secret a line: echo whsec_$(openssl rand -base64 32)"
        )
    return [Signer(secret) for secret in secrets]


@dataclass(frozen=True, slots=True)
class WebhookSettings:
    """Settings of a webhook: its URL, its secrets' file, and the least severity that is sent.

    Raises ConfigError for a URL to which nothing can be posted.
    """

    url: str
    secret_file: Path
    least: Severity = Severity.INFO

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable or "@" in parts.netloc:  # It may be a secret itself.
            raise ConfigError("--webhook is no URL to post to; give https://HOST/PATH, no password")


def add_webhook_options(parser: argparse.ArgumentParser) -> None:
    """Add --webhook, --webhook-secret-file and --webhook-severity to a parser."""
    add = parser.add_argument_group("webhook", "events for people, as CloudEvents").add_argument
    add("--webhook", metavar="URL", help="where events are posted")
    what = "Standard Webhooks' secrets (whsec_…) that sign them, one a line"
    add("--webhook-secret-file", type=Path, metavar="FILE", help=what)
    words = [each.name.lower() for each in Severity]
    what = "least severity of an event that is posted (default info)"
    add("--webhook-severity", default="info", choices=words, help=what)


def taken_webhook(args: argparse.Namespace) -> WebhookSettings | None:
    """Return the webhook that a command line names, None without one. Raises ConfigError."""
    if args.webhook is None and args.webhook_secret_file is None:
        return None
    if not args.webhook or args.webhook_secret_file is None:
        raise ConfigError("--webhook and --webhook-secret-file need each other; give both")
    least = Severity[args.webhook_severity.upper()]
    return WebhookSettings(args.webhook, args.webhook_secret_file, least)


class Webhook:
    """Sender of a scheduler's events to one URL."""

    def __init__(
        self,
        settings: WebhookSettings,
        source: str,
        counted: Callable[[str], object],
        pauses_s: tuple[float, ...] = PAUSES_S,
    ) -> None:
        """Read the secrets. Raises ConfigError.

        source: CloudEvents' source. counted: takes `delivered`, `failed` or `dropped` for each
        event. pauses_s: seconds between the tries.
        """
        self._settings, self._source, self._counted = settings, source, counted
        path = settings.secret_file
        self._secrets = WatchedFiles((path,), partial(read_secrets, path), UNREAD)
        self._pauses_s = pauses_s
        self._pending: asyncio.Queue[tuple[str, HTTPMessage]] = asyncio.Queue(MOST_PENDING)
        self._trouble = ""

    def telling(self, sink: AuditSink) -> AuditSink:
        """Return an audit sink that feeds the given sink and this webhook, on the event loop."""

        def tell(event: str, fields: dict[str, object], by: str) -> None:
            sink(event, fields, by)
            if EVENTS.get(event, 0) < self._settings.least:
                return
            if (notice := notice_of(event, fields, by, self._source)) is not None:
                try:
                    self._pending.put_nowait(notice)
                except asyncio.QueueFull:
                    self._ended(f"{MOST_PENDING} events wait for it", "dropped")

        return tell

    def troubles(self) -> list[str]:
        """Return a line if the last event was not delivered, or if the secret cannot be read."""
        return [f"webhook: {each}" for each in (self._trouble, self._secrets.trouble) if each]

    async def run(self) -> None:
        """Post the pending events, in order, until cancelled."""
        limits = aiohttp.ClientTimeout(total=ANSWER_S)
        # Receivers are outside of the cluster, so the environment's proxy is asked.
        async with aiohttp.ClientSession(timeout=limits, trust_env=True) as http:
            while True:
                notice = await self._pending.get()
                try:
                    self._ended(await self._deliver(http, *notice))
                finally:
                    self._pending.task_done()

    async def drain(self) -> None:
        """Wait until no event is pending, for CLOSE_S seconds at most."""
        try:
            await asyncio.wait_for(self._pending.join(), CLOSE_S)
        except TimeoutError:
            _log.warning("the webhook has not taken all events; the audit log has them")

    def _ended(self, trouble: str, result: str = "failed") -> None:
        self._counted(result if trouble else "delivered")
        if trouble and not self._trouble:
            _log.warning("the webhook does not take events (%s); the audit log has them", trouble)
        elif self._trouble and not trouble:
            _log.warning("the webhook takes events again")
        self._trouble = trouble

    async def _deliver(self, http: aiohttp.ClientSession, name: str, message: HTTPMessage) -> str:
        """Post an event until it is taken; return the reason for which it was not, or ""."""
        for pause_s in self._pauses_s:
            trouble, again = await self._post(http, name, message)
            if not again:
                return trouble
            await asyncio.sleep(pause_s)
        return (await self._post(http, name, message))[0]

    async def _post(
        self, http: aiohttp.ClientSession, name: str, message: HTTPMessage
    ) -> tuple[str, bool]:
        """Post an event once; return why it was not taken, or "", and if it may be posted again."""
        now = datetime.now(UTC)
        text = message.body.decode()
        signatures = (signer.sign(name, now, text) for signer in self._secrets.newest())
        headers = {
            **message.headers,
            "webhook-id": name,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": " ".join(signatures),
        }
        try:
            async with http.post(
                self._settings.url, data=message.body, headers=headers, allow_redirects=False
            ) as answer:
                status = answer.status
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"{type(error).__name__}: it does not answer", True
        except ValueError as error:  # Of the environment's proxy, for example.
            return f"nothing can be posted there: {error}"[:MOST_CHARS], False
        if status // 100 == 2:
            return "", False
        return f"it answered {status}", status >= 500 or status in AGAIN


def source_of(cluster: str, scheduler: str) -> str:
    """Return CloudEvents' source of a scheduler: its cluster and its address."""
    return f"/rose/{quote(cluster or 'rose')}/scheduler/{quote(scheduler, safe=':[]')}"
