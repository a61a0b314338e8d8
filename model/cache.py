"""Keys and values of the tokens already seen."""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """Room for `capacity` tokens in every layer, allocated once, at the first token.

    Keys are stored as the position encoding left them (rotated, widened); widths of k and v may differ.
    """

    def __init__(self, n_layer: int, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # tokens stored in every layer; advanced once per forward, by GPT
        self._layers: list[tuple[Tensor, Tensor] | None] = [None] * n_layer

    def append(self, layer: int, k_BHTD: Tensor, v_BHTE: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values behind those of the earlier forwards; returns views of all S."""
        stored = self._layers[layer]
        if stored is None:
            stored = self._room(k_BHTD), self._room(v_BHTE)
            self._layers[layer] = stored
        end = self.length + k_BHTD.shape[2]
        assert end <= self.capacity, f"cache holds {self.capacity} tokens, {end} asked"
        for room, new in zip(stored, (k_BHTD, v_BHTE), strict=True):
            room[:, :, self.length : end] = new
        return stored[0][:, :, :end], stored[1][:, :, :end]

    def _room(self, x_BHTD: Tensor) -> Tensor:
        B, H, _, D = x_BHTD.shape
        return x_BHTD.new_empty(B, H, self.capacity, D)
