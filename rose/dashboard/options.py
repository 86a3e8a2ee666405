"""Options of the dashboard on a scheduler's command line."""

import argparse
from pathlib import Path

from rose.dashboard.server import DashboardSettings
from rose.errors import ConfigError


def add_dashboard_options(parser: argparse.ArgumentParser) -> None:
    """Options for whether and where it is served; read them with `taken_dashboard`."""
    group = parser.add_argument_group("dashboard", "pages for a browser; they change nothing")
    group.add_argument(
        "--dashboard-port",
        type=int,
        metavar="N",
        help="serve them there (default: nowhere; 7480 is as good as any)",
    )
    group.add_argument(
        "--dashboard-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address of the pages (default: loopback; others over TLS to operators, or with"
        " --insecure)",
    )
    group.add_argument(
        "--dashboard-token-file",
        type=Path,
        metavar="FILE",
        help="readers show the secret in this file, as the password of any user",
    )


def taken_dashboard(args: argparse.Namespace) -> DashboardSettings | None:
    """The settings, None where no port is given. Raises ConfigError."""
    if args.dashboard_port is None:
        if args.dashboard_token_file is not None:
            raise ConfigError("--dashboard-token-file is of a dashboard; give --dashboard-port")
        return None
    return DashboardSettings(args.dashboard_port, args.dashboard_host, args.dashboard_token_file)
