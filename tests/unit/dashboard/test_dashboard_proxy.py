"""A proxy signs people in and passes the dashboard's token: docs/operators/dashboard.md.

The proxy is a stand-in that does of oauth2-proxy what the dashboard sees of it: whoever has a
session is passed on with HTTP Basic, X-Forwarded-User and X-Forwarded-Email.
"""

import base64
import ssl
from pathlib import Path

import aiohttp
import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from rose.security import Role
from tests.harness.certificates import Certificates
from tests.harness.dashboard_fleet import DashboardFleet
from tests.unit.dashboard.test_dashboard_server import TOKEN, served
from tests.unit.helm.rendering import objects

PAGE = Path(__file__).parents[3] / "docs" / "operators" / "dashboard.md"
FORWARDED = {"X-Forwarded-User": "ada", "X-Forwarded-Email": "ada@example.net"}


class StandInOauth2Proxy:
    """Proxy with one session, `cookie`; its sign-in page is elsewhere."""

    def __init__(self, upstream: str, password: str, trusted: ssl.SSLContext) -> None:
        self._upstream, self._password, self._trusted = upstream, password, trusted
        self.app = web.Application()
        self.app.router.add_get("/{path:.*}", self._pass)

    async def _pass(self, request: web.Request) -> web.Response:
        if request.cookies.get("session") != "cookie":
            raise web.HTTPFound("https://login.example.net/authorize")
        basic = base64.b64encode(f"ada:{self._password}".encode()).decode()
        headers = {**FORWARDED, "Authorization": f"Basic {basic}"}
        url = self._upstream + request.path_qs
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, headers=headers, ssl=self._trusted) as answer,
        ):
            return web.Response(status=answer.status, body=await answer.read())


@pytest.mark.parametrize(
    ("password", "session", "status"),
    [(TOKEN, "cookie", 200), (TOKEN, "", 302), ("not the token", "cookie", 401)],
    ids=["signed in", "nobody", "wrong token"],
)
async def test_who_has_a_session_at_the_proxy_reads_the_pages(
    tmp_path: Path, password: str, session: str, status: int
) -> None:
    made = Certificates(tmp_path / "ca")
    (tmp_path / "token").write_text(TOKEN)
    trusted = ssl.create_default_context(cafile=str(made.ca.file))
    files = made.of(Role.SCHEDULER, "s0")
    async with served(DashboardFleet(1), files, host="0.0.0.0", token_file=tmp_path / "token") as (
        _,
        url,
    ):
        async with (
            TestServer(StandInOauth2Proxy(url, password, trusted).app) as proxy,
            aiohttp.ClientSession(cookies={"session": session}) as browser,
        ):
            for path in ("/", "/series", "/static/dashboard.js"):
                where = proxy.make_url(path)
                async with browser.get(where, allow_redirects=False) as answer:
                    assert (path, answer.status) == (path, status)
        # A name in a header opens nothing, whoever writes it.
        async with (
            aiohttp.ClientSession() as direct,
            direct.get(url, headers=FORWARDED, ssl=trusted) as answer,
        ):
            assert answer.status == 401


def test_the_pages_values_lead_the_proxy_to_the_leader_and_let_it_in() -> None:
    rose, proxy = (
        yaml.safe_load(block.partition("```")[0])
        for block in PAGE.read_text().split("```yaml\n")[1:]
        if "dashboardTokenSecret" in block or "oauth2-proxy's chart" in block
    )
    found = objects(rose, {"networkPolicy": rose["networkPolicy"]})
    (port,) = [
        each["port"]
        for each in found["Service/r-leader"]["spec"]["ports"]
        if each["name"] == "dashboard"
    ]
    assert proxy["extraArgs"]["upstream"] == f"https://rose-leader.rose-system.svc:{port}"
    (password, _) = proxy["extraEnv"]
    wanted = {"name": rose["scheduler"]["dashboardTokenSecret"], "key": "token"}
    assert password["valueFrom"]["secretKeyRef"] == wanted
    peers = rose["networkPolicy"]["peers"]["dashboard"]
    assert any(
        rule["from"] == peers for rule in found["NetworkPolicy/r-scheduler"]["spec"]["ingress"]
    )
