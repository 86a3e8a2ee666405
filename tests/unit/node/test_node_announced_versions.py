"""Versions are brought in the order of their parents, whatever order they were announced in."""

from rose.node.weight_updates import AnnouncedVersions, KnownVersion


def test_a_late_joiner_walks_the_chain_from_its_own_version() -> None:
    chain = AnnouncedVersions()
    for version in (3, 1, 2):
        chain.add(KnownVersion("job", version, version - 1, "http://127.0.0.1:1"))
    assert chain.newest
    assert chain.newest.version == 3
    walked = []
    at = 0
    while (known := chain.after(at)) is not None:
        walked.append(known.version)
        at = known.version
    assert walked == [1, 2, 3]


def test_an_up_to_date_replica_has_nothing_to_do() -> None:
    chain = AnnouncedVersions()
    chain.add(KnownVersion("job", 1, 0, "http://127.0.0.1:1"))
    assert chain.after(1) is None


def test_versions_of_one_job_are_not_anothers() -> None:
    chain = AnnouncedVersions()
    chain.add(KnownVersion("a", 2, 1, "http://127.0.0.1:1"))
    assert chain.only_job == "a"
    chain.add(KnownVersion("b", 1, 0, "http://127.0.0.1:2"))
    assert (chain.only_job, chain.newest) == ("", None)
    assert [chain.newest_of(job).version for job in ("a", "b")] == [2, 1]  # type: ignore[union-attr]
    assert chain.after(1, "a").version == 2  # type: ignore[union-attr]
    assert chain.after(1, "b") is None
