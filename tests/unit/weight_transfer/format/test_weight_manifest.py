import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from weight_transfer.errors import ManifestError, SignatureError
from weight_transfer.format import manifest as manifest_module
from weight_transfer.format.manifest import (
    CODEC,
    MAX_MANIFEST_BYTES,
    MOST_LINE_BYTES,
    ChunkRef,
    Manifest,
    OnUpdate,
    TensorUpdate,
    VerifiedManifest,
    head_of,
)
from weight_transfer.format.signing import HEAD_BYTES, Envelope, JobKeys, Kind, SigningKey

KEY = SigningKey.from_hex("01" * 32)
CHUNKS = (
    ChunkRef("ab" * 32, (0, 5), "sparse", 100, 7),
    ChunkRef("cd" * 32, (5, 8), "empty", 64, 0),
)
TENSORS = (
    TensorUpdate("w", "bfloat16", (8, 4), "0" * 16, "1" * 16, CHUNKS),
    TensorUpdate("frozen", "float32", (), "2" * 16, "2" * 16, ()),
)
MANIFEST = Manifest("job", 2, 1, CODEC, "trainer", 10.0, 20.5, TENSORS).signed(KEY)


def test_json_round_trip_keeps_everything() -> None:
    assert Manifest.from_bytes(MANIFEST.to_bytes()) == MANIFEST
    assert MANIFEST.changed == 7
    twice = structs.replace(TENSORS[0], name="v")
    for tensors in (TENSORS, (*TENSORS, twice)):
        assert replace(MANIFEST, tensors=tensors).wire_bytes == 164, "each chunk once"


@pytest.mark.parametrize("how", OnUpdate)
def test_what_becomes_of_turns_in_flight_is_signed_too(how: OnUpdate) -> None:
    manifest = replace(MANIFEST, on_update=how).signed(KEY)
    read = Manifest.from_bytes(manifest.to_bytes())
    read.verify(KEY.verify_key)
    assert read.on_update is how
    if how is not OnUpdate.RECOMPUTE:
        with pytest.raises(SignatureError):
            replace(read, on_update=OnUpdate.RECOMPUTE).verify(KEY.verify_key)
        with pytest.raises(ManifestError):
            Manifest.from_bytes(manifest.to_bytes().replace(how.value.encode(), b"whenever"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 3),
        ("parent", 0),
        ("expires_s", 1e9),
        ("tensors", TENSORS[:1]),
        ("on_update", OnUpdate.KEEP),
        ("signature", b""),
        ("signature", b"zz"),
        ("signature", bytes(64)),
    ],
)
def test_any_alteration_breaks_the_signature(field: str, value: object) -> None:
    MANIFEST.verify(KEY.verify_key)
    with pytest.raises(SignatureError):
        replace(MANIFEST, **{field: value}).verify(KEY.verify_key)
    with pytest.raises(SignatureError):
        MANIFEST.verify(SigningKey.generate().verify_key)


def test_a_key_survives_its_file_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "key"
    KEY.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert SigningKey.load(path).verify_key == KEY.verify_key
    with pytest.raises(FileExistsError):
        KEY.save(path)


@given(st.binary(max_size=200))
def test_garbage_is_refused(raw: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(raw)


def lines_of(manifest: Manifest) -> list[Any]:
    return [json.loads(line) for line in manifest.to_bytes()[HEAD_BYTES:].splitlines()]


def manifest_from(lines: list[Any], key: SigningKey | None = None) -> bytes:
    payload = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    envelope = Envelope(Kind.MANIFEST, payload)
    return (envelope.signed(key) if key else envelope).to_bytes()


W, FROZEN = 1, 2  # Lines of the two tensors; the first one is of the version.
CHUNKS_AT = 5


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ([0, "version"], -1),
        ([0, "version"], True),
        ([0, "version"], 1.5),
        ([0, "version"], 1 << 63),
        ([0, "created_s"], "now"),
        ([0, "expires_s"], float("inf")),
        ([0, "expires_s"], float("nan")),
        ([0, "tensors"], 1),
        ([0, "tensors"], 3),
        ([0, "tensors"], 1 << 40),
        ([0, "more"], "of it"),
        ([W, CHUNKS_AT, 0, 0], "../../etc/passwd"),
        ([W, CHUNKS_AT, 0, 0], "AB" * 32),
        ([W, CHUNKS_AT, 0, 0], "ab" * 32 + "\n"),
        ([W, CHUNKS_AT, 0, 1], [0]),
        ([W, CHUNKS_AT, 0, 1], [0, 4]),
        ([W, CHUNKS_AT, 1, 1], [5, 9]),
        ([W, CHUNKS_AT], []),
        ([W, CHUNKS_AT], {}),
        ([FROZEN, 0], "w"),
        ([FROZEN, 4], "12"),
        ([FROZEN], {}),
        ([FROZEN], []),
    ],
)
def test_fields_of_the_wrong_kind_are_refused(path: list[Any], value: object) -> None:
    lines = lines_of(MANIFEST)
    assert Manifest.from_bytes(manifest_from(lines, KEY), KEY.verify_key) == replace(
        MANIFEST, signature=Manifest.from_bytes(manifest_from(lines, KEY)).signature
    )
    spot: Any = lines
    for step in path[:-1]:
        spot = spot[step]
    spot[path[-1]] = value
    with pytest.raises(ManifestError):
        Manifest.from_bytes(manifest_from(lines))


