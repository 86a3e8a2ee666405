"""Messages of ROSE's processes over HTTP: each defined once, with defaults and limits.

replica   gateways and nodes ──► a replica's endpoint
gateway   trainers' clients ──► gateways
weights   nodes ──► publishers and relays, and a replica that takes a version

Both sides of a message import it from here. Nodes, gateways and the scheduler use gRPC:
`rose/rpc/rose.proto`. Golden files of every message: `tests/unit/contract`.
"""
