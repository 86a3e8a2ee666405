"""Entry point of `rose`: `rose kill` sets the kill switch before anything else is imported.

On a busy machine the imports of the command line take seconds; a node's keepers and its daemon look
at the file, and end guests meanwhile.
"""

import itertools
import os
import sys


def set_kill_switch(argv: list[str]) -> None:
    """Create RUN_DIR/KILL if the words are those of `rose kill RUN_DIR` without --dry-run or
    --help.

    Errors are left to the command, which reports them.
    """
    if argv[:1] != ["kill"] or any(word.startswith(("--d", "-h", "--h")) for word in argv):
        return
    # The word after an option is its value: `--within 2`.
    words = [word for before, word in itertools.pairwise(argv) if not before.startswith("--w")]
    folders = [word for word in words if os.path.isdir(word)]
    if len(folders) == 1:
        try:
            name = os.path.join(folders[0], "KILL")
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError:
            return  # The command says so.


def main() -> int:
    """Run the `rose` command line of this process; return its exit code."""
    set_kill_switch(sys.argv[1:])
    from rose.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
