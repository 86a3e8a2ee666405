"""Grant controller: how much compute and KV memory a guest may use for the next half second.

The node daemon calls `GrantController.step` at 20 Hz or more and writes the grant that it returns.
Whatever the controller does not know counts against the guest. A daemon that stops calling revokes
by silence: the last grant expires.

`GrantLiveness` is the guest's side: it decides when a guest must end itself, either because its
grant says so or because the grant is so old that the node daemon must be gone.
"""

from dataclasses import dataclass, field

from executor.control_page.host_seat import HostView
from executor.control_page.records import Grant, GrantMode, GuestState, HostState
from executor.kv.capacity_policy import (
    LEAST_CAP,
    NO_CAP,
    PressureCore,
    PressureLimits,
    guest_granules,
    lent_bytes,
    owed_bytes,
)

ORPHANED = "orphaned"
KILLED = "killed"


class GrantLiveness:
    """Judges the grant's age; the clock is handed in."""

    def __init__(self, started_ns: int, orphan_ns: int) -> None:
        """A guest that never sees a grant counts from `started_ns`."""
        if orphan_ns <= 0:
            raise ValueError(f"orphan_ns is {orphan_ns}; give a positive time")
        self._last_sign_ns = started_ns
        self._orphan_ns = orphan_ns

    def step(self, now_ns: int, grant: Grant | None) -> str | None:
        """Why to end now, None to live on; `grant` is None when it cannot be read."""
        if grant is not None:
            if grant.mode is GrantMode.KILL:
                return KILLED
            # A heartbeat from the future is no sign of life.
            if grant.heartbeat_ns <= now_ns:
                self._last_sign_ns = max(self._last_sign_ns, grant.heartbeat_ns)
        return ORPHANED if now_ns - self._last_sign_ns > self._orphan_ns else None


NO_LEASE = "no_lease"
LEASED = "leased"
WARM_UP = "warm_up"
KILL_SWITCH = "kill_switch"
HOST_DEAD = "host_dead"
HOST_FOREIGN = "host_foreign"
OPERATOR_HOLD = "operator_hold"
DRAIN = "drain"
DRAINED = "drained"
STALLED = "daemon_stalled"
PRESSURE = "kv_pressure"
RECLAIM = "reclaim"
OWING = "owing"


@dataclass(frozen=True, slots=True)
class GuardConfig:
    """The operator's limits for one guest.

    `kv_granule_cap`: KV granules it may keep pages under, 0 for as many as it started with.
    `slack_share` 0..1 (0: host-idle time only). While the host fills its own KV memory, as
    `pressure` says, the guest's steps have half the tokens and its cap follows the policy.
    `kv_base_bytes`: KV memory of its own, beyond which it has only what the host lends just now;
    0 does not bind it to that.
    """

    token_budget: int
    max_sequences: int
    kv_granule_cap: int = 0
    slack_share: float = 0.0
    ttl_ns: int = 500_000_000
    pressure: PressureLimits = field(default_factory=PressureLimits)
    kv_base_bytes: int = 0

    def __post_init__(self) -> None:
        if self.token_budget <= 0 or self.max_sequences <= 0 or self.ttl_ns <= 0:
            raise ValueError("token_budget, max_sequences and ttl_ns must be positive")
        if self.kv_base_bytes < 0:
            raise ValueError("kv_base_bytes must not be negative")
        if not 0.0 <= self.slack_share <= 1.0:
            raise ValueError(f"slack_share is {self.slack_share}; give a share in 0..1")


