"""Where what lies in a rank's buffer."""

from __future__ import annotations

import attrs
import torch

from moe_core.kernels.triton.launch import divided_up
from moe_core.payloads import TORCH_DTYPES

#: Sections begin at multiples of it, in bytes.
_SECTION = 256
#: Sums are added up piece by piece while later ones still come, if there are many: pieces at most, tokens at least.
_MOST_PIECES, _LEAST_PIECE = 8, 256


@attrs.frozen(kw_only=True)
class PeerLayout:
    """The sections of every rank's buffer, one behind the other from tokens on; what ends in `_at` is where one begins.

    Attributes:
        device_type: Where the buffers are.
        size: Ranks.
        capacity: Most tokens of a rank in a forward.
        hidden_size: H.
        top_k: K.
        dtype: The project's word for the float dtype of tokens and sums.
    """

    device_type: str
    size: int
    capacity: int
    hidden_size: int
    top_k: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of tokens and sums."""
        return TORCH_DTYPES[self.dtype]

    @property
    def places(self) -> int:
        """For tokens, those of one sender behind each other: `size * capacity`."""
        return self.size * self.capacity

    @property
    def bytes_of_rows(self) -> int:
        """Of all tokens, or of all sums."""
        return self.places * self.hidden_size * self.torch_dtype.itemsize

    @property
    def sums_at(self) -> int:
        """Byte of the sums `[size, capacity, H]` that other ranks return."""
        return _whole(self.bytes_of_rows)

    @property
    def ids_at(self) -> int:
        """Byte of the local ids `[size, capacity, K]` int32, -1 = no expert of this rank."""
        return 2 * self.sums_at

    @property
    def weights_at(self) -> int:
        """Byte of the router weights `[size, capacity, K]` fp32."""
        return self.ids_at + _whole(4 * self.places * self.top_k)

    @property
    def numbers_at(self) -> int:
        """Byte of the numbers: per sender, the last forward whose tokens, and whose sums of each piece, have come.

        int64 `[1 + pieces, size]`; the forward is in the upper half, in the lower one of the tokens' is how many came.
        """
        return self.weights_at + _whole(4 * self.places * self.top_k)

    @property
    def num_bytes(self) -> int:
        """Of the whole buffer."""
        return self.numbers_at + _whole(8 * (1 + self.pieces) * self.size)

    @property
    def pieces(self) -> int:
        """Runs of equally many tokens whose sums are waited for one after the other."""
        return min(_MOST_PIECES, divided_up(self.capacity, _LEAST_PIECE))

    @property
    def state_words(self) -> int:
        """Of what a rank counts for itself, beside the buffer (`kernels` names them)."""
        return 7 + self.pieces


def _whole(num_bytes: int) -> int:
    return divided_up(num_bytes, _SECTION) * _SECTION
