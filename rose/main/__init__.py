"""Entry points of processes, one file each: they build the objects and run them."""
