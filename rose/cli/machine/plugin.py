"""`rose plugin copy|webhook`: ROSE's plugin in hosts whose images do not have it."""

import argparse
import asyncio
import shutil
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rose.addresses import DefaultPort
from rose.command_line.output import say
from rose.command_line.parser import Parser
from rose.errors import ConfigError
from rose.logs.process_log import announce
from rose.security.certificates import add_certificate_options, taken_certificates

PACKAGES: Final = ("executor", "slo")
"""Packages that a host imports. All else that they import, an engine's environment has."""


def parser(prog: str) -> Parser:
    """Return the command-line parser of `rose plugin`."""
    made = Parser(prog, description="Bring ROSE's plugin into hosts whose images lack it.")
    commands = made.add_commands()
    copy = commands.add_parser("copy", help="copy the plugin into a folder for PYTHONPATH")
    copy.add_argument("dir", type=Path, metavar="DIR", help="a folder for it alone")
    copy.set_defaults(run=_copy)
    hook = commands.add_parser("webhook", help="make hosts of labelled pods, for an API server")
    hook.add_argument("--image", required=True, metavar="IMAGE", help="ROSE's, with the plugin")
    hook.add_argument("--pull-policy", default="IfNotPresent", metavar="P", help="IfNotPresent")
    hook.add_argument("--folder", default="/run/rose", metavar="DIR", help="shared with nodes")
    hook.add_argument("--group", type=int, default=10_777, metavar="N", help="of it (10777)")
    hook.add_argument("--host", default="127.0.0.1", metavar="HOST", help="default loopback")
    port = int(DefaultPort.WEBHOOK)
    hook.add_argument("--port", type=int, default=port, metavar="N", help=f"default {port}")
    add_certificate_options(hook)
    hook.set_defaults(run=_webhook)
    return made


def _copy(args: argparse.Namespace) -> int:
    try:
        rose = distribution("rose-rollout")
        for package in PACKAGES:
            source = Path(str(getattr(find_spec(package), "origin", None))).parent
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, args.dir / package, ignore=unwanted, dirs_exist_ok=True)
        for old in args.dir.glob("rose_rollout-*.dist-info"):
            shutil.rmtree(old)
        # By these files engines find the plugins; they would fail to load those of guests.
        info = args.dir / f"rose_rollout-{rose.version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: rose-rollout\nVersion: {rose.version}\n"
        (info / "METADATA").write_text(metadata)
        plugins = [each for each in rose.entry_points if ".host." in each.value]
        lines = [f"[{each.group}]\n{each.name} = {each.value}\n" for each in plugins]
        (info / "entry_points.txt").write_text("".join(lines))
    except PackageNotFoundError as error:
        raise ConfigError("rose-rollout is not installed: pip install it") from error
    except OSError as error:
        raise ConfigError(f"the plugin cannot be copied to {args.dir}: {error}"[:300]) from error
    say(f"{args.dir}: the plugin of ROSE; put the folder on PYTHONPATH, and set ROSE_ROLE=host")
    return 0


def _webhook(args: argparse.Namespace) -> int:
    # Its imports take long, and an init container needs none of them.
    from rose.controller.host_webhook import HostPods, application, serve
    from rose.process.http_port import HttpPort

    certificates = taken_certificates(vars(args))
    if certificates is None:
        raise ConfigError("API servers call webhooks over TLS: give --ca, --certificate and --key")
    # The API server shows no certificate; this server knows no secret, and changes nothing itself.
    tls = certificates.server_context(everybody=True)
    # Written at once: a pod's log is read while it serves.
    tell = partial(announce, "rose plugin")
    settings = HostPods(args.image, args.pull_policy, args.folder, args.group)
    asyncio.run(serve(HttpPort(application(settings, tell), args.host, args.port, tls), tell))
    return 0
