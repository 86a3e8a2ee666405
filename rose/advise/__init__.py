"""Advice to an operator before anything of ROSE is installed: what lending would bring, and cost.

Prometheus, or /metrics for a while ──► usage of each deployment, as its engines report it
usage, or a trace of requests ──► traffic ──► the simulator's what-if: hosts alone, and lending
both ──► idle GPU-hours, tokens for rollouts, users' p99, money, and how sure each of them is
"""

from rose.advise.advice import Assumed, DeploymentAdvice, LendingAdvice, advice_of
from rose.advise.usage import DeploymentUsage

__all__ = ["Assumed", "DeploymentAdvice", "DeploymentUsage", "LendingAdvice", "advice_of"]
