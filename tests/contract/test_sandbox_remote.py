"""Images on a real S3 store: pushed once, pulled whole, refused when changed."""

from pathlib import Path

import pytest

from odradek.infra.stack.s3 import S3Access, s3_client
from odradek.sandbox_images.errors import ImageCorruptError, ImageNotFoundError
from odradek.sandbox_images.remote import pull_image, push_image
from odradek.sandbox_images.store import Image, ImageStore
from odradek.sandbox_images.tree import FileSpec

pytestmark = pytest.mark.contract


def test_image_survives_the_way_to_s3_and_back(tmp_path: Path, s3_access: S3Access, s3_prefix: str) -> None:
    s3, bucket, prefix = s3_client(s3_access), s3_access.bucket, s3_prefix.strip("/")
    here, there = ImageStore(tmp_path / "here"), ImageStore(tmp_path / "there")
    files: dict[str, bytes | FileSpec] = {
        "run": FileSpec(content=b"x" * 100_000, mode=0o755),
        "ln": FileSpec(target="run"),
        "d/e": b"",
        "ü": b"1",
    }
    image = Image(layers=(here.layer_from_files(files), here.layer_from_files({"t": b"2"})), env={"A": "b"})
    digest = here.put_image(image)
    for _ in range(2):
        push_image(here, digest, s3, bucket, prefix)
    assert pull_image(there, digest, s3, bucket, prefix) == image
    assert there.image(digest) == image
    for layer in image.layers:
        assert there.manifest(layer) == here.manifest(layer)
    with pytest.raises(ImageNotFoundError):
        pull_image(there, "0" * 64, s3, bucket, prefix)


def test_layer_with_other_content_is_refused(tmp_path: Path, s3_access: S3Access, s3_prefix: str) -> None:
    s3, bucket, prefix = s3_client(s3_access), s3_access.bucket, s3_prefix.strip("/")
    here, there = ImageStore(tmp_path / "here"), ImageStore(tmp_path / "there")
    good, bad = here.layer_from_files({"f": b"good"}), here.layer_from_files({"f": b"bad"})
    digests = [here.put_image(Image(layers=(layer,))) for layer in (good, bad)]
    for digest in digests:
        push_image(here, digest, s3, bucket, prefix)
    source = {"Bucket": bucket, "Key": f"{prefix}/layers/{bad}.tar.zst"}
    s3.copy_object(Bucket=bucket, Key=f"{prefix}/layers/{good}.tar.zst", CopySource=source)  # type: ignore[arg-type]
    with pytest.raises(ImageCorruptError, match=good):
        pull_image(there, digests[0], s3, bucket, prefix)
    assert not there.has_layer(good)
