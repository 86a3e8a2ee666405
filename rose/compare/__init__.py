"""`rose compare`: the cost of lending to a host, on its own traffic.

    plan ──► for each block: switch the guest on or off, settle, measure ──► verdict
                                                                 │
             always, however it ends: as it was before  ◄────────┘

`plan` draws the order, `node_metrics` reads a node's page, `run` carries it out, `verdict` says
what was seen, with intervals (`bootstrap`).
"""
