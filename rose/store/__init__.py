"""The store of control state: one file of a machine, or an etcd cluster, behind one interface.

`Store` says what every store promises, `SqliteStore` and `EtcdStore` keep it. Of several schedulers
on a store one leads (`Leadership`), and only its writes succeed (`FencedStore`).
"""

from rose.store.election import Leadership
from rose.store.etcd import EtcdAccess, EtcdStore
from rose.store.opening import StoreName, add_store_options, open_store, taken_store
from rose.store.protocol import (
    ABSENT,
    Delete,
    Expect,
    LeaseGoneError,
    Listing,
    Put,
    Store,
    StoreChange,
    StoreEntry,
    Write,
)
from rose.store.sqlite import SqliteStore
from rose.store.wrappers import FencedStore, LeadershipLostError, MeteredStore

__all__ = [
    "ABSENT",
    "Delete",
    "EtcdAccess",
    "EtcdStore",
    "Expect",
    "FencedStore",
    "Leadership",
    "LeadershipLostError",
    "LeaseGoneError",
    "Listing",
    "MeteredStore",
    "Put",
    "SqliteStore",
    "Store",
    "StoreChange",
    "StoreEntry",
    "StoreName",
    "Write",
    "add_store_options",
    "open_store",
    "taken_store",
]
