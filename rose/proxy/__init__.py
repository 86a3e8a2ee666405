"""A node's proxy: turns of other machines reach engines that listen on loopback alone.

    gateway ══ mTLS, kept ══► proxy ── HTTP on loopback, kept ──► engine
             /REPLICA/rose/v1/generate      /rose/v1/generate

It is a process of its own beside the daemon, so that streams never delay the guard. An answer is
forwarded in its original bytes: the proxy only looks for its end.

Only gateways are admitted, by their certificate, and only an engine's routes of turns can be
reached: control, weights and vLLM's own routes stay on loopback, whatever secret a caller has.
"""
