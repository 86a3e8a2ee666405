"""Calls of ROSE's own services with urllib that bypass the environment's proxy.

HTTP_PROXY is for the internet: a proxy knows neither loopback nor a cluster's addresses. gRPC,
aiohttp and the gateway's client bypass it, too.
"""

import ssl
import urllib.request
from http.client import HTTPResponse
from typing import cast


def open_directly(
    url: str | urllib.request.Request, timeout_s: float, context: ssl.SSLContext | None = None
) -> HTTPResponse:
    """Send a request to an http or https URL, past any proxy of the environment; return the open
    reply.

    Raises as urlopen does.
    """
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    opener = urllib.request.build_opener(*handlers)
    return cast("HTTPResponse", opener.open(url, timeout=timeout_s))
