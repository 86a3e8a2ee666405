"""Holds by alerts: Alertmanager posts groups of alerts, of which rules make policies.

    POST /v1/alerts ── token, version 4 ──> AlertGroup: all alerts of a group, firing and resolved
    a rule that a firing alert matches ──> a policy `alert.RULE.ALERT.GROUP`, until its limit
    a policy of the group that no firing alert asks for ──> deleted

A hold is a policy among others: the store keeps it, `rose policy` and the dashboard show it, the
audit log names it. Alertmanager cannot sign a body, so a bearer token over TLS proves the sender.
It posts again after a 5xx alone, so a standby and a store that does not answer reply with one.
"""

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from aiohttp import web

from elastic_scheduler.capacity import CapacityPolicy, PolicyMode, policy_of
from elastic_scheduler.capacity.policy import seconds_of
from elastic_scheduler.capacity.policy_file import MAX_POLICY_BYTES
from elastic_scheduler.errors import PolicyError
from rose.addresses import PATIENCE_S
from rose.core_yaml import documents
from rose.errors import ConfigError, RefusedError, decoded
from rose.process.http_port import HttpPort
from rose.scheduler.core.messages import PolicyApplied, PolicyDeleted
from rose.scheduler.service import SchedulerService
from rose.security.certificates import CertificateFiles
from rose.security.tokens import SecretFile
from rose.store import LeadershipLostError

BY: Final = "alertmanager"
MAX_BODY_BYTES: Final = 1 << 20
# Length of 32 random bytes in base64.
LEAST_TOKEN_CHARS: Final = 43
MINUTE_S, MOST_LIMIT_S = 60, 8_760 * 3_600
# Names of the policies made here; the last part is the group's.
_NAME: Final = re.compile(r"alert\..+\.[0-9a-f]{12}")
Labels = dict[str, str]


class Alert(msgspec.Struct, frozen=True):
    """Alert of a group, by its labels."""

    status: Literal["firing", "resolved"]
    labels: Labels


class AlertGroup(msgspec.Struct, frozen=True, rename="camel"):
    """Message of Alertmanager's webhook, version 4.

    truncated_alerts: number of alerts that the receiver's `max_alerts` left out.
    """

    version: Literal["4"]
    group_key: str
    status: Literal["firing", "resolved"]
    alerts: list[Alert]
    common_labels: Labels
    truncated_alerts: int = 0


class AlertRule(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """Policy that is in force while alerts fire whose labels match these patterns.

    node_name: an alert's label with the name of a node. node_labels: an alert's label by a node's.
    limit: duration, as `6h`, after which the policy ends unless the alert is posted again.
    """

    match: Labels
    policy: dict[str, Any]
    node_name: str = ""
    node_labels: Labels = {}
    limit: str = ""

    def whole(self) -> CapacityPolicy:
        """Return the policy for all nodes of the rule. Raises ValueError if it cannot hold any."""
        policy = policy_of(self.policy)
        if not self.match:
            raise ValueError("match: names no label; write some, as severity: page")
        if policy.mode is PolicyMode.ACTIVE:
            raise ValueError("policy.mode: no alert lends; write Off, or leave it out")
        if policy.model_fields_set <= {"name", "node_selector"}:
            raise ValueError("policy: holds nothing; write stopPolicy: HoldAndDrain")
        if self.node_name and policy.node_selector.names:
            raise ValueError("policy.nodeSelector.names: nodeName gives the names; leave one out")
        if self.limit and not MINUTE_S <= seconds_of(self.limit) <= MOST_LIMIT_S:
            raise ValueError(f"limit: {self.limit} is out of bounds; write 1m to 8760h")
        return policy

    def matches(self, labels: Labels, *, partly: bool = False) -> bool:
        """Return True if all patterns match; partly: a label that is missing may be any."""
        return all(
            fnmatchcase(labels.get(label, ""), pattern)
            for label, pattern in self.match.items()
            if label in labels or not partly
        )

    def policy_for(self, alerts: Sequence[Labels], group: str, wall_s: float) -> CapacityPolicy:
        """Return the policy while these alerts of a group fire.

        An alert without a label that chooses nodes is about all nodes of the rule.
        """
        whole = self.whole()
        alert = min(labels.get("alertname", "") for labels in alerts)
        slug = re.sub(r"[^a-z0-9]+", "-", alert.lower()).strip("-")[:80] or "unnamed"
        said = json.loads(whole.to_json()) | {"name": f"alert.{whole.name[:100]}.{slug}.{group}"}
        if self.limit:
            # Whole minutes, so that a message that is sent twice changes nothing.
            until_s = ((wall_s + seconds_of(self.limit)) // MINUTE_S + 1) * MINUTE_S
            said["until"] = datetime.fromtimestamp(until_s, UTC).isoformat()
        selector = said.get("nodeSelector", {})
        narrow = {**selector, "matchExpressions": [*selector.get("matchExpressions", [])]}
        names = {labels.get(self.node_name, "") for labels in alerts}
        if "" not in names:
            without_port = {re.sub(r":[0-9]+$", "", name) for name in names}
            narrow["names"] = sorted(map(escape, names | without_port))
        for key, label in self.node_labels.items():
            values = {labels.get(label, "") for labels in alerts}
            if "" not in values:
                expression = {"key": key, "operator": "In", "values": sorted(values)}
                narrow["matchExpressions"].append(expression)
        chosen = policy_of(said | {"nodeSelector": narrow})
        return chosen if len(chosen.to_json()) <= MAX_POLICY_BYTES else policy_of(said)


def read_rules(path: Path) -> tuple[AlertRule, ...]:
    """Return the rules in a YAML or JSON file, a list. Raises ConfigError in one line."""
    try:
        lists = msgspec.convert([said for said, _ in documents(path)], list[list[AlertRule]])
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); check the path") from None
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"{path} is no list of alert rules: {error}") from None
    rules = tuple(rule for each in lists for rule in each)
    names: set[str] = set()
    for number, rule in enumerate(rules, 1):
        try:
            name = rule.whole().name
            # Alerts may come without a fault that is the rule's own.
            labels = dict.fromkeys((rule.node_name, *rule.node_labels.values()), "any")
            rule.policy_for([labels], "0" * 12, time.time())
        except (PolicyError, ValueError) as error:
            raise ConfigError(f"{path}: rule {number}: {error}") from None
        if name in names:
            raise ConfigError(f"{path}: rule {number}: another one is named {name}; rename one")
        names.add(name)
    return rules


