"""Trainers that only know a vLLM or an SGLang: their control calls, and folders of checkpoints.

    trainer ── checkpoint folder ──► `rose front` ── delta ──► nodes
            ── turns ─────────────►      │ ─────────────────► gateway
    trainer ── checkpoint folder ──► `rose publish --watch` ──► nodes

prime-rl, slime and AReaL drive the front by their configuration alone (docs/trainers/front.md).
"""
