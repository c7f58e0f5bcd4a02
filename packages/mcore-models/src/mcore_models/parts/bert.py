"""The configuration of what an encoder such as BERT has beyond its layers."""

from dataclasses import dataclass

from mcore_models._checks import check_positive


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """Embeddings and heads of a bidirectional encoder (Devlin et al., 2019).

    Tokens belong to one of `num_token_types` segments, whose vectors are added to theirs; a norm
    follows. `masked_head` predicts tokens: a layer as wide as the model with the model's activation
    and a norm, then the vocabulary with a bias. `pooler` makes one vector of each document: a layer
    and tanh of its first token. `pair_head` tells from it whether two segments belong in this
    order: for Devlin et al. whether the second follows, for Lan et al. (ALBERT, 2020) whether they
    are swapped.

    Raises:
        ValueError: one line that names the numbers and the nearest valid values.
    """

    num_token_types: int = 2
    masked_head: bool = True
    pooler: bool = True
    pair_head: bool = True

    def __post_init__(self) -> None:
        check_positive("bert.num_token_types", self.num_token_types)
        if self.pair_head and not self.pooler:
            raise ValueError("bert.pair_head reads what bert.pooler makes: set pooler, or neither")
