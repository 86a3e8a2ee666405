"""Fetching of versions over HTTP: from which peer, within which limits."""

from weight_transfer.fetch.fetcher import ChunkFetcher, Fetched, fetch_version
from weight_transfer.fetch.limits import Caps, DownloadLimits
from weight_transfer.fetch.publisher_client import PublisherClient

__all__ = [
    "Caps",
    "ChunkFetcher",
    "DownloadLimits",
    "Fetched",
    "PublisherClient",
    "fetch_version",
]
