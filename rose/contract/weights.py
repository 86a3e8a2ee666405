"""Weights from a node to its replicas, and the life of a trainer's run.

weights/apply    ApplyBody ──► Applied; 422 Unproven if the engine's version is unknown
weights/audit    nothing ──► Audited
Publishers and relays have messages of their own: `weight_transfer.fetch.publisher_client`.
"""

from typing import Annotated, Final

from msgspec import Meta, Struct

from rose.contract.fields import Name
from rose.contract.replica import ROUTES, Fault
from weight_transfer import OnUpdate

APPLY: Final = f"{ROUTES}weights/apply"
AUDIT: Final = f"{ROUTES}weights/audit"

RUN_TTL_S: Final = 10.0
"""Seconds after which a trainer that has not renewed its run counts as dead."""


class ApplyBody(Struct, frozen=True, omit_defaults=True):
    """Request body of `weights/apply`: policy versions to activate, as paths on this machine.

    `chunks`: folder of the versions' data. `manifests`: files of consecutive versions that are
    applied in one go; or one `manifest`.
    """

    chunks: Name
    manifest: Name = ""
    manifests: Annotated[list[Name], Meta(max_length=4_096)] = []
    on_update: OnUpdate = OnUpdate.RECOMPUTE

    @property
    def paths(self) -> list[str]:
        """Manifest paths in the order of their versions; empty if the caller named none."""
        return self.manifests or ([self.manifest] if self.manifest else [])


class UpdateApplied(Struct, frozen=True, kw_only=True):
    """Answer to `weights/apply`: result and timings of an activation; `ok` is the verdict.

    Times are those of the whole replica in seconds: `stage_s` while it served, `pause_s` while it
    did not.
    """

    version: int
    tensors: int = 0
    changed_elements: int
    wire_bytes: int
    stage_s: float = 0.0
    pause_s: float
    apply_s: float
    probe_s: float = 0.0
    loose: int = 0
    on_update: OnUpdate = OnUpdate.RECOMPUTE
    finished_old: bool = False
    digest_ok: bool
    probe_ok: bool
    probe_max_abs_diff: float

    @property
    def ok(self) -> bool:
        """True if digest and probe both match, so that the version is active and proven."""
        return self.digest_ok and self.probe_ok


class Unproven(Struct, frozen=True):
    """Answer 422 to `weights/apply`: the update broke off, so the engine's version is unknown.

    The engine runs no turns from then on.
    """

    error: Fault
    version: None = None
    digest_ok: bool = False
    probe_ok: bool = False


class Audited(Struct, frozen=True):
    """Answer to `weights/audit`: names of live tensors that differ from their version.

    `unjudged`: tensors that could not be checked. `weights`: number of tensors. `audit_s`: seconds.
    """

    version: int
    flipped: list[str]
    unjudged: list[str]
    weights: int
    audit_s: float
