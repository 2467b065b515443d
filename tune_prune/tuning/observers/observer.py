"""What follows a search while it runs; the same observers follow one on Ray and one in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tune_prune.tuning.messages import Message
from tune_prune.tuning.work import Work


class Observer:
    """Follows a search: each piece of work is a trial or a preparation job. A subclass overrides what it cares for."""

    title = "a file of the search"  # what people call what it shows

    def on_begin(self) -> None:
        """Before anything is handed out."""

    def on_start(self, work: Work) -> None:
        """It begins; once more where its process died and it is tried again."""

    def on_message(self, work: Work, message: Message) -> None:
        """A stage of a trial, or a job, is done."""

    def on_end(self, work: Work, last: Message | None) -> None:
        """It has ended, by itself or stopped by the rule of the search, after the message `last`."""

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        """It has ended by an error, or with its process. `last` has the failed record of a trial (`TrialMessage.record`), and is
        the last message of a job."""

    def on_tick(self, running: int) -> None:
        """Now and then; so many pieces are being worked on."""

    def on_finish(self) -> None:
        """Nothing more is handed out."""


class Observers(Observer):
    """All that follow a search, as one: first the `keepers`, without which it cannot go on, then the `views`, of which one that
    raises is a warning to `warn`, once, and is told what comes all the same."""

    def __init__(self, keepers: Sequence[Observer], views: Sequence[Observer], warn: Callable[[str], None]) -> None:
        self._keepers, self._views, self._warn = list(keepers), list(views), warn
        self._failed: set[Observer] = set()

    def _tell(self, event: str, *arguments: Any) -> None:
        for keeper in self._keepers:
            getattr(keeper, event)(*arguments)
        for view in self._views:
            try:
                getattr(view, event)(*arguments)
            except Exception as error:  # noqa: BLE001  # said
                if view not in self._failed:
                    self._failed.add(view)
                    self._warn(f"{view.title}: not written ({type(error).__name__}: {error}); the search goes on")

    def on_begin(self) -> None:
        self._tell("on_begin")

    def on_start(self, work: Work) -> None:
        self._tell("on_start", work)

    def on_message(self, work: Work, message: Message) -> None:
        self._tell("on_message", work, message)

    def on_end(self, work: Work, last: Message | None) -> None:
        self._tell("on_end", work, last)

    def on_error(self, work: Work, last: Message | None, error: BaseException) -> None:
        self._tell("on_error", work, last, error)

    def on_tick(self, running: int) -> None:
        self._tell("on_tick", running)

    def on_finish(self) -> None:
        self._tell("on_finish")
