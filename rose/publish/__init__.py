"""Policy versions over HTTP: served by the trainer, fetched by nodes, announced by gRPC."""

from rose.publish.credentials import Credentials
from rose.publish.fetch.download import FetchError
from rose.publish.fetch.fetcher import ChunkFetcher, Fetched, fetch_version
from rose.publish.fetch.limits import Caps, DownloadLimits, StorageError
from rose.publish.fetch.publisher_client import IndexFormatError, PublisherClient
from rose.publish.publisher import Receipt, WeightPublisher
from rose.publish.relay import Relay
from rose.publish.version_server import Signer, VersionServer

__all__ = [
    "Caps",
    "ChunkFetcher",
    "Credentials",
    "DownloadLimits",
    "FetchError",
    "Fetched",
    "IndexFormatError",
    "PublisherClient",
    "Receipt",
    "Relay",
    "Signer",
    "StorageError",
    "VersionServer",
    "WeightPublisher",
    "fetch_version",
]
