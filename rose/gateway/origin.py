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
MAX_GROUP_SIZE = 4_096


class OriginFields(msgspec.Struct, gc=False):
    """What the body of every generating route may say; a header wins over its field."""

    session_id: str | None = None
    group_id: str | None = None
    job: str | None = None
    group_size: int | None = None
    hedges: int | None = None
    stream: bool | None = False


@dataclass(frozen=True, slots=True)
class Origin:
    """Empty where the caller says nothing. Turns of a group are samples of one prompt.

    `hedges`: so many second copies may all `group_size` turns of the group have together.
    """

    session: str = ""
    group: str = ""
    job: str = ""
    group_size: int = 0
    hedges: int = 0


ANONYMOUS = Origin()


def origin_of(headers: Mapping[str, str], body: OriginFields) -> Origin:
    """Raises BadRequest for what is no name, and for copies that cannot be."""
    size, hedges = body.group_size or 0, body.hedges or 0
    origin = Origin(
        _name(headers.get(SESSION_HEADER) or body.session_id, "session_id"),
        _name(headers.get(GROUP_HEADER) or body.group_id, "group_id"),
        _name(headers.get(JOB_HEADER) or body.job, "job"),
        size,
        hedges,
    )
    if not 0 <= size <= MAX_GROUP_SIZE:
        raise BadRequest(f"group_size is at most {MAX_GROUP_SIZE}", "group_size")
    if not 0 <= hedges <= size:
        raise BadRequest("hedges: at least 0, at most group_size, which goes with it", "hedges")
    if hedges and not origin.group:
        raise BadRequest("hedges needs the group_id that all turns of the group share", "hedges")
    if hedges and body.stream:
        raise BadRequest(
            "hedges: a second copy may answer first, and tokens of a stream cannot be taken back; "
            "leave out hedges or stream",
            "hedges",
        )
    return origin


def _name(given: str | None, field: str) -> str:
    if given and (len(given) > MAX_NAME_CHARS or not given.isprintable()):
        raise BadRequest(f"{field}: send at most {MAX_NAME_CHARS} printable characters", field)
    return given or ""
