"""Where a turn comes from: its trajectory, its group and its job, as its caller names them."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from rose.gateway.errors import BadRequest

SESSION_HEADER = "X-Session-ID"
GROUP_HEADER = "X-Group-ID"
JOB_HEADER = "X-Job"
# Names are kept for each of very many trajectories.
MAX_NAME_CHARS = 512


class OriginFields(msgspec.Struct, gc=False):
    """What the body of every generating route may say; a header wins over its field."""

    session_id: str | None = None
    group_id: str | None = None
    job: str | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Empty where the caller says nothing. Turns of a group are samples of one prompt."""

    session: str = ""
    group: str = ""
    job: str = ""


ANONYMOUS = Origin()


def origin_of(headers: Mapping[str, str], body: OriginFields) -> Origin:
    """Raises BadRequest for what is no name."""
    return Origin(
        _name(headers.get(SESSION_HEADER) or body.session_id, "session_id"),
        _name(headers.get(GROUP_HEADER) or body.group_id, "group_id"),
        _name(headers.get(JOB_HEADER) or body.job, "job"),
    )


def _name(given: str | None, field: str) -> str:
    if given and (len(given) > MAX_NAME_CHARS or not given.isprintable()):
        raise BadRequest(f"{field}: send at most {MAX_NAME_CHARS} printable characters", field)
    return given or ""
