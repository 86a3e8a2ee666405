"""Durable control state behind one protocol: SQLite here, a replicated store in a cluster."""

from rose.store.memory import InMemoryStore
from rose.store.protocol import ABSENT, Entry, Store
from rose.store.sqlite import SqliteStore

__all__ = ["ABSENT", "Entry", "InMemoryStore", "SqliteStore", "Store"]
