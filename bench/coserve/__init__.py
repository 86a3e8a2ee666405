"""`python -m bench.coserve`: what a host's users feel of a guest, and what the guest gets."""
