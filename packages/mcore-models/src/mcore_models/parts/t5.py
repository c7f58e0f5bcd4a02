"""The configuration of an encoder and a decoder with relative positions, as T5 has them."""

from dataclasses import dataclass

from mcore_models._checks import check_positive


@dataclass(frozen=True, kw_only=True)
class T5Config:
    """A decoder that reads what an encoder makes of another text (Raffel et al., 2020).

    The encoder has the `num_layers` of the model, the decoder `num_decoder_layers`, None is as
    many. Attention within each adds to its scores a learned number for each head and each of
    `num_buckets` ranges of distances: half of them for single distances, the others ever wider up
    to `max_distance`, beyond which all are alike. The encoder has ranges for both directions.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    num_decoder_layers: int | None = None
    num_buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        if self.num_decoder_layers is not None:
            check_positive("t5.num_decoder_layers", self.num_decoder_layers)
        for name in ("num_buckets", "max_distance"):
            check_positive(f"t5.{name}", getattr(self, name))
        if self.num_buckets < 4 or self.num_buckets % 4:
            below = max(self.num_buckets // 4 * 4, 4)
            raise ValueError(
                f"t5.num_buckets={self.num_buckets} is halved for directions and again for near "
                f"and far: use {below} or {below + 4}"
            )
        if self.max_distance <= self.num_buckets // 2:
            raise ValueError(
                f"t5.max_distance={self.max_distance} must exceed the {self.num_buckets // 2} "
                f"single distances of t5.num_buckets={self.num_buckets}: use "
                f"{self.num_buckets // 2 + 1} or more"
            )
