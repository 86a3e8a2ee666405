"""Fluid model: means instead of steps, for a thousand cards over days.

It takes the same scenarios and gives the same figures as the step-by-step simulator, with which it
is compared on three scenarios that both can play. Queues are approximated (M/G/∞), decisions of
single leases and turns are not modelled: guests follow the share that the gate's rule leaves them.
"""
