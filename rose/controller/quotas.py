"""Quotas by placeholder pods: what Kueue or KAI admits bounds a job, and what is lent is shown.

    count      each second ──> running placeholder pods of each job, as its most guests
    advertise  every 5 s   ──> each Kubernetes node's guests that may be lent, as a resource

A count that cannot be read admits no new guest; a node that lends nothing now advertises 0.
"""

import asyncio
import time
from collections.abc import Iterable, Mapping
from itertools import count
from typing import Any, Final

from rose.controller.controller import NO_LIST, items_of
from rose.controller.kube_api import JOB_LABEL, RESOURCE, ApiError, KubeApi
from rose.scheduler.service import SchedulerService

COUNT_S: Final = 1.0
ADVERTISE_S: Final = 5.0
# A kubelet that begins anew may drop the resource: each twelfth time, all are written.
AGAIN: Final = 12


class QuotaController:
    """Counter of placeholder pods, and writer of what nodes lend, during a scheduler's term.

    quotas: namespaces of the pods, by job.
    """

    def __init__(
        self, api: KubeApi, scheduler: SchedulerService, quotas: Mapping[str, str]
    ) -> None:
        self._api, self._scheduler, self._quotas = api, scheduler, quotas
        self._unread: dict[str, str] = {}
        self._unsaid = ""

    def troubles(self) -> list[str]:
        """Return the faults that stop the controller's work now, a line each."""
        unread = [f"quotas of namespace {name}: {why}" for name, why in self._unread.items()]
        return unread + ([f"lent GPUs are not advertised: {self._unsaid}"] if self._unsaid else [])

    async def run(self) -> None:
        """Count and advertise until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._count())
            group.create_task(self._advertise())

    async def _count(self) -> None:
        while True:
            for namespace in sorted(set(self._quotas.values())):
                asked_s = time.monotonic()
                try:
                    pods = _metadata(await asyncio.to_thread(self._api.placeholders, namespace))
                except ApiError as error:
                    self._unread[namespace] = str(error)
                    continue
                self._unread.pop(namespace, None)
                jobs = [job for job, where in self._quotas.items() if where == namespace]
                self._scheduler.quotas_heard(asked_s, guests_of(pods, jobs))
            await asyncio.sleep(COUNT_S)

    async def _advertise(self) -> None:
        for turn in count():
            # First of all: nodes attach to a new leader before it says what they lend.
            await asyncio.sleep(ADVERTISE_S)
            lent, again = self._scheduler.lendable(), turn % AGAIN == 0
            self._unsaid = await asyncio.to_thread(advertise, self._api, lent, again=again)


def guests_of(pods: Iterable[Mapping[str, Any]], jobs: Iterable[str]) -> dict[str, int]:
    """Return, by job, the number of pods that are not being deleted, by running pods' metadata."""
    counts = dict.fromkeys(jobs, 0)
    for pod in pods:
        if pod["labels"][JOB_LABEL] in counts and not pod.get("deletionTimestamp"):
            counts[pod["labels"][JOB_LABEL]] += 1
    return counts


def advertise(api: KubeApi, lent: Mapping[str, int], *, again: bool) -> str:
    """Write on nodes what they lend, where it differs, or on all (again); return a fault, or ""."""
    try:
        nodes = _metadata(api.nodes())
    except ApiError as error:
        return str(error)
    fault = ""
    for node in nodes:
        said, number = node.get("labels", {}).get(RESOURCE), lent.get(node["name"], 0)
        if (said or number) and (again or said != str(number)):
            try:
                api.advertise(node["name"], number)
            except ApiError as error:
                fault = fault or str(error)
    if fault:
        return fault
    unknown = sorted(lent.keys() - {node["name"] for node in nodes})
    return f"Kubernetes has no node {unknown[0]}; name it as Kubernetes does" if unknown else ""


def _metadata(body: bytes) -> list[Mapping[str, Any]]:
    try:
        return [each["metadata"] for each in items_of(body)]
    except NO_LIST as error:
        raise ApiError(0, f"the API server's list is none ({error!r})") from error
