"""`rose compare`: the cost of lending to a host, on its own traffic.

    plan ──► for each block: switch the guest on or off, settle, measure ──► verdict
                                                                 │
             always, however it ends: as it was before  ◄────────┘

`run` draws the order and carries it out, `node_metrics` reads a node's page, `verdict` says what
was seen, with intervals (`bootstrap`).
"""
