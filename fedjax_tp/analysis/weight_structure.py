"""Which entries of a kernel belong together: the structure of its second moment.

For vectors v_t of a kernel (gradients, updates, weights of many clients) the second
moment C = mean v v^T is approximated by what keeps few of its entries: a diagonal, the
blocks of a grouping, a Kronecker product, low rank. How much is lost is measured in the
Frobenius norm. Our reading of a text whose paper is not identified.
"""

from typing import NamedTuple

import numpy as np

from fedjax_tp.types import Float, InputError, Int

Vectors = Float[np.ndarray, "samples entries"]
Matrix = Float[np.ndarray, "entries entries"]
Groups = Int[np.ndarray, " entries"]


def down_sample(
    kernels: Float[np.ndarray, "samples *axes"], most: int
) -> Float[np.ndarray, "samples *fewer"]:
    """Every s-th entry along each axis, with the least s that leaves at most `most`.

    Axes are treated alike: a head's place in a kernel of `[dim, heads, head_dim]` stays
    its place.

    Args:
      kernels: a row a sample.
      most: entries along an axis; at least 1.

    Raises:
      InputError: most is below 1.
    """
    if most < 1:
        raise InputError(f"most is {most}; allowed is 1 or more")
    strides = tuple(slice(None, None, -(-size // most)) for size in kernels.shape[1:])
    return kernels[(slice(None), *strides)]


def second_moment(vectors: Vectors) -> Matrix:
    """C = mean over samples of v v^T."""
    return vectors.T @ vectors / len(vectors)


def grouped_error(moment: Matrix, groups: Groups) -> float:
    """Relative Frobenius error of keeping C_ij where i and j are in one group.

    Its square is 1 less the share of sum C^2 that lies inside the groups.

    Args:
      moment: C.
      groups: the group of each entry; all different for the diagonal.
    """
    squares = moment**2
    inside = groups[:, None] == groups[None, :]
    total = squares.sum()
    if total == 0:
        return 0.0
    # What is outside is summed itself: 1 - inside would lose the small ones.
    return float(np.sqrt(squares[~inside].sum() / total))


def concentration(moment: Matrix, groups: Groups) -> float:
    """Mean squared C_ij of two different entries of one group, over that of any two.

    1 says that the grouping means nothing, however many entries it keeps: groupings of
    other sizes can be compared, as they cannot by errors. NaN if no group has two
    entries.
    """
    different = ~np.eye(len(moment), dtype=bool)
    inside = (groups[:, None] == groups[None, :]) & different
    if not inside.any():
        return float("nan")
    squares = moment**2
    everywhere = squares[different].mean()
    return float(squares[inside].mean() / everywhere) if everywhere > 0 else 1.0


def kronecker_error(moment: Matrix, first: int) -> float:
    """Relative error of the nearest A (x) B, A being `[first, first]`.

    By the singular values of C rearranged (Van Loan and Pitsianis 1993): the square is
    1 - s_1^2 / sum s_i^2.

    Raises:
      InputError: first does not divide the size of C.
    """
    size = len(moment)
    if first < 1 or size % first:
        raise InputError(f"first is {first}; allowed are divisors of {size}")
    second = size // first
    blocks = moment.reshape(first, second, first, second).transpose(0, 2, 1, 3)
    values = np.linalg.svd(blocks.reshape(first**2, second**2), compute_uv=False)
    return _left_out(values, 1)


def low_rank_error(moment: Matrix, rank: int) -> float:
    """Relative error of the nearest matrix of a rank (Eckart and Young)."""
    return _left_out(np.linalg.svd(moment, compute_uv=False), rank)


def _left_out(values: Float[np.ndarray, " values"], kept: int) -> float:
    total = np.sum(values**2)
    return float(np.sqrt(np.sum(values[kept:] ** 2) / total)) if total > 0 else 0.0


class Correlation(NamedTuple):
    """Mean squared correlation of two different entries.

    Attributes:
      inside: of two in one group; NaN if no group has two.
      across: of two in different groups; NaN if there is one group.
    """

    inside: float
    across: float


def squared_correlation(vectors: Vectors, groups: Groups) -> Correlation:
    """How much entries of one group go together, and entries of different groups.

    The square of an estimated correlation is 1 / samples on average where there is
    none: compare the two, and with that.

    Args:
      vectors: a row a sample.
      groups: the group of each entry.
    """
    centred = vectors - vectors.mean(axis=0)
    deviations = np.sqrt(np.mean(centred**2, axis=0))
    varies = deviations > 0
    scaled = centred[:, varies] / deviations[varies]
    squares = (scaled.T @ scaled / len(scaled)) ** 2
    own = groups[varies]
    same = own[:, None] == own[None, :]
    different = ~np.eye(len(own), dtype=bool)

    def mean(pairs: np.ndarray) -> float:
        return float(squares[pairs].mean()) if pairs.any() else float("nan")

    return Correlation(mean(same & different), mean(~same))


def groupings(shape: tuple[int, ...], head_axis: int | None) -> dict[str, Groups]:
    """Groups of a kernel's entries: by the place along each axis, by head, all in one.

    Args:
      shape: of the kernel: `[in, out]`, or with the heads along an axis of its own.
      head_axis: which; None of a kernel without heads.

    Returns:
      By name: `diagonal`, `input` (one group an input unit), `output`, `head`, `whole`.
    """
    places = np.indices(shape).reshape(len(shape), -1)
    found = {"diagonal": np.arange(places.shape[1])}
    if head_axis is None:
        found |= {"input": places[0], "output": places[-1]}
    else:
        first, last = places[0], places[-1]
        if head_axis == 0:
            # `[heads, head_dim, out]`: an input unit is a head and a place in it.
            first = places[0] * shape[1] + places[1]
        else:
            last = places[1] * shape[2] + places[2]
        found |= {"input": first, "output": last, "head": places[head_axis]}
    return found | {"whole": np.zeros(places.shape[1], int)}
