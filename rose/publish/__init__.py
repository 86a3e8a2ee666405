"""Policy versions over HTTP: served by the trainer, fetched by nodes, announced by gRPC."""

from rose.publish.credentials import Credentials
from rose.publish.download import FetchError
from rose.publish.fetch import Fetched, fetch_version
from rose.publish.hub import Hub
from rose.publish.index import IndexFormatError
from rose.publish.publisher import Receipt, WeightPublisher
from rose.publish.reader import Reader
from rose.publish.receiving import Caps, Receiving, StorageError
from rose.publish.relay import Relay
from rose.publish.server import Signer, VersionServer

__all__ = [
    "Caps",
    "Credentials",
    "FetchError",
    "Fetched",
    "Hub",
    "IndexFormatError",
    "Reader",
    "Receipt",
    "Receiving",
    "Relay",
    "Signer",
    "StorageError",
    "VersionServer",
    "WeightPublisher",
    "fetch_version",
]
