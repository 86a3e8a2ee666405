"""Opening a store by its name: `FILE`, or `etcd://HOST:PORT,HOST:PORT[/PREFIX]`.

Secrets come from files: an argument of a command is there for every process of the machine to see.
"""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from rose.addresses import checked_addresses
from rose.errors import ConfigError
from rose.store.etcd import EtcdAccess, EtcdStore
from rose.store.protocol import Store
from rose.store.sqlite import SqliteStore

SCHEME = "etcd://"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
DEFAULT_PREFIX = "rose/"


@dataclass(frozen=True, slots=True)
class StoreName:
    """Name of a store, as `--store` gives it: a file, or an etcd cluster with credential files.

    Raises ConfigError if the name or its credentials are invalid.
    """

    name: str
    user: str = ""
    password_file: Path | None = None
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", _spelled(self.name))
        if self.is_etcd:
            self.access()
        elif any((self.user, self.password_file, self.ca_file, self.certificate_file)):
            raise ConfigError("a store in a file has no users and no TLS; give --store etcd://…")

    @property
    def is_etcd(self) -> bool:
        return self.name.startswith(SCHEME)

    def access(self) -> EtcdAccess:
        """Return the etcd cluster's addresses and credentials. Raises ConfigError."""
        hosts, slash, prefix = self.name.removeprefix(SCHEME).partition("/")
        if self.user and self.password_file is None:
            raise ConfigError("a user of etcd has a password; give --store-password-file FILE")
        return EtcdAccess(
            checked_addresses(hosts, f"--store {self.name}"),
            f"{prefix.rstrip('/')}/" if slash and prefix.strip("/") else DEFAULT_PREFIX,
            self.user,
            _secret(self.password_file) if self.password_file and self.user else "",
            self.ca_file,
            self.certificate_file,
            self.key_file,
        )


def _spelled(name: str) -> str:
    """Return the name without spaces at its ends, its scheme in lower case. Raises ConfigError."""
    name = name.strip()
    if not name:
        raise ConfigError("a store needs a name; give --store FILE or etcd://HOST:PORT")
    if name == ":memory:" or name.startswith("~"):
        raise ConfigError(f"--store {name} is no path of a file; give FILE or etcd://HOST:PORT")
    scheme, colon, rest = name.partition(":")
    if not colon or not _SCHEME.fullmatch(scheme):
        return name
    if rest.startswith("//") and scheme.lower() == "etcd":
        return f"{SCHEME}{rest[2:]}"
    if rest.startswith("/") or scheme.lower() == "etcd":
        raise ConfigError(
            f"--store has the scheme {scheme!r}, and stores have etcd:// alone; write"
            " etcd://HOST:PORT,HOST:PORT (TLS: --store-ca FILE), or the path of a SQLite file"
        )
    return name


def _secret(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({error}); give a text file") from error


def open_store(name: StoreName) -> Store:
    """Return the opened store of that name; call this in a running event loop.

    Raises `ConfigError` if it cannot be opened.
    """
    return EtcdStore(name.access()) if name.is_etcd else SqliteStore(Path(name.name))


def add_store_options(parser: argparse.ArgumentParser, optional: str = "") -> None:
    """Add `--store` and its credential options to a parser.

    optional: text on what the store is for, if a command does not require one.
    """
    add = parser.add_argument
    what = (
        f"{optional}SQLite file, made if missing, or an etcd cluster (keys below PREFIX,"
        " default rose)"
    )
    add("--store", required=not optional, metavar="FILE|etcd://H:P,…[/PREFIX]", help=what)
    add("--store-user", default="", metavar="NAME", help="user of etcd")
    add("--store-password-file", type=Path, metavar="FILE", help="its password")
    add("--store-ca", type=Path, metavar="FILE", help="CA of etcd's certificates: turns TLS on")
    add("--store-cert", type=Path, metavar="FILE", help="certificate that etcd is shown")
    add("--store-key", type=Path, metavar="FILE", help="its key")


def taken_store(args: argparse.Namespace) -> StoreName:
    """Return the store's name in parsed options. Raises ConfigError."""
    return StoreName(
        args.store,
        args.store_user,
        args.store_password_file,
        args.store_ca,
        args.store_cert,
        args.store_key,
    )
