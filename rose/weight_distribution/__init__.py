"""Policy versions over HTTP: served by the trainer, fetched by nodes, announced by gRPC."""

from rose.weight_distribution.credentials import Credentials
from rose.weight_distribution.fetch.download import FetchError
from rose.weight_distribution.fetch.fetcher import ChunkFetcher, Fetched, fetch_version
from rose.weight_distribution.fetch.limits import Caps, DownloadLimits, StorageError
from rose.weight_distribution.fetch.publisher_client import IndexFormatError, PublisherClient
from rose.weight_distribution.publisher import Begun, PublisherSettings, Receipt, WeightPublisher
from rose.weight_distribution.relay import Relay
from rose.weight_distribution.version_server import Signer, VersionServer

__all__ = [
    "Begun",
    "Caps",
    "ChunkFetcher",
    "Credentials",
    "DownloadLimits",
    "FetchError",
    "Fetched",
    "IndexFormatError",
    "PublisherClient",
    "PublisherSettings",
    "Receipt",
    "Relay",
    "Signer",
    "StorageError",
    "VersionServer",
    "WeightPublisher",
    "fetch_version",
]
