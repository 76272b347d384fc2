"""Layers and images on S3: `PREFIX/images/DIGEST` (JSON) and `PREFIX/layers/DIGEST.tar.zst`.

Objects are named by content, put only where absent and checked after reading: a layer that does not unpack to its
digest is refused. Owners and times are not carried.
"""

import io
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zstandard
from botocore.exceptions import ClientError

from odradek.sandbox_images.errors import ImageCorruptError, ImageNotFoundError
from odradek.sandbox_images.store import Image, ImageStore

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

ZSTD_LEVEL = 6
"""Lower: larger objects; higher: pushing a 60 MB base takes minutes instead of seconds."""


def push_image(store: ImageStore, digest: str, s3: "S3Client", bucket: str, prefix: str = "images") -> None:
    """Put the image and its layers; those already there are not sent again."""
    image = store.image(digest)
    for layer in image.layers:
        key = f"{prefix}/layers/{layer}.tar.zst"
        if not _exists(s3, bucket, key):
            s3.put_object(Bucket=bucket, Key=key, Body=_pack(store.layer_path(layer)))
    s3.put_object(Bucket=bucket, Key=f"{prefix}/images/{digest}", Body=store.image_bytes(digest))


def pull_image(store: ImageStore, digest: str, s3: "S3Client", bucket: str, prefix: str = "images") -> Image:
    """Get the image and the layers that are not here yet."""
    image = msgspec.json.decode(_get(s3, bucket, f"{prefix}/images/{digest}"), type=Image)
    for layer in image.layers:
        if not store.has_layer(layer):
            packed = _get(s3, bucket, f"{prefix}/layers/{layer}.tar.zst")
            found = store.layer_from_tree(lambda tree, packed=packed: _unpack(packed, tree))  # type: ignore[misc]
            if found != layer:
                raise ImageCorruptError(f"layer {layer} in s3://{bucket}/{prefix} unpacks to {found}; push it again")
    if store.put_image(image) != digest:
        raise ImageCorruptError(f"image {digest} in s3://{bucket}/{prefix} has another digest; push it again")
    return image


def _pack(tree: Path) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(tree.rglob("*")):
            info = tar.gettarinfo(path, arcname=str(path.relative_to(tree)))
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            if info.isreg():
                with path.open("rb") as file:
                    tar.addfile(info, file)
            else:
                tar.addfile(info)
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw.getvalue())


def _unpack(packed: bytes, tree: Path) -> None:
    raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=0)
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        # `fully_trusted` only keeps modes; `_inside` refuses what could reach outside of `tree`.
        tar.extractall(tree, members=[_inside(member) for member in tar], filter="fully_trusted")


def _inside(member: tarfile.TarInfo) -> tarfile.TarInfo:
    if member.name.startswith("/") or ".." in member.name.split("/") or member.isdev() or member.islnk():
        raise ImageCorruptError(f"layer archive names {member.name!r}, which no layer can hold")
    return member


def _exists(s3: "S3Client", bucket: str, key: str) -> bool:
    try:
        s3.head_object(Bucket=bucket, Key=key)
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound"):
            return False
        raise
    return True


def _get(s3: "S3Client", bucket: str, key: str) -> bytes:
    try:
        return s3.get_object(Bucket=bucket, Key=key)["Body"].read()
    except ClientError as error:
        if error.response.get("Error", {}).get("Code") in ("404", "NoSuchKey", "NotFound"):
            raise ImageNotFoundError(f"s3://{bucket}/{key} does not exist; push the image first") from error
        raise
