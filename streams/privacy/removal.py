"""Removing objects from an S3 for good: every version and delete marker, and the store's word where it refuses.

In a bucket without versions these are the objects themselves. Blocking; `S3Store.remove` calls it in a thread, page by
page, so that each request has its deadline.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import msgspec


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the objects under a prefix."""

    removed: int = 0
    """Objects, older versions and delete markers."""
    kept: list[str] = []
    """What the store refused to remove (object lock, permissions), with its word."""


def next_page(client: Any, bucket: str, prefix: str, without: Container[str]) -> list[dict[str, str]]:
    """The first page of versions and delete markers that has any not among `without`."""
    for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket, Prefix=prefix):
        rows = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
        found = [{"Key": row["Key"], "VersionId": row["VersionId"]} for row in rows]
        if left := [one for one in found if _name(one) not in without]:
            return left
    return []


def delete(client: Any, bucket: str, objects: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """By name what the store refused to remove, and why."""
    answer = client.delete_objects(Bucket=bucket, Delete={"Objects": objects, "Quiet": True})
    return {_name(error): str(error.get("Code", "?")) for error in answer.get("Errors", ())}


def _name(one: Mapping[str, str]) -> str:
    return f"{one['Key']}@{one.get('VersionId', 'null')}"
