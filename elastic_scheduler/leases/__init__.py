"""Leases: who may use which replica, for how long, at what cost."""
