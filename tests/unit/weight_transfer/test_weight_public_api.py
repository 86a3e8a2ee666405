import weight_transfer

PUBLIC = """
CatalogError
Change
ChunkDigestError
ChunkError
ChunkFormatError
ChunkHeader
ChunkMissingError
ChunkRef
ChunkStore
DigestMismatchError
Encoding
LoaderMapError
Manifest
ManifestError
ManifestExpired
ProbeError
Publisher
Receiver
SignatureError
SigningKey
StagedTensor
StagedUpdate
StoreError StoredFile
TensorBits
TensorFormatError
TensorUpdate
VerifyKey
WeightError
WrongBaseError
bits_of
chunk_id
decode_chunk
digest_of
encode_chunk
read_chunk
read_model_dir
read_safetensors
tensor_bits
tensor_of
updated
"""


def test_the_public_names_are_pinned() -> None:
    assert weight_transfer.__all__ == PUBLIC.split()
    assert all(hasattr(weight_transfer, name) for name in weight_transfer.__all__)
