"""Channels and servers of ROSE: the same limits and keepalives on both ends."""

import grpc
import grpc.aio

# Frames are small by design (tables, leases, names): anything larger is a mistake or an attack.
MAX_MESSAGE_BYTES = 4 << 20
KEEPALIVE_MS = 2_000
KEEPALIVE_TIMEOUT_MS = 3_000
RECONNECT_MAX_MS = 1_000

_LIMITS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that vanished without closing (power, cable) is noticed within one lease's life.
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options() -> tuple[tuple[str, int], ...]:
    """Options of every channel."""
    return (
        *_LIMITS,
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Loopback and cluster addresses never go through a proxy of the environment.
        ("grpc.enable_http_proxy", 0),
    )


def server_options() -> tuple[tuple[str, int], ...]:
    """Options of every server."""
    return (
        *_LIMITS,
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        # Two schedulers on one port would each own half of the leases.
        ("grpc.so_reuseport", 0),
    )


def make_channel(address: str) -> grpc.aio.Channel:
    """A channel to HOST:PORT; it connects when first used and reconnects by itself."""
    return grpc.aio.insecure_channel(address, options=channel_options())


def make_server() -> grpc.aio.Server:
    """A server without services and ports."""
    return grpc.aio.server(options=server_options())
