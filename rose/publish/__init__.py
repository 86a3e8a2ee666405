"""Policy versions over HTTP: served by the trainer, fetched by nodes, announced by gRPC."""

from rose.publish.download import FetchError
from rose.publish.fetch import Fetched, fetch_version
from rose.publish.hub import Hub
from rose.publish.publisher import Receipt, WeightPublisher
from rose.publish.receiving import Caps, Receiving
from rose.publish.server import VersionServer

__all__ = [
    "Caps",
    "FetchError",
    "Fetched",
    "Hub",
    "Receipt",
    "Receiving",
    "VersionServer",
    "WeightPublisher",
    "fetch_version",
]
