"""`rose compare`: the cost of lending to a host, on its own traffic.

    plan ──► for each block: switch the guest on or off, settle, measure ──► verdict
                                                                 │
             always, however it ends: as it was before  ◄────────┘

`run` draws the order of the blocks and carries them out, `node_metrics` reads a node's metrics
page, `verdict` compares the blocks, with intervals (`bootstrap`).
"""
