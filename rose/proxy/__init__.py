"""A node's proxy: turns of other machines reach engines that listen on loopback alone.

    gateway ══ mTLS, kept ══► proxy ── HTTP on loopback, kept ──► engine
             /REPLICA/rose/v1/generate      /rose/v1/generate

It is a process of its own beside the daemon, so that streams never hold up the guard. An answer
goes on in the bytes in which it came: of each piece only the end of the answer is looked for.

Only gateways come in, by their certificate, and of an engine only the routes of turns can be
reached: control, weights and vLLM's own routes stay on loopback, whatever secret a caller has.
"""
