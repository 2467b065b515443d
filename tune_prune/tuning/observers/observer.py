"""What follows a search while it runs; the same observers follow one on Ray and one in this process."""

from __future__ import annotations

from tune_prune.tuning.messages import Message
from tune_prune.tuning.preparation import Work


class Observer:
    """Follows a search: each piece of work is a trial or a preparation job. A subclass overrides what it cares for."""

    def on_begin(self) -> None:
        """Before anything is handed out."""

    def on_start(self, work: Work) -> None:
        """It begins; once more where its process died and it is tried again."""

    def on_message(self, work: Work, message: Message) -> None:
        """A stage of a trial, or a job, is done."""

    def on_end(self, work: Work, last: Message | None) -> None:
        """It has ended, by itself or stopped by the rule of the search, after the message `last`."""

    def on_error(self, work: Work, last: Message | None, error: BaseException | None) -> None:
        """It has ended by an error, or with its process, after the message `last`."""

    def on_tick(self, running: int) -> None:
        """Now and then; so many pieces are being worked on."""

    def on_finish(self) -> None:
        """Nothing more is handed out."""
