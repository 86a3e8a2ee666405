"""The fleet of stand-in nodes that the scheduler's benchmark plays, with sockets and without."""

from rose.rpc import rose_pb2 as pb

JOBS = ("grpo", "ppo")
# Of one cluster label.
OF_CLUSTER = 50
# From a lease to the first token of its job.
SWITCH_S = 0.02
OFFER_TTL_S = 3.0


def hello(number: int, *, takes_renewals: bool = True) -> pb.Hello:
    """What node `number` says first."""
    return pb.Hello(
        protocol=2,
        cluster=f"c{number // OF_CLUSTER}",
        relay_url=f"http://{_host(number)}:7500",
        takes_caps=True,
        takes_renewals=takes_renewals,
    )


def guest_offer(
    number: int, each: int, epoch: int, job: str, held: pb.HeldLease | None = None
) -> pb.Offer:
    """Guest `each` of node `number`; a job of "" has none of its versions."""
    return pb.Offer(
        replica=f"n{number}.g{each}",
        kind=pb.REPLICA_KIND_GUEST,
        url=f"http://{_host(number)}:{9000 + each}",
        kv_tokens=100_000,
        decode_tok_s=900.0,
        prefill_tok_s=9_000.0,
        policy_version=1 if job else 0,
        healthy=True,
        ttl_s=OFFER_TTL_S,
        epoch=epoch,
        max_sequences=16,
        job=job,
        model="m",
        held=held,
    )


def _host(number: int) -> str:
    return f"10.0.{number // 250}.{number % 250}"
