"""A line that says how far a long pass is, on the terminal and only there."""

from __future__ import annotations

import sys
import time

QUIET = 1.0  # seconds in which nothing is said


class Progress:
    """`with Progress("layer 3", None) as bar: bar.show(0.5)`; None shows it on terminals, False never, True always."""

    def __init__(self, what: str, wanted: bool | None) -> None:
        self.what, self.on = what, sys.stderr.isatty() if wanted is None else wanted
        self.begun, self.said = time.monotonic(), 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.said:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def show(self, share: float) -> None:
        now = time.monotonic()
        if not self.on or now - self.begun < QUIET or now - self.said < 0.1:
            return
        self.said = now
        left = (now - self.begun) * (1 / share - 1) if share else 0.0
        sys.stderr.write(f"\r\x1b[K{self.what} {'█' * int(share * 24):░<24} {share:4.0%}, {left:.0f} s left")
        sys.stderr.flush()
