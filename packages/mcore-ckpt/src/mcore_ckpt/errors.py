"""The error that says a checkpoint could not be written or is damaged."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or what lies on disk is damaged.

    Mistakes of the caller (names, shapes, layouts that do not fit) are `ValueError` instead.
    """
