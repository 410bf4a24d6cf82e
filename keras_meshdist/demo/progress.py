"""The line that shows how far the demo is."""

import os
import tempfile
import time

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text


class Progress:
    """A line that is rewritten several times a second; a log elsewhere.

    ```python
    with Progress(console, epochs=6) as progress:
        progress.total = 12
        progress.step("2×4 model=4 batch=2, batch size 64")
    ```

    Args:
        console: `rich.console.Console`. If it isn't a terminal, a line is
            printed at each step.
        epochs: integer, number of epochs of each step.
    """

    def __init__(self, console: Console, epochs: int):
        self.total = 0
        self._console = console
        self._epochs = epochs
        self._number = 0
        self._text = ""
        self._note = ""
        self._started = time.monotonic()
        self._spinner = Spinner("dots")
        # The processes can't call, but a file can be seen to grow.
        file, self.path = tempfile.mkstemp(prefix="meshdist-demo-")
        os.close(file)
        self._live = Live(
            console=console,
            get_renderable=self.line,
            refresh_per_second=5,
            transient=True,
        )

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started

    def __enter__(self) -> "Progress":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()
        os.remove(self.path)

    def step(self, text: str) -> None:
        """Goes on to the next run."""
        os.truncate(self.path, 0)
        self._number += 1
        self._text, self._note = text, ""
        if not self._console.is_terminal:
            self._console.print(
                f"{self.seconds:4.0f} s {self._counter()} {text}",
                highlight=False,
            )

    def note(self, text: str) -> None:
        """Says what happens instead of training."""
        self._note = text

    def line(self) -> Table:
        """The line as it is now."""
        epoch = f"epoch {os.path.getsize(self.path)}/{self._epochs}"
        minutes, seconds = divmod(int(self.seconds), 60)
        line = Table.grid(padding=(0, 1))
        line.add_row(
            self._spinner,
            Text(self._counter(), style="bold"),
            Text(self._text, no_wrap=True, overflow="ellipsis"),
            Text(self._note or epoch, style="cyan", no_wrap=True),
            Text(f"{minutes}:{seconds:02}", style="dim"),
        )
        return line

    def _counter(self) -> str:
        width = len(str(self.total))
        return f"{self._number:{width}}/{self.total}"
