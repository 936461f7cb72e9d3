"""Exact nearest-centroid search: a fast matrix product with bounded rounding, then exact comparison of candidates.

Half the squared distances come from one product in float32, or twice to many times as fast in bfloat16 where the
processor computes such products. Every centroid that may be the nearest within the rounding bound is a candidate, on
average one to three. Candidates are compared in float32, and those still undecided in float64, so the result is that of
float64 anywhere.
"""

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController
from torch import Tensor

from ddm.system.devices import computes_in_bf16, processor_by_amd

# Shape legend: B features of one block, F centroids, D values of one feature, E four more, P candidate pairs.

# Features in a block.
_BLOCK = 4096
# Candidates per feature, on average; beyond it a product of higher precision costs less.
_MAX_CANDIDATES = 16
# Pairs whose differences are in memory at a time.
_CHUNK = 8192
# Relative rounding.
_UNITS = {torch.bfloat16: 2.0**-9, torch.float32: 2.0**-24}
# Integers of the same width, to compare the bits of numbers.
_BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}


class _Buffers:
    """One thread's buffers for a block, reused: allocating new pages would take as long as the product."""

    def __init__(
        self,
        dim: int,
        num: int,
        dtypes: tuple[torch.dtype, ...],
    ) -> None:
        self.x_BD = torch.empty(_BLOCK, dim)
        self.columns = {dtype: torch.ones(_BLOCK, dim + 4, dtype=dtype) for dtype in dtypes}
        self.half = {dtype: torch.empty(_BLOCK, num, dtype=dtype) for dtype in dtypes}
        self.mask_BF = np.empty((_BLOCK, num), dtype=bool)


