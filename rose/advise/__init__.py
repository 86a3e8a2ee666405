"""Advice to an operator before anything of ROSE is installed: what lending would bring, and cost.

Prometheus, or /metrics for a while ──► usage of each deployment, as its engines report it
usage, or a trace of requests ──► traffic ──► the simulator's what-if: hosts alone, and lending
both ──► idle GPU-hours, tokens for rollouts, users' p99, money, and how sure each of them is
"""

# The rest is in `rose.advise.advice`: schedulers read usage, and do without the simulator.
from rose.advise.usage import DeploymentUsage, PrometheusHistory, UsageStep

__all__ = ["DeploymentUsage", "PrometheusHistory", "UsageStep"]
