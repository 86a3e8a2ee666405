"""Replica backends: `replica_apis` has bodies out and lines in, `http_pool` the connections."""
