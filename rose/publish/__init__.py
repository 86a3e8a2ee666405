"""Policy versions over HTTP: served by the trainer, fetched by nodes, announced by gRPC."""

from rose.publish.fetch import Fetched, FetchError, fetch_version
from rose.publish.publisher import Receipt, WeightPublisher
from rose.publish.server import VersionServer

__all__ = ["FetchError", "Fetched", "Receipt", "VersionServer", "WeightPublisher", "fetch_version"]
