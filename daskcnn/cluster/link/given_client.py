"""The client that a user gives, or the default one."""

from __future__ import annotations

from typing import Any

from distributed import Client, default_client

from daskcnn.errors import ClusterError


def given_or_default(client: Any) -> Client | None:
    """Return the client that was given, the default one without, and None where there is none.

    Raises ClusterError for what is no client that can be waited with.
    """
    if client is not None:
        return checked_client(client)
    try:
        return default_client()
    except ValueError:
        return None


def checked_client(client: Any) -> Client:
    """Return the client. Raises ClusterError for what is none, and for an asynchronous one."""
    if not isinstance(client, Client):
        raise ClusterError(f"client={client!r:.60}", "not a client of Dask", "give a distributed.Client, or none")
    if client.asynchronous:
        raise ClusterError("client", "it is asynchronous, and cannot be waited with", "give one that is not")
    if client.status in ("closed", "closing"):
        raise ClusterError("client", "it is closed", "give one that is connected, such as Client(cluster)")
    return client
