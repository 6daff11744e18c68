"""One progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn


class ShardProgress:
    """Progress over shards (or another `unit`): how many, tokens/s, MB/s and time left. Use as a context manager.

    Call `advance` for each finished shard; an engine that has many in flight calls `tick` for tokens as they are computed.
    """

    def __init__(self, title: str, shards: int, tokens: int, unit: str = "shards"):
        self.title, self.shards, self.tokens, self.unit = title, shards, tokens, unit
        self.done_shards = self.done_tokens = self.done_bytes = self.computed = self.made = 0
        self._console = Console(stderr=True)
        self._bar = None
        if self._console.is_terminal:
            self._bar = Progress(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
        self._last_line = 0.0

    def __enter__(self) -> ShardProgress:
        self.started = time.monotonic()
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task(self.title, total=self.tokens, text="")
        return self

    def __exit__(self, *exc) -> None:
        if self._bar:
            self._bar.stop()

    def tick(self, tokens: int) -> None:
        self.computed += tokens
        self._show()

    def advance(self, tokens: int, nbytes: int, made: int | None = None) -> None:
        """made: how many tokens it came to, where `tokens` is what it could have come to."""
        self.done_shards += 1
        self.done_tokens += tokens
        self.made += tokens if made is None else made
        self.done_bytes += nbytes
        self._show()

    def _show(self) -> None:
        tokens = max(self.done_tokens, self.computed)
        seconds = max(time.monotonic() - self.started, 1e-9)
        text = (
            f"{self.done_shards}/{self.shards} {self.unit}, {max(self.made, self.computed) / seconds:,.0f} tok/s, "
            f"{self.done_bytes / seconds / 1e6:,.1f} MB/s"
        )
        if self._bar:
            self._bar.update(self._task, completed=tokens, text=text)
        elif time.monotonic() - self._last_line > 10 or self.done_shards == self.shards:
            self._last_line = time.monotonic()
            left = max(self.tokens - tokens, 0) * seconds / max(tokens, 1)
            print(f"{self.title}: {text}, {left:,.0f} s left", file=sys.stderr, flush=True)
