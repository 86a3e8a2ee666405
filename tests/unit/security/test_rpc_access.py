"""Calls on a live connection are checked by the certificate that it was made with."""

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from rose.security import RPCS, Role
from rose.security.roles import ANYTHING
from rose.security.rpc_access import AccessInterceptor
from tests.harness.certificates import Certificates


class Context:
    """Context of a handler's caller, in a gRPC server's form."""

    def __init__(self, certificate: Path) -> None:
        self._certificate = certificate.read_bytes()
        self.aborted: tuple[grpc.StatusCode, str] | None = None

    def auth_context(self) -> dict[str, list[bytes]]:
        return {"x509_pem_cert": [self._certificate]}

    async def abort(self, code: grpc.StatusCode, line: str) -> None:
        self.aborted = code, line
        raise ConnectionAbortedError(line)


@pytest.mark.parametrize(
    ("later_s", "cluster", "role", "code", "line"),
    [
        (0.0, "prod", Role.NODE, None, ""),
        (90 * 86_400.0, "prod", Role.NODE, grpc.StatusCode.UNAUTHENTICATED, "expired"),
        (0.0, "other", Role.NODE, grpc.StatusCode.PERMISSION_DENIED, "this is other"),
        (0.0, "prod", Role.GATEWAY, grpc.StatusCode.PERMISSION_DENIED, "may not call Do"),
    ],
)
async def test_a_unary_call_is_refused_before_the_service_hears_of_it(
    later_s: float, cluster: str, role: Role, code: Any, line: str, tmp_path: Path
) -> None:
    files = Certificates(tmp_path).of(role, "one")
    served: list[object] = []
    refused: list[tuple[str, str, str]] = []

    async def do(request: object, _: object) -> str:
        served.append(request)
        return "done"

    access = AccessInterceptor(
        cluster,
        lambda *told: refused.append(told),
        {"Do": {Role.NODE: ANYTHING}},
        lambda: time.time() + later_s,
    )
    context, request = Context(files.paths[1]), SimpleNamespace()
    call = access._unary("Do", do)
    if code is None:
        assert await call(request, context) == "done"
        assert (served, refused) == ([request], [])
        return
    with pytest.raises(ConnectionAbortedError):
        await call(request, context)
    assert context.aborted is not None
    assert context.aborted[0] is code
    assert line in context.aborted[1]
    assert served == []
    assert len(refused) == 1


# ---- the page of roles ----


PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"


def test_the_page_has_the_table_that_is_asked() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("| call of the scheduler"))
    roles = [Role(cell) for cell in cells(lines[begin])[1:]]
    assert set(roles) == set(Role)
    said: dict[str, dict[Role, str]] = {}
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        method, *may = cells(line)
        said[method.strip("`")] = {
            role: re.sub(r"^yes ?|[(`)]", "", cell)
            for role, cell in zip(roles, may, strict=True)
            if cell
        }
    assert said == {
        method: {role: leave.field for role, leave in rules.items()}
        for method, rules in RPCS.items()
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
