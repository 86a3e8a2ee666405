"""Leases of a node's replicas: state machine, agent, session with the scheduler."""
