"""Base of operators' tools: calls of a scheduler, one read model of the fleet, the stop.

scheduler ──Snapshot, ExplainPolicy──► client ──► fleet (read model) ──► tables, JSON, YAML
                                            └──► stop: what was confirmed, what is proved
"""
