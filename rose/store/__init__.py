"""Durable control state behind one protocol: SQLite here, a replicated store in a cluster."""

from rose.store.protocol import ABSENT, Store, StoreEntry
from rose.store.sqlite import SqliteStore

__all__ = ["ABSENT", "SqliteStore", "Store", "StoreEntry"]