def test_nothing_is_parsed_before_the_signature_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cannot sign does not reach a decoder, whatever it sends."""
    parsed: list[bytes] = []

    def watched(line: bytes) -> object:
        parsed.append(line)
        raise AssertionError

    monkeypatch.setattr(manifest_module, "_read_head", watched)
    monkeypatch.setattr(manifest_module, "_read_tensor", watched)
    stranger = SigningKey.generate()
    for raw in (MANIFEST.signed(stranger).to_bytes(), manifest_from([[[]] * 9])):
        with pytest.raises(SignatureError):
            Manifest.from_bytes(raw, KEY.verify_key)
    assert parsed == []


def test_the_key_of_one_job_signs_no_version_of_another() -> None:
    other = SigningKey.from_hex("02" * 32)
    given = JobKeys(None, {"job": KEY.verify_key, "other": other.verify_key})
    assert JobKeys.parse(given.text) == given
    assert JobKeys.parse(KEY.verify_key.hex) == JobKeys(KEY.verify_key)
    assert JobKeys(KEY.verify_key).text == KEY.verify_key.hex
    for keys in (given, JobKeys(KEY.verify_key, {"other": other.verify_key})):
        assert VerifiedManifest.read(MANIFEST.to_bytes(), keys).manifest == MANIFEST
        theirs = replace(MANIFEST, job="other")
        VerifiedManifest.read(theirs.signed(other).to_bytes(), keys)
        for forged in (theirs.signed(KEY), MANIFEST.signed(other)):
            with pytest.raises(SignatureError, match="does not match"):
                VerifiedManifest.read(forged.to_bytes(), keys)
    with pytest.raises(SignatureError, match="no key of job third"):
        VerifiedManifest.read(replace(MANIFEST, job="third").signed(KEY).to_bytes(), given)


def test_a_signature_of_one_kind_is_none_of_another() -> None:
    """A signed catalog cannot be handed in as a manifest, nor the other way round."""
    payload = MANIFEST.to_bytes()[HEAD_BYTES:]
    other = Envelope(Kind.CATALOG, payload).signed(KEY)
    with pytest.raises(SignatureError):
        Envelope(Kind.MANIFEST, payload, other.signature).verify(KEY.verify_key)
    with pytest.raises(ManifestError, match="not a manifest"):
        Manifest.from_bytes(other.to_bytes(), KEY.verify_key)


def test_bounds_hold_for_readers_and_for_whoever_signs() -> None:
    """The trainer refuses a manifest that no node would take, in a line that says what to do."""
    line = json.dumps(["w", "bfloat16", [8], "0" * 16, "0" * 16, []]).encode()
    for payload in (
        b"x" * (MOST_LINE_BYTES + 2),
        lines_of(MANIFEST)[0]["job"].encode() + b"\n" * 9,
        b"[" * MOST_LINE_BYTES + b"\n",
        line,
    ):
        with pytest.raises(ManifestError):
            Manifest.from_bytes(Envelope(Kind.MANIFEST, payload).to_bytes())
    with pytest.raises(ManifestError, match="are allowed"):
        Manifest.from_bytes(bytes(MAX_MANIFEST_BYTES + 1))
    rows = range(6_000)
    chunks = tuple(ChunkRef("ab" * 32, (row, row + 1), "sparse", 100, 7) for row in rows)
    wide = TensorUpdate("w", "bfloat16", (len(rows), 4), "0" * 16, "1" * 16, chunks)
    with pytest.raises(ManifestError, match="larger chunks"):
        replace(MANIFEST, tensors=(wide,)).signed(KEY)


def test_when_a_manifest_expires_is_read_from_its_first_line() -> None:
    assert head_of(MANIFEST.to_bytes()).expires_s == MANIFEST.expires_s
    for raw in (b"", b"{}", MANIFEST.to_bytes()[:80]):
        with pytest.raises(ManifestError):
            head_of(raw)
