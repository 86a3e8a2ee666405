"""EtcdStore with a real cluster of three: members that die, history that goes, users, TLS."""

import asyncio
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rose.errors import ConfigError, UnavailableError
from rose.scheduler.persistence import load
from rose.scheduler.restore import restore, take_backup
from rose.store import ABSENT, EtcdAccess, EtcdStore, Put, SqliteStore, StoreChange
from rose.store.etcd import EtcdLink, UnansweredError, end_of
from tests.harness.programs.etcd_cluster import EtcdCluster, needs_etcd, running_etcd
from tests.harness.waiting import PATIENCE_S

pytestmark = [pytest.mark.engine, needs_etcd, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with running_etcd(tmp_path_factory.mktemp("etcd"), members=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared: EtcdCluster) -> EtcdCluster:
    """The three of them, all up."""
    for member in range(3):
        if not shared.is_up(member):
            shared.start(member)
    shared.wait()
    return shared


@pytest.fixture
async def store(cluster: EtcdCluster, request: pytest.FixtureRequest) -> AsyncIterator[EtcdStore]:
    made = EtcdStore(cluster.access(f"{request.node.name}/"))
    yield made
    await made.close()


class Follower:
    """A prefix as a watch sees it, and each event that the watch yielded."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store
        self.state: dict[str, bytes] = {}
        self.revisions: list[tuple[int, str]] = []

    async def __aenter__(self) -> "Follower":
        since = await self._store.list("w/")
        self.state = {entry.key: entry.value for entry in since.entries}
        self._task = asyncio.create_task(self._follow(self._store.watch(since)))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _follow(self, watch: AsyncIterator[StoreChange]) -> None:
        async for change in watch:
            self.revisions.append((change.revision, change.key))
            if change.value is None:
                self.state.pop(change.key, None)
            else:
                self.state[change.key] = change.value

    async def equals(self, writer: EtcdStore) -> None:
        """Until it knows what the store holds; each event came once and in order."""
        truth: dict[str, bytes] = {}
        try:
            async with asyncio.timeout(PATIENCE_S):
                # Listed anew: a write that was not answered may be done late.
                while self.state != truth or not truth:
                    await asyncio.sleep(0.05)
                    truth = {each.key: each.value for each in (await writer.list("w/")).entries}
        except TimeoutError:
            raise AssertionError(f"knows {self.state}, not {truth}") from None
        # By their revisions: keys of one revision come in any order.
        order = [revision for revision, _ in self.revisions]
        assert order == sorted(order)
        assert len(self.revisions) == len(set(self.revisions))


class Writer:
    """Writes and deletes all the time."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store
        self.written = 0
        self.longest_s = 0.0

    async def write(self, count: int) -> None:
        for _ in range(count):
            began_s, number = time.monotonic(), self.written
            await self._store.put(f"w/{number % 20}", str(number).encode())
            if number % 7 == 0:
                await self._store.delete(f"w/{number * 3 % 20}")
            self.written += 1
            self.longest_s = max(self.longest_s, time.monotonic() - began_s)


async def test_a_watch_equals_the_truth_though_leader_endpoint_and_history_go(
    cluster: EtcdCluster, store: EtcdStore, request: pytest.FixtureRequest
) -> None:
    watched = EtcdStore(EtcdAccess(tuple(reversed(cluster.endpoints)), f"{request.node.name}/"))
    writer = Writer(store)
    await writer.write(50)
    async with Follower(watched) as follower:
        await writer.write(50)
        await store.compact((await store.list("w/")).revision)
        await writer.write(50)
        cluster.kill(2)  # the watch's endpoint
        await writer.write(50)
        cluster.start(2)
        cluster.wait()
        cluster.kill(cluster.leader())
        await writer.write(50)
        await follower.equals(store)
        for member in range(3):
            if cluster.is_up(member):
                cluster.kill(member)
        for member in range(3):
            cluster.start(member)
        cluster.wait()
        await writer.write(50)
        await follower.equals(store)
    await watched.close()


async def test_history_compacted_while_a_watch_was_cut_off_comes_as_the_difference(
    cluster: EtcdCluster, store: EtcdStore, request: pytest.FixtureRequest
) -> None:
    alone = EtcdStore(EtcdAccess((cluster.endpoints[1],), f"{request.node.name}/"))
    writer = Writer(store)
    await writer.write(30)
    async with Follower(alone) as follower:
        await writer.write(30)
        await follower.equals(store)
        cluster.kill(1)
        await writer.write(30)
        await store.compact((await store.list("w/")).revision)
        cluster.start(1)
        await writer.write(5)
        await follower.equals(store)
    await alone.close()


async def test_a_member_that_lost_its_cluster_keeps_no_watch_open_in_silence(
    cluster: EtcdCluster, store: EtcdStore
) -> None:
    writer = Writer(store)
    async with Follower(store) as follower:
        for member in (1, 2):
            cluster.pause(member)
        with pytest.raises(UnavailableError):
            await store.put("w/a", b"1")
        for member in (1, 2):
            cluster.resume(member)
        await writer.write(20)
        await follower.equals(store)


async def test_a_swap_that_was_not_answered_is_read_back(
    store: EtcdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is lost after etcd did it; the second is asked of nobody twice."""
    attempt, lost = EtcdLink.attempt, []

    async def loses_one(self: EtcdLink, ask: object, timeout_s: float = 2.0) -> object:
        answer = await attempt(self, ask, timeout_s)  # type: ignore[arg-type,var-annotated]
        if not lost:
            lost.append(answer)
            raise UnansweredError("lost")
        return answer

    monkeypatch.setattr(EtcdLink, "attempt", loses_one)
    done = await store.compare_and_swap("a", ABSENT, b"mine")
    entry = await store.get("a")
    assert entry is not None
    assert done == entry.revision
    lost.clear()
    assert await store.compare_and_swap("a", ABSENT, b"mine too") is None
    lost.clear()
    assert await store.txn((), [Put("b", b"1"), Put("c", b"1")]) is not None


async def test_a_lease_outlives_the_clusters_leader_and_ends_with_its_keeper(
    cluster: EtcdCluster, store: EtcdStore
) -> None:
    lease = await store.grant_lease(2.0)
    await store.put("leader", b"me", lease)
    cluster.kill(cluster.leader())
    assert await store.keep_lease(lease) > 0
    assert await store.get("leader") is not None
    async with asyncio.timeout(PATIENCE_S):
        while await store.get("leader") is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert await store.keep_lease(lease) == 0


async def test_a_backup_goes_back_in_more_transactions_than_one_and_into_a_file(
    store: EtcdStore, cluster: EtcdCluster, tmp_path: Path
) -> None:
    """etcd takes 128 operations in one, and keeps other prefixes' keys as they are."""
    for number in range(300):
        await store.put(f"epochs/g{number}", b'{"epoch":5,"job":"j"}')
    beside = EtcdStore(cluster.access("beside/"))
    await beside.put("epochs/other", b'{"epoch":5,"job":"j"}')
    backup = await take_backup(store)
    await store.put("epochs/newer", b'{"epoch":7,"job":"j"}')
    done = await restore(store, backup, replace_all=True)
    saved = load((await store.list("")).entries)
    assert len(saved.epochs) == 300
    assert saved.epoch_floor == done.epoch_floor > backup.taken_s * 1e3
    assert await beside.get("epochs/other") is not None
    await beside.close()
    file = SqliteStore(tmp_path / "store")
    await restore(file, backup)
    assert load((await file.list("")).entries).epochs == saved.epochs
    await file.close()


def test_the_end_of_a_prefix_is_the_next_key_after_it() -> None:
    assert end_of(b"a/") == b"a0"
    assert end_of(b"a\xff\xff") == b"b"
    assert end_of(b"\xff") == b"\0"
    assert end_of(b"") == b"\0"


def test_nothing_secret_is_shown() -> None:
    assert "hunter2" not in repr(EtcdAccess(("h:1",), user="u", password="hunter2"))


# ---- users and TLS ----

_ISSUE = """
set -e
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.pem \
  -subj /CN=test-ca -days 2
printf "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n" > ext
for name in server client; do
  openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout $name.key \
    -out $name.csr -subj /CN=$name
  openssl x509 -req -in $name.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out $name.pem \
    -days 2 -extfile ext
done
"""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    folder = tmp_path_factory.mktemp("secured")
    issued = subprocess.run(["bash", "-c", _ISSUE], cwd=folder, capture_output=True, text=True)
    assert issued.returncode == 0, issued.stderr
    with running_etcd(folder, tls=folder) as cluster:
        for command in (
            ["user", "add", "root:rootpw"],
            ["user", "grant-role", "root", "root"],
            ["role", "add", "rose"],
            ["role", "grant-permission", "rose", "readwrite", "rose/", "--prefix=true"],
            ["user", "add", "rose:rosepw"],
            ["user", "grant-role", "rose", "rose"],
            ["auth", "enable"],
        ):
            done = cluster.ctl(*command)
            assert done.returncode == 0, done.stderr
        yield cluster


def _access(secured: EtcdCluster, **changes: object) -> EtcdAccess:
    folder = secured.folder
    fields: dict[str, object] = {
        "user": "rose",
        "password": "rosepw",
        "ca_file": folder / "ca.pem",
        "certificate_file": folder / "client.pem",
        "key_file": folder / "client.key",
    }
    return secured.access(**{**fields, **changes})


async def test_users_and_certificates_are_taken_and_a_forgotten_login_is_renewed(
    secured: EtcdCluster,
) -> None:
    store = EtcdStore(_access(secured))
    first = await store.put("w/a", b"1")
    since = await store.list("w/")
    watch = store.watch(since)
    coming = asyncio.ensure_future(anext(watch))
    secured.kill(0)  # it forgets all tokens
    secured.start(0)
    second = await store.compare_and_swap("w/a", first, b"2")
    async with asyncio.timeout(PATIENCE_S):
        change = await coming
    assert (change.key, change.value, change.revision) == ("w/a", b"2", second)
    await watch.aclose()  # type: ignore[attr-defined]
    lease = await store.grant_lease(2.0)
    assert await store.keep_lease(lease) > 0
    await store.revoke_lease(lease)
    await store.close()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prefix": "other/"}, "prefix"),
        ({"password": "wrong"}, "--store-password-file"),
        ({"user": ""}, r"\(none\)"),
    ],
    ids=["outside of the role's prefix", "wrong password", "no user"],
)
async def test_what_etcd_refuses_is_one_line_that_says_what_to_do(
    secured: EtcdCluster, changes: dict[str, object], says: str
) -> None:
    store = EtcdStore(_access(secured, **changes))
    with pytest.raises(ConfigError, match=says):
        await store.put("a", b"1")
    await store.close()


async def test_a_watch_outside_of_the_roles_prefix_is_refused(secured: EtcdCluster) -> None:
    mine, other = EtcdStore(_access(secured)), EtcdStore(_access(secured, prefix="other/"))
    since = await mine.list("w/")
    with pytest.raises(ConfigError, match="prefix"):
        await anext(other.watch(since))
    await mine.close()
    await other.close()


async def test_without_a_certificate_nobody_answers(secured: EtcdCluster) -> None:
    store = EtcdStore(_access(secured, certificate_file=None, key_file=None))
    with pytest.raises(UnavailableError):
        await store.get("a")
    await store.close()


def test_files_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is missing"):
        EtcdAccess(("h:1",), ca_file=tmp_path / "none").credentials()
    with pytest.raises(ConfigError, match="--store-ca"):
        EtcdAccess(("h:1",), certificate_file=tmp_path / "c").credentials()
