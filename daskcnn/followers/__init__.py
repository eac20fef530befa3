"""Tools that follow a run by its events: one file each, named by a key of `[run]`."""

from __future__ import annotations

from daskcnn.followers.feeds import Feeds, check_tools, check_tools_there
from daskcnn.followers.tool import FollowedRun

__all__ = ["Feeds", "FollowedRun", "check_tools", "check_tools_there"]
