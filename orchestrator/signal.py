"""A broadcast wake-up for the driver's loops."""

import asyncio


class Signal:
    """Loops wait for the next change; whoever changes something notifies all of them.

    Not thread-safe: one event loop. A waiter must check its condition before it waits, with no
    await in between, or it could sleep through a change.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        """Changes so far; one that stands still means that nothing moves."""

    def notify(self) -> None:
        """Wake every current waiter."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next notify."""
        await self._event.wait()
