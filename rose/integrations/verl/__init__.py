"""verl through ROSE, as it is released: a plugin by entry point, no fork and no patched file.

agent loop ── generate ──► RoseServer (Ray actor, no GPU) ──► gateways ──► ROSE's replicas
actor ranks ── named weights ──► PolicyPublisher ──► nodes ──► ROSE's replicas
"""
