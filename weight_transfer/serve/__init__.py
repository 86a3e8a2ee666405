"""Serving of versions over HTTP: routes, leases, forwarding, link rates."""
