"""Errors of the image room: one base, terminal kinds below it. Nothing here is worth an automatic retry except S3's own
errors, which pass through unchanged."""


class ImageError(Exception):
    """Base of every error of this room."""


class RecipeError(ImageError):
    """A recipe says something that can't be built: an unknown key, a missing program, a command that failed."""


class ImageNotFoundError(ImageError):
    """No layer or image of that digest in the store that was asked."""


class ImageCorruptError(ImageError):
    """Stored bytes do not have the digest under which they are kept."""