class GrantController:
    """Grants of one guest. Its epoch grows with every change of mode and never falls."""

    def __init__(self, config: GuardConfig, previous: Grant | None = None) -> None:
        """`previous`: the grant found on the page, so that a restarted daemon's epoch goes on."""
        self._config = config
        self._mode: GrantMode | None = None
        self._epoch = previous.epoch if previous is not None else 0
        self._last_step_ns: int | None = None
        self._owed_bytes = 0
        left = previous.kv_granule_cap if previous is not None else NO_CAP
        self._pressure = PressureCore(
            config.pressure, NO_CAP if left == config.kv_granule_cap else left
        )

    @property
    def epoch(self) -> int:
        """Epoch of the last grant."""
        return self._epoch

    @property
    def owed_bytes(self) -> int:
        """KV memory of its host that the guest still kept at the last step."""
        return self._owed_bytes

    def step(
        self,
        now_ns: int,
        sight: HostView,
        guest: GuestState | None,
        lease_active: bool,
        kill_switch: bool,
        *,
        host_doubt: str | None = None,
        draining: bool = False,
        operator_hold: bool = False,
        reclaim_cap: int | None = None,
        pressed: bool = False,
        warming: bool = False,
    ) -> Grant:
        """The grant to write now.

        `sight`: what is seen of the host; `host_doubt`: what else speaks against its writer, one of
        HOST_DEAD, HOST_FOREIGN and None. `guest`: None when unreadable (an absent guest is no
        reason to freeze: it reads its grant when it starts).
        `reclaim_cap`: KV granules that a reclaim leaves the guest (0: all of them), None without.
        `pressed`: it owes memory and shall do nothing but give it back. `warming`: its engine
        starts and takes no turns yet; it may run in host-idle time.
        """
        drained = draining and guest is not None and not (guest.running or guest.waiting)
        doubt = host_doubt or sight.doubt(now_ns)
        host = None if doubt else sight.state
        cap = self._cap(now_ns, host, guest, self._limit(host, guest))
        cap = min((n for n in (cap, reclaim_cap or NO_CAP) if n > NO_CAP), default=NO_CAP)
        ladder = (
            (kill_switch, GrantMode.KILL, KILL_SWITCH),
            # After a stop longer than a grant lives, what the caller knows of leases is old news.
            (self._was_stalled(now_ns), GrantMode.FREEZE, STALLED),
            (doubt is not None, GrantMode.FREEZE, doubt or ""),
            (reclaim_cap is not None, GrantMode.FREEZE, RECLAIM),
            (pressed, GrantMode.FREEZE, OWING),
            (drained, GrantMode.FREEZE, DRAINED),
            (draining, GrantMode.DRAIN, DRAIN),
            (operator_hold, GrantMode.FREEZE, OPERATOR_HOLD),
            (not (lease_active or warming), GrantMode.FREEZE, NO_LEASE),
            (self._pressure.pressed, GrantMode.THROTTLE, PRESSURE),
            (lease_active, GrantMode.RUN, LEASED),
            (True, GrantMode.RUN, WARM_UP),
        )
        mode, reason = next((mode, reason) for applies, mode, reason in ladder if applies)
        self._last_step_ns = now_ns
        if mode is not self._mode:
            self._mode = mode
            self._epoch += 1
        return self._grant(now_ns, mode, reason, cap, lease_active=lease_active)

    def _was_stalled(self, now_ns: int) -> bool:
        last_ns = self._last_step_ns
        return last_ns is not None and now_ns - last_ns > self._config.ttl_ns

    def _limit(self, host: HostState | None, guest: GuestState | None) -> int:
        """Granules it may keep at most; with memory of its own: that and what is lent now."""
        config = self._config
        if not config.kv_base_bytes:
            return config.kv_granule_cap
        self._owed_bytes = owed_bytes(config.kv_base_bytes, host, guest)
        limit = guest_granules(config.kv_base_bytes, host, guest)
        bytes_granted = limit * guest.granule_bytes if guest is not None else 0
        # Reserved headroom is never granted.
        assert limit == LEAST_CAP or bytes_granted <= config.kv_base_bytes + lent_bytes(host)
        return min((n for n in (config.kv_granule_cap, limit) if n > NO_CAP), default=LEAST_CAP)

    def _cap(
        self, now_ns: int, host: HostState | None, guest: GuestState | None, limit: int
    ) -> int:
        """Granules that the guest may keep: its limit, or less under pressure."""
        used = host.kv_used / host.kv_total if host is not None and host.kv_total > 0 else None
        guest = guest or GuestState()
        most = min((n for n in (limit, guest.granules_total) if n > 0), default=0)
        cap = self._pressure.step(now_ns, used, most, guest.granules_mapped, guest.policy_version)
        return min((n for n in (limit, cap) if n > NO_CAP), default=NO_CAP)

    def _grant(
        self, now_ns: int, mode: GrantMode, reason: str, cap: int, *, lease_active: bool
    ) -> Grant:
        config = self._config
        budget = {
            GrantMode.RUN: config.token_budget,
            GrantMode.THROTTLE: max(1, config.token_budget // 2),
        }.get(mode, 0)
        return Grant(
            mode=mode,
            token_budget=budget,
            max_sequences=config.max_sequences if budget else 0,
            # In every mode: no cap would let a frozen guest grow back.
            kv_granule_cap=cap,
            slack_share=config.slack_share if lease_active else 0.0,
            epoch=self._epoch,
            expiry_ns=now_ns + config.ttl_ns,
            heartbeat_ns=now_ns,
            reason=reason,
        )
