"""What ROSE's processes say to each other over HTTP: each message once, with defaults and limits.

replica   gateways and nodes ──► a replica's endpoint
gateway   trainers' clients ──► gateways
weights   nodes ──► publishers and relays, and a replica that takes a version

Whoever writes or reads one of them imports it from here. Between nodes, gateways and the scheduler
there is gRPC: `rose/rpc/rose.proto`. Golden files of every message: `tests/unit/contract`.
"""
