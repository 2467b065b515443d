"""argparse for every command: a mistake on a command line ends in one sentence that says what to write instead."""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tune_prune import __version__
from tune_prune.core.errors import UserError

_EXIT_CODES = """exit codes:
  0    done
  1    the machine could not do it, or a defect (with a traceback)
  2    something in the command, or in what it names, must change
  130  interrupted; 143 terminated: 128 + the number of the signal"""
_WIDTH, _INDENT = 100, 26  # columns of a page, and of the flags in it


class Parser(argparse.ArgumentParser):
    """argparse whose errors are UserErrors, so that bad flags end like every other bad input; with --version. Flags are not
    abbreviated: a script must not change its meaning when a flag is added. --help is one screen, the flags that most runs need and
    the first paragraph of what is said of each; --help-all is all of it."""

    def __init__(
        self,
        prog: str,
        usage: str,
        description: str,
        examples: Mapping[str, str],
        common: Mapping[str, Sequence[str]],
    ) -> None:
        """`usage`: the arguments that must be given; `examples`: arguments of the command, and what they do, the best first;
        `common`: by wish the flags that --help shows."""
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage} [options]",
            description=description,
            allow_abbrev=False,
            add_help=False,
        )
        self.examples, self.common = tuple(examples), common
        self._shown = [f"  {prog} {arguments}\n      {what}" for arguments, what in examples.items()]
        self.add_argument("-h", "--help", action="help", help="print the flags that most runs need, and stop")
        self.add_argument("--help-all", action=_PrintAll, nargs=0, help="print all flags and the exit codes, and stop")
        self.add_argument("--version", action=_PrintVersions, nargs=0, help="print versions and stop")

    def format_help(self) -> str:
        known = self._option_string_actions | {str(a.metavar): a for a in self._get_positional_actions()}
        groups = {wish: [known[name] for name in names] for wish, names in self.common.items()}
        more = f"{self.prog} --help-all shows all {len(self._actions)} flags."
        return self._page(groups, [*self._shown[:1], more], whole=False)

    def format_help_all(self) -> str:
        groups = {str(group.title): group._group_actions for group in self._action_groups}
        return self._page(groups, [*self._shown, "", _EXIT_CODES], whole=True)

    def _page(self, groups: Mapping[str, Sequence[argparse.Action]], end: Sequence[str], whole: bool) -> str:
        page = _Page(self.prog, whole)
        page.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        page.add_text(self.description)
        for title, actions in groups.items():
            page.start_section(title)
            page.add_arguments(actions)
            page.end_section()
        page.add_text("\n".join(["examples:" if whole else "example:", *end]))
        return page.format_help()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does; but a misspelt flag is reported before the one that is missing for it."""
        args = sys.argv[1:] if args is None else list(args)
        # Such letters stand for bytes that are no text, which records, logs and the terminal could not hold.
        if strange := [text for text in args if re.search("[\ud800-\udfff]", text)]:
            raise UserError(f"{strange[0]!r} is no UTF-8 text, which names in records are; rename that file or folder")
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        before = args[: args.index("--")] if "--" in args else args
        flags = [text.partition("=")[0] for text in before if re.match(r"--?[^-\d]", text) and " " not in text]
        if unknown := [flag for flag in dict.fromkeys(flags) if flag not in self._option_string_actions]:
            near = {flag: difflib.get_close_matches(flag.replace("_", "-"), known, n=1) for flag in unknown}
            hints = {flag: f", did you mean {close[0]}?" if close else "" for flag, close in near.items()}
            self.error("; ".join(f"unknown flag {flag}{hint}" for flag, hint in hints.items()))
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')} (see {self.prog} --help-all)")


class _Page(argparse.RawDescriptionHelpFormatter):
    """Help of a flag: a line for every line of its text, and what follows a value's name stays in its column."""

    def __init__(self, prog: str, whole: bool) -> None:
        width = min(shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH)
        super().__init__(prog, max_help_position=_INDENT, width=width)
        self._whole = whole

    def _split_lines(self, text: str, width: int) -> list[str]:
        paragraphs = text if self._whole else text.partition("\n\n")[0]
        return help_lines(paragraphs, width)


def help_lines(text: str, width: int) -> list[str]:
    """Wrap the help of a flag: a row for every line of it, whose name of a value stays in a column of its own."""
    lines: list[str] = []
    for row in filter(None, map(str.strip, text.splitlines())):
        column = re.match(r"\S+ {2,}|", row).end()  # type: ignore[union-attr]
        lines += textwrap.wrap(row, width, subsequent_indent=" " * column, break_on_hyphens=False)
    return lines


class Once(argparse.Action):
    """A flag that may be given once, where another command adds what a second one says."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise UserError(f"{option_string} is given twice, and {parser.prog} takes one; run it once for each")
        setattr(namespace, self.dest, values)


class _PrintAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="")
        parser.exit()


class _PrintVersions(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    """This program's version, and those of what its numbers depend on, which are not imported for it."""
    others = [f"{name} {_version(name)}" for name in ("torch", "transformers", "ray", "lm_eval")]
    return f"tune_prune {__version__} (Python {platform.python_version()}, {', '.join(others)})"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # an analysis needs none of them
        return "not installed"
