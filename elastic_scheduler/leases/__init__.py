"""Leases: which job may use which replica, for how long, at what cost."""
