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
import base64
import binascii
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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
MOST_NODES: Final = 4_096
MOST_SECRET_FILE_BYTES: Final = 4_096
# Bytes of a secret that Standard Webhooks allows.
SECRET_BYTES: Final = range(24, 65)
PREFIX: Final = "whsec_"
UNREAD: Final = "--webhook-secret-file {} cannot be read"
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
        Severity.INFO: "RegisterJobRequest capacity_freed capacity_held job_ended node_attached"
        " node_lost offer_refused run_began run_ended scheduler_leads switch_refused",
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
)  # fmt: skip
SUBJECTS: Final = ("replica", "node", "job", "policy", "deployment", "task")

_log = logging.getLogger(__name__)
_log.addFilter(FewRecords())


@dataclass(frozen=True, slots=True)
class Notice:
    """Audit record that is to be sent. data: its allowed fields, and `by`, the caller."""

    name: str
    severity: Severity
    data: Mapping[str, str | int | float]
    at_s: float = field(default_factory=time.time)
    id: str = field(default_factory=lambda: str(uuid.uuid4()))

    def message(self, source: str) -> HTTPMessage:
        """Return the HTTP message that has the notice as a CloudEvent in structured mode."""
        subjects = [f"{each}/{self.data[each]}" for each in SUBJECTS if each in self.data]
        attributes = {
            "id": self.id,
            "source": source,
            "type": f"dev.rose.{self.name}",
            "time": datetime.fromtimestamp(self.at_s, UTC),
            "datacontenttype": "application/json",
            # CloudEvents' extension for severities.
            "severitytext": self.severity.name.lower(),
            "severitynumber": int(self.severity),
        } | ({"subject": subjects[0]} if subjects else {})
        return to_structured(CloudEvent(attributes, dict(self.data)), JSONFormat())


def notice_of(event: str, fields: Mapping[str, object], by: str) -> Notice | None:
    """Return the notice of an audit record; None for a record that is not sent."""
    severity = EVENTS.get(event)
    if severity is None:
        return None
    policy = fields.get("policy")
    if isinstance(policy, Mapping):
        fields = {**policy, "policy": policy.get("name", "")}
    allowed = {name: fields[name] for name in FIELDS if fields.get(name) not in (None, "")}
    data = {
        name: value if isinstance(value, int | float) else _text(value)
        for name, value in (allowed | ({"by": by} if by else {})).items()
    }
    return Notice(NAMES.get(event, event), severity, data)


def _text(value: object) -> str:
    # A request has its mode as Protocol Buffers name it.
    return str(value).removeprefix("HARVEST_MODE_")[:MOST_CHARS]


def read_secrets(path: Path) -> list[Signer]:
    """Return a signer for each line of a secret file.

    While a secret is replaced the file has both: a receiver accepts any signature that is valid.
    Raises ConfigError.
    """
    lines = read_bounded(path, MOST_SECRET_FILE_BYTES, UNREAD).decode("utf-8", "replace").split()
    try:
        secrets = [base64.b64decode(line.removeprefix(PREFIX), validate=True) for line in lines]
    except (binascii.Error, ValueError):
        secrets = []
    sized = all(len(secret) in SECRET_BYTES for secret in secrets)
    if not secrets or not sized or not all(line.startswith(PREFIX) for line in lines):
        raise ConfigError(
            f"--webhook-secret-file {path} has to hold {PREFIX} and 24 to 64 bytes in base64, a"
            f" secret a line: echo {PREFIX}$(openssl rand -base64 32)"
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
        if not usable or "@" in parts.netloc:
            # The URL may be a secret itself.
            raise ConfigError(
                "--webhook is no URL to post to; give https://HOST/PATH, without a password"
            )


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
        self._pending: asyncio.Queue[Notice] = asyncio.Queue(MOST_PENDING)
        self._lost: set[object] = set()
        self._trouble = ""

    def telling(self, sink: AuditSink) -> AuditSink:
        """Return an audit sink that feeds the given sink and this webhook.

        Call the returned function on the event loop.
        """

        def tell(event: str, fields: dict[str, object], by: str) -> None:
            sink(event, fields, by)
            self._take(notice_of(event, fields, by))

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
                    self._ended(await self._deliver(http, notice))
                finally:
                    self._pending.task_done()

    async def drain(self) -> None:
        """Wait until no event is pending, for CLOSE_S seconds at most."""
        try:
            await asyncio.wait_for(self._pending.join(), CLOSE_S)
        except TimeoutError:
            _log.warning("the webhook has not taken all events; the audit log has them")

    def _take(self, notice: Notice | None) -> None:
        if notice is None or notice.severity < self._settings.least:
            return
        node = notice.data.get("node")
        # All nodes attach to a new leader: only those that were lost are news.
        if notice.name == "node_attached" and node not in self._lost:
            return
        self._lost.discard(node)
        if notice.name == "node_lost" and len(self._lost) < MOST_NODES:
            self._lost.add(node)
        try:
            self._pending.put_nowait(notice)
        except asyncio.QueueFull:
            self._ended(f"{MOST_PENDING} events wait for it", "dropped")

    def _ended(self, trouble: str, result: str = "failed") -> None:
        self._counted(result if trouble else "delivered")
        if trouble and not self._trouble:
            _log.warning("the webhook does not take events (%s); the audit log has them", trouble)
        elif self._trouble and not trouble:
            _log.warning("the webhook takes events again")
        self._trouble = trouble

    async def _deliver(self, http: aiohttp.ClientSession, notice: Notice) -> str:
        """Post an event until it is taken; return the reason for which it was not, or ""."""
        message = notice.message(self._source)
        for pause_s in self._pauses_s:
            trouble, again = await self._post(http, notice.id, message)
            if not again:
                return trouble
            await asyncio.sleep(pause_s)
        return (await self._post(http, notice.id, message))[0]

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
        if status // 100 == 2:
            return "", False
        return f"it answered {status}", status >= 500 or status in AGAIN


def source_of(cluster: str, scheduler: str) -> str:
    """Return CloudEvents' source of a scheduler: its cluster and its address."""
    return f"/rose/{quote(cluster or 'rose')}/scheduler/{quote(scheduler, safe=':[]')}"
