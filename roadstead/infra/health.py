"""Whether an HTTP server on this machine answers.

Owns: one request. Never touches: deadlines: whoever asks has one, and cancels.
"""

from __future__ import annotations

import httpx


async def status_of(url: str) -> int | None:
    """The status of a GET; None when nobody listens or the connection breaks. Waits for as long as the server takes."""
    try:
        # verify=False: there is no TLS on loopback, and loading the certificates costs 20 ms of CPU a probe.
        async with httpx.AsyncClient(timeout=None, verify=False) as client:
            return (await client.get(url)).status_code
    except httpx.HTTPError:
        return None


async def answers(url: str) -> bool:
    """Whether GET gives a 2xx."""
    return 200 <= (await status_of(url) or 0) < 300
