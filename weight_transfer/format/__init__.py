"""Format of weights on the wire: tensors, chunks, codecs, digests, manifests."""
