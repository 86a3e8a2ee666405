"""Least squares with coefficients that are not negative, for a handful of columns."""

from collections.abc import Iterator, Sequence
from itertools import combinations

Matrix = list[list[float]]

_SINGULAR = 1e-11
# Of columns that explain equally much the first ones win: the order is the caller's preference.
_TIE = 1e-9


def nnls(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float]:
    """The x ≥ 0 that minimises Σ(row · x − target)².

    Solves the normal equations for every set of columns and keeps the best solution without a
    negative entry. The optimum is among them: on the columns it uses it is the plain least squares
    solution (Lawson & Hanson, 1974, ch. 23). Exact, and quick up to about six columns.
    """
    width = len(rows[0])
    # Columns of one length, or a context of thousands would drown a base of milliseconds.
    norms = [sum(row[j] * row[j] for row in rows) ** 0.5 or 1.0 for j in range(width)]
    scaled = [[value / norm for value, norm in zip(row, norms, strict=True)] for row in rows]
    gram = [[sum(r[i] * r[j] for r in scaled) for j in range(width)] for i in range(width)]
    pull = [sum(r[i] * t for r, t in zip(scaled, targets, strict=True)) for i in range(width)]
    best, best_gain = [0.0] * width, 0.0
    total = sum(target * target for target in targets)
    for columns, solution in _solutions(gram, pull):
        # ‖target‖² − ‖residual‖² of a least squares solution is its dot product with the pull.
        gain = sum(x * pull[i] for i, x in zip(columns, solution, strict=True))
        if min(solution) >= 0 and gain > best_gain + _TIE * total:
            best_gain, best = gain, [0.0] * width
            for i, x in zip(columns, solution, strict=True):
                best[i] = x / norms[i]
    return best


def _solutions(gram: Matrix, pull: list[float]) -> Iterator[tuple[tuple[int, ...], list[float]]]:
    width = len(pull)
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            matrix = [[gram[i][j] for j in columns] + [pull[i]] for i in columns]
            solution = _solve(matrix)
            if solution is not None:
                yield columns, solution


def _solve(augmented: Matrix) -> list[float] | None:
    # Gauss-Jordan with pivoting; None where columns depend on each other.
    size = len(augmented)
    for column in range(size):
        pivot = max(range(column, size), key=lambda row: abs(augmented[row][column]))
        if abs(augmented[pivot][column]) < _SINGULAR:
            return None
        augmented[column], augmented[pivot] = augmented[pivot], augmented[column]
        for row in range(size):
            if row != column:
                factor = augmented[row][column] / augmented[column][column]
                for k in range(column, size + 1):
                    augmented[row][k] -= factor * augmented[column][k]
    return [augmented[i][size] / augmented[i][i] for i in range(size)]
