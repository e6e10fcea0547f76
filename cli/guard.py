"""What every sub-command shares at its edge: one line for a user's mistake, an exit code, never a traceback for it.

Exit codes: 0 done, 2 bad input, 3 nothing meets memory and limits, 130 interrupted. A traceback is a fault of ours.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from cli.synonyms import suggestion
from tensor_cast.errors import MsModelingError

__all__ = ["EXIT_BAD_INPUT", "EXIT_INFEASIBLE", "EXIT_OK", "Parser", "run_guarded"]

EXIT_OK = 0
EXIT_BAD_INPUT = 2
EXIT_INFEASIBLE = 3
_EXIT_INTERRUPTED = 130
#: What argparse says of options that it does not know.
_UNRECOGNISED = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line; sub-parsers inherit the habit. No abbreviated options.

    An option that the command has under another name is suggested.
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        """Print ``error: ...`` and exit with code 2."""
        _, found, unknown = message.partition(_UNRECOGNISED)
        if found:
            message += suggestion(unknown.split(), self._options())
        sys.stderr.write(f"error: {_one_line(message)} (see {self.prog} --help)\n")
        raise SystemExit(EXIT_BAD_INPUT)

    def _options(self) -> set[str]:
        """Its own options and those of its sub-commands; of these only the one that was called has any."""
        found = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for sub in action.choices.values():
                    found |= set(sub._option_string_actions)
        return found


def run_guarded(run: Callable[[], int]) -> int:
    """Exit code of ``run``; an :class:`MsModelingError` becomes one line on standard error and its own code."""
    try:
        code = run()
        sys.stdout.flush()
        return code
    except MsModelingError as error:
        sys.stderr.write(f"error: {_one_line(str(error))}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone. Point stdout elsewhere, or the interpreter complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _one_line(message: str) -> str:
    return " ".join(message.split())