class NearestCentroid:
    """Finds the nearest of fixed centroids.

    Args:
        centroids_FD: finite, float32.
        dtypes: of the product; the next one is used where the one before leaves too many candidates.
    """

    def __init__(self, centroids_FD: Tensor, dtypes: tuple[torch.dtype, ...] | None = None) -> None:
        # On processors of AMD numpy's OpenBLAS is faster than torch's MKL, and slower elsewhere.
        self.multiplies_by_numpy = processor_by_amd()
        if dtypes is None:
            dtypes = (torch.float32,)
            if computes_in_bf16("auto", torch.device("cpu")):
                dtypes = (torch.bfloat16, torch.float32)
        self.dtypes = dtypes
        self.centroids_FD = centroids_FD
        # Centred, since far from the origin |c|^2 - 2 x.c would cancel.
        self.centre_D = centroids_FD.mean(0)
        self.centred_FD = centroids_FD - self.centre_D
        self.offset_F = self.centred_FD.square().sum(1) / 2
        # The largest norm of a centroid, by which rounding errors are bounded.
        self.longest = float(self.offset_F.max().mul(2).sqrt())
        ones_F2 = torch.ones(len(centroids_FD), 2)
        # One product of these with (x, |x|^2 / 2, 1) gives half the squared distances.
        self.tables = {}
        for dtype in self.dtypes:
            columns = [
                -self.centred_FD.to(dtype),
                ones_F2.to(dtype),
                _in_two(self.offset_F, dtype),
            ]
            self.tables[dtype] = torch.cat(columns, 1).T

        # Torch warns once per process. It is made to do so here, since threads must not change the filters.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
            torch.zeros(1, 1).to_sparse_csr()

    def find(self, features: Tensor) -> Tensor:
        """Return the index of the nearest centroid, shape (N,), int64; ties go to the lowest index.

        Args:
            features: shape (N, D).

        A row whose values are not finite, or whose distances are not, goes to centroid 0, whatever the other rows are:
        so a histogram over centroids still moves by one row where one image is exchanged.
        """
        num, dim = features.shape
        nearest_N = torch.empty(num, dtype=torch.int64)
        num_threads = torch.get_num_threads()

        def find_in_blocks(thread: int) -> None:
            """Process every n-th block in a thread of its own, since numpy compares candidates in one thread."""
            buffers = _Buffers(dim, len(self.offset_F), self.dtypes)
            for start in range(thread * _BLOCK, num, num_threads * _BLOCK):
                block = slice(start, start + _BLOCK)
                block_BD = features[block].float()
                nearest_B = self._nearest_of_block(block_BD, buffers)
                nearest_N[block] = torch.from_numpy(nearest_B)

        try:
            workers = ThreadPoolExecutor(
                num_threads, initializer=torch.set_num_threads, initargs=(1,)
            )
            with _loaded_libraries().limit(limits=1, user_api="blas"), workers as pool:
                # The list waits for all of them, and raises what any raised.
                list(pool.map(find_in_blocks, range(num_threads)))
        finally:
            torch.set_num_threads(num_threads)
        return nearest_N

    def _nearest_of_block(self, raw_BD: Tensor, buffers: _Buffers) -> NDArray[np.int64]:
        """Return the nearest centroid of each row of a block."""
        num, dim = raw_BD.shape
        x_BD = torch.sub(raw_BD, self.centre_D, out=buffers.x_BD[:num])
        norm_B = torch.linalg.vector_norm(x_BD, dim=1)
        energy_B = norm_B.square() / 2
        is_broken_B = ~torch.isfinite(energy_B)
        if bool(is_broken_B.any()):
            # The other rows are searched as if these were the centre, so that they do not depend on them.
            replaced_BD = torch.where(is_broken_B[:, None], self.centre_D, raw_BD)
            nearest_B = self._nearest_of_block(replaced_BD, buffers)
            nearest_B[is_broken_B.numpy()] = 0
            return nearest_B

        # Each step leaves fewer candidates, at a higher price for each.
        for dtype in self.dtypes:
            row_P, column_P = self._candidates(x_BD, energy_B, dtype, buffers)
            if len(row_P) <= _MAX_CANDIDATES * num:
                break
        # Every row keeps its nearest centroid, so that as many pairs as rows are one for each row.
        if len(row_P) == num:
            return column_P

        score_P = self._score(x_BD, row_P, column_P)
        # The errors of two scores that are compared.
        margin_B = 2.02 * self._rounding(energy_B, dim, torch.float32)
        limit_B = _min_of_rows(score_P, row_P) + margin_B.double().numpy()
        is_near_P = score_P <= limit_B[row_P]
        row_P = row_P[is_near_P]
        column_P = column_P[is_near_P]
        if len(row_P) > num:
            distance_P = self._exact_distances(raw_BD, row_P, column_P)
            smallest_B = _min_of_rows(distance_P, row_P)
            is_nearest_P = distance_P == smallest_B[row_P]
            row_P = row_P[is_nearest_P]
            column_P = column_P[is_nearest_P]
        # Columns ascend in each row, so that ties go to the lowest index.
        nearest: NDArray[np.int64] = column_P[_row_starts(row_P)]
        return nearest

    def _candidates(
        self,
        x_BD: Tensor,
        energy_B: Tensor,
        dtype: torch.dtype,
        buffers: _Buffers,
    ) -> tuple[NDArray[np.int64], ...]:
        """Return the rows, ascending, and columns, ascending in each row, of all candidate pairs."""
        num, dim = x_BD.shape
        columns_BE = buffers.columns[dtype][:num]
        half_BF = buffers.half[dtype][:num]
        columns_BE[:, :dim] = x_BD
        columns_BE[:, dim : dim + 2] = _in_two(energy_B, dtype)
        table_EF = self.tables[dtype]
        if dtype == torch.float32 and self.multiplies_by_numpy:
            np.matmul(columns_BE.numpy(), table_EF.numpy(), out=half_BF.numpy())
        else:
            torch.mm(columns_BE, table_EF, out=half_BF)
        # Distances are not negative, so their bits have their order, and integers are compared faster.
        bits_type = _BITS[dtype]
        bits_BF = half_BF.view(bits_type)
        min_bits_B = bits_BF.amin(1).clamp(min=0)
        min_B = min_bits_B.view(dtype).float()
        # Both scores of a comparison are off by the error before they are stored, and by one rounding to `dtype`;
        # the last factor covers the rounding of the limit itself.
        unit = _UNITS[dtype]
        error_B = self._rounding(energy_B, dim, dtype)
        margin_B = 1.01 * (2 * error_B + 2 * unit * min_B)
        limit_B = (min_B + margin_B) * (1 + 2 * unit)
        limit_bits_B = limit_B.to(dtype).view(bits_type).numpy()
        mask_BF = np.less_equal(
            bits_BF.numpy(),
            limit_bits_B[:, None],
            out=buffers.mask_BF[:num],
        )
        return np.divmod(_set_indices(mask_BF), len(self.offset_F))

    def _rounding(
        self,
        energy_B: Tensor,
        dim: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return a bound on the rounding error of a row's scores before they are stored in `dtype`.

        Rounding x and c to unit u moves their product by at most ``(2 u + u^2) |x| |c|``; summing D of them in float32
        by ``D 2^-23 |x| |c|``, both norms likewise; splitting the norms in two by ``2^-16`` of them in bfloat16.
        """
        unit = _UNITS[dtype]
        product_B = (2 * energy_B).sqrt() * self.longest
        norms_B = energy_B + self.longest**2 / 2
        of_product = 2.01 * unit + dim * 2.0**-23
        of_norms = 2 * unit**2 + (dim + 4) * 2.0**-23
        return of_product * product_B + of_norms * norms_B

    def _score(
        self,
        x_BD: Tensor,
        row_P: NDArray[np.int64],
        column_P: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return ``|c|^2 / 2 - x.c`` of each pair, computed in float32."""
        num_pairs_B = np.bincount(row_P, minlength=len(x_BD))
        ends_B = np.cumsum(num_pairs_B)
        columns_P = torch.from_numpy(column_P)
        pairs = torch.sparse_csr_tensor(
            torch.from_numpy(np.r_[0, ends_B]),
            columns_P,
            torch.zeros(len(row_P)),
            (len(x_BD), len(self.offset_F)),
            check_invariants=False,
        )
        # Only the products of the pairs are computed, not all of the matrix.
        product_P = torch.sparse.sampled_addmm(pairs, x_BD, self.centred_FD.T).values()
        score_P = self.offset_F[columns_P] - product_P
        as_float64: NDArray[np.float64] = score_P.double().numpy()
        return as_float64

    def _exact_distances(
        self,
        raw_BD: Tensor,
        row_P: NDArray[np.int64],
        column_P: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Return the squared distance of each pair, float64; 0 where a row has a single pair."""
        distance_P = np.zeros(len(row_P))
        num_pairs_B = np.bincount(row_P)
        undecided_P = np.flatnonzero(num_pairs_B[row_P] > 1)
        for start in range(0, len(undecided_P), _CHUNK):
            chunk = undecided_P[start : start + _CHUNK]
            features = raw_BD[row_P[chunk]].double()
            centroids = self.centroids_FD[column_P[chunk]].double()
            difference = features - centroids
            distance_P[chunk] = difference.square().sum(1).numpy()
        return distance_P


def _set_indices(mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return where a mask of few entries is set, flattened; it is searched in words of eight."""
    flat = mask.reshape(-1)
    num_in_words = len(flat) // 8 * 8
    in_words = flat[:num_in_words]
    word_W = np.flatnonzero(in_words.view(np.uint64))
    bytes_W8 = in_words.reshape(-1, 8)[word_W]
    position_P, byte_P = np.nonzero(bytes_W8)
    index_P = word_W[position_P] * 8 + byte_P
    # The last entries, fewer than a word.
    rest_P = num_in_words + np.flatnonzero(flat[num_in_words:])
    return np.concatenate([index_P, rest_P])


def _row_starts(row_P: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each row begins."""
    return np.flatnonzero(np.diff(row_P, prepend=-1))


def _min_of_rows(value_P: NDArray[np.float64], row_P: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the smallest value of each row."""
    starts_B = _row_starts(row_P)
    min_B: NDArray[np.float64] = np.minimum.reduceat(value_P, starts_B)
    return min_B


def _in_two(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Split values into two columns of `dtype` whose sum approximates them."""
    high = value.to(dtype)
    low = (value - high.float()).to(dtype)
    return torch.stack([high, low], 1)


@cache
def _loaded_libraries() -> ThreadpoolController:
    """The libraries of this process that compute in threads; to look for them takes longer than many a search."""
    return ThreadpoolController()
