"""The error that says a checkpoint could not be written or is damaged."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or what lies on disk is damaged.

    Mistakes of the caller (names, shapes, layouts that do not fit) are `ValueError` instead.
    """


class NewerFormatError(CheckpointError):
    """A checkpoint is whole, as far as can be told, and of a format that this release cannot read.

    It is no damage: nothing that looks for damage may pass it over, or report it as such.
    """
