import weight_transfer

PUBLIC = """
Adapter AdapterError Block CatalogError Change ChunkDigestError ChunkError ChunkFormatError
ChunkHeader
ChunkMissingError ChunkRef ChunkStore DeviceMemoryError DigestMismatchError Encoding Heads
JobKeys
LoaderMapError LocalBits LocalTensor Manifest ManifestError ManifestExpired OnUpdate Piece
ProbeError Receiver ShardCoordinator ShardEncoder ShardError ShardReport ShardSettings
SignatureError SigningKey StagedTensor StagedUpdate StoreError StoredFile TensorBits
TensorFormatError TensorUpdate VerifiedManifest VerifyKey VersionPublisher WeightError
WrongBaseError base_digest bits_of check_adapter chunk_id column_shard decode_chunk digest_of
encode_chunk gate_up
grouped_qkv key_of newest_version piece read_chunk read_model_dir read_safetensors restore row_shard
stacked tensor_bits tensor_of updated vocabulary whole
"""


def test_the_public_names_are_pinned() -> None:
    assert weight_transfer.__all__ == PUBLIC.split()
    assert all(hasattr(weight_transfer, name) for name in weight_transfer.__all__)


def test_what_torch_trainers_call_is_pinned() -> None:
    import weight_transfer.torch

    assert weight_transfer.torch.__all__ == ["ShardedPublisher", "local_weights", "state_pieces"]
    assert all(hasattr(weight_transfer.torch, name) for name in weight_transfer.torch.__all__)
