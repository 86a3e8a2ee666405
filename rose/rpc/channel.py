"""Channels and servers of ROSE: the same limits and keepalives on both ends.

With certificates both sides authenticate, and a server checks its table of allowed calls. Without
certificates connections are plain text, for loopback or a network that its operator has fenced.
"""

import grpc
import grpc.aio

from rose.security.certificates import CertificateFiles
from rose.security.roles import Role
from rose.security.rpc_access import AccessInterceptor

# Messages are small by design (leases, names, figures): a larger one is a mistake or an attack.
MAX_REQUEST_BYTES = 256 << 10
# Tables and snapshots of a whole cluster are larger.
MAX_REPLY_BYTES = 4 << 20
# Most streams of one connection, and most calls of one server.
MAX_STREAMS = 1_024
MAX_CALLS = 8_192
KEEPALIVE_MS = 2_000
# Bound on a connection without data: TLS handshakes end then, and so does a connection to a server
# that does not answer pings. Below 5 s, the time within which an operator gets an answer.
HANDSHAKE_TIMEOUT_MS = 3_000
SERVER_KEEPALIVE_MS = 1_000
MAX_IDLE_MS = 300_000
KEEPALIVE_TIMEOUT_MS = 3_000
RECONNECT_MAX_MS = 1_000

_LIMITS: tuple[tuple[str, int], ...] = (
    # A peer that vanished without closing (power, cable) is detected within one lease's life.
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    # gRPC waits a minute for the answer to a ping by default, and sends no ping meanwhile.
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.max_pings_without_data", 0),
)


def channel_options() -> tuple[tuple[str, int], ...]:
    """Return the gRPC options of a client's channel: sizes of messages, keepalives,
    reconnection.
    """
    return (
        *_LIMITS,
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_receive_message_length", MAX_REPLY_BYTES),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MAX_MS),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Connections are not shared between channels: a new channel would get the broken connection
        # of one that was given up.
        ("grpc.use_local_subchannel_pool", 1),
        # Loopback and cluster addresses never go through a proxy of the environment.
        ("grpc.enable_http_proxy", 0),
    )


def server_options(max_connections: int = MAX_CALLS) -> tuple[tuple[str, int], ...]:
    """Return the gRPC options of a server: sizes of messages, keepalives, and limits on connections
    and streams.
    """
    return (
        *_LIMITS,
        ("grpc.keepalive_time_ms", SERVER_KEEPALIVE_MS),
        # gRPC closes connections beyond it, so that descriptors remain for files.
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
        ("grpc.max_send_message_length", MAX_REPLY_BYTES),
        ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
        # Two schedulers on one port would each own half of the leases.
        ("grpc.so_reuseport", 0),
    )


def make_channel(address: str, certificates: CertificateFiles | None = None) -> grpc.aio.Channel:
    """Return an asyncio gRPC channel to the scheduler at HOST:PORT; it connects on first use, and
    reconnects.

    It shows the certificate that the files hold now: make another channel for each life of a
    stream. Raises ConfigError for a certificate without an identity.
    """
    options = channel_options()
    if certificates is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(
        address,
        certificates.channel_credentials(),
        options=(*options, *certificates.channel_options(Role.SCHEDULER)),
    )


def make_blocking_channel(
    address: str, certificates: CertificateFiles | None = None
) -> grpc.Channel:
    """Return a gRPC channel as `make_channel` does, for callers without an event loop."""
    options = channel_options()
    if certificates is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(
        address,
        certificates.channel_credentials(),
        (*options, *certificates.channel_options(Role.SCHEDULER)),
    )


def make_server(
    access: AccessInterceptor | None = None, max_connections: int = MAX_CALLS
) -> grpc.aio.Server:
    """Return an asyncio gRPC server that has no services and ports yet.

    access: interceptor that checks each call, which needs TLS.
    """
    return grpc.aio.server(
        options=server_options(max_connections),
        maximum_concurrent_rpcs=MAX_CALLS,
        interceptors=[] if access is None else [access],
    )
