"""Load on a host in an open loop, and on a gateway or an engine in a closed one."""
