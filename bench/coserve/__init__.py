"""`python -m bench.coserve`: latencies of a host beside a guest, and the guest's throughput."""