def plan(
    rules: Sequence[AlertRule],
    group: AlertGroup,
    known: Mapping[str, CapacityPolicy],
    wall_s: float,
) -> list[PolicyApplied | PolicyDeleted]:
    """Return the changes that a group of alerts makes to the policies in force, in order.

    Alerts that were left out of the message may be any with the group's common labels, so they
    match what those do not contradict, hold all nodes of a rule, and end no policy.
    """
    key = hashlib.sha256(group.group_key.encode()).hexdigest()[:12]
    firing = [alert.labels for alert in group.alerts if alert.status == "firing"]
    unknown = group.truncated_alerts > 0 and group.status == "firing"
    wanted = {}
    for rule in rules:
        alerts = [labels for labels in firing if rule.matches(labels)]
        if unknown and rule.matches(group.common_labels, partly=True):
            alerts.append({"alertname": group.common_labels.get("alertname", "")})
        if alerts:
            policy = rule.policy_for(alerts, key, wall_s)
            wanted[policy.name] = policy
    ours = {name: known[name] for name in known if _NAME.fullmatch(name) and name not in wanted}
    past = [name for name, each in ours.items() if each.until and each.until.timestamp() <= wall_s]
    ended = [] if unknown else [name for name in ours if name.endswith(key) and name not in past]
    # Expired policies make room first; a hold under a new name precedes the end of the old one.
    return [
        *map(PolicyDeleted, past),
        *(PolicyApplied(each) for each in wanted.values() if each != known.get(each.name)),
        *map(PolicyDeleted, ended),
    ]


class AlertReceiver:
    """HTTP server of `POST /v1/alerts`, which puts policies of alerts in force."""

    def __init__(
        self,
        rules: Path,
        token_file: Path,
        service: Callable[[], SchedulerService | None],
        events: Callable[..., object],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """Read rules and token. service: the leading one, None on a standby. Raises ConfigError."""
        self._service, self._events, self._wall_clock = service, events, wall_clock
        self._rules = read_rules(rules)
        self._token = SecretFile(token_file, "--alerts-token-file", LEAST_TOKEN_CHARS)
        self._port: HttpPort | None = None

    async def start(self, address: str, certificates: CertificateFiles | None = None) -> None:
        """Serve at HOST:PORT until `close`. Raises ConfigError if the port is taken."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/alerts", self._take)
        tls = certificates.server_context(everybody=True) if certificates else None
        host, _, port = address.rpartition(":")
        self._port = HttpPort(app, host.strip("[]"), int(port), tls, patience_s=PATIENCE_S)
        await self._port.start(f"--alerts-address {address} cannot be served: {{}}; give another")

    async def close(self) -> None:
        """Stop the server."""
        if self._port is not None:
            await self._port.close()

    async def _take(self, request: web.Request) -> web.Response:
        service = self._service()
        try:
            return await self._taken(request, service)
        except web.HTTPException as refusal:
            if service is not None:
                service.refused(BY, request.path, refusal.text or "")
            raise

    async def _taken(self, request: web.Request, service: SchedulerService | None) -> web.Response:
        if not self._token.is_borne(request.headers.get("Authorization", "")):
            raise web.HTTPUnauthorized(
                text="show the token of --alerts-token-file as Authorization: Bearer",
                headers={"WWW-Authenticate": "Bearer"},
            )
        try:
            group = decoded(_GROUP, await request.read())
        except msgspec.DecodeError as error:
            raise web.HTTPBadRequest(
                text=f"this is no message of Alertmanager's webhook, version 4: {error}"
            ) from None
        if service is None:
            raise _later("this scheduler is a standby; the one that leads takes alerts")
        try:
            known, _ = service.policies_in_force()
            changes = plan(self._rules, group, known, self._wall_clock())
            for change in changes:
                await service.ask(change, BY)
        except (TimeoutError, LeadershipLostError, RefusedError, ConfigError, PolicyError) as error:
            raise _later(str(error) or "the store takes no writes for now") from None
        done = {
            "applied": [each.policy.name for each in changes if isinstance(each, PolicyApplied)],
            "ended": [each.name for each in changes if isinstance(each, PolicyDeleted)],
        }
        self._events("alerts_taken", alerts=len(group.alerts), **done)
        return web.json_response(done)


_GROUP: Final = msgspec.json.Decoder(AlertGroup)


def _later(line: str) -> web.HTTPServiceUnavailable:
    answer = web.HTTPServiceUnavailable(text=f"{line}; send it again")
    # By another connection the next try may reach another scheduler.
    answer.force_close()
    return answer
