"""Durable control state behind one protocol: SQLite here, a replicated store in a cluster."""

from rose.store.protocol import ABSENT, InMemoryStore, Store, StoreEntry
from rose.store.sqlite import SqliteStore

__all__ = ["ABSENT", "InMemoryStore", "SqliteStore", "Store", "StoreEntry"]
