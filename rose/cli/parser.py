"""The command line's grammar: errors are one line, and a typo gets the nearest word."""

import argparse
import difflib
import re
from typing import NoReturn

from rose.errors import ConfigError

_CHOICE = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` with one line instead of printing a usage page and exiting."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse with what is wrong."""
        raise ConfigError(f"{self._explained(message)}; see `{self.prog} --help`")

    def _explained(self, message: str) -> str:
        choice = _CHOICE.search(message)
        if choice:
            word, known = choice[1], re.findall(r"[\w-]+", choice[2])
            return f"there is no {word!r}{nearest(word, known)}"
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            word = unknown.split()[0].partition("=")[0]
            return f"unknown option {word!r}{nearest(word, self._words(word))}"
        return message

    def _words(self, word: str) -> list[str]:
        """Options of this parser and of all its subcommands, or commands where `word` is one."""
        words = list(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                if not word.startswith("-"):
                    words += action.choices
                for child in action.choices.values():
                    words += child._option_string_actions
        return words


def nearest(word: str, known: list[str]) -> str:
    """`, did you mean 'x'?` for the nearest known word, empty when none is near."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f", did you mean {near[0]!r}?" if near else ""
