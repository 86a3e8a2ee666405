"""The endpoint that a replica serves inside its engine's API process.

vLLM loads its public face: the entry point `rose.replica.endpoint:ReplicaEndpoint` and, by
`--middleware`, `rose.replica.asgi`. Nothing is imported here, so that the parts without vLLM can be
used without it.
"""

__all__: list[str] = []
