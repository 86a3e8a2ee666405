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
