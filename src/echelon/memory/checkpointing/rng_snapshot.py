"""torch's own generators as they are now, to be set so again: a layer that draws from them draws the same once more.

Our modules draw nothing from them (rng.py), but a user's layer may (`F.dropout`, `torch.rand`). A state is a few bytes
on the host, also that of a GPU's generator: nobody waits for the device.
"""

from __future__ import annotations

import torch


class RngSnapshot:
    def __init__(self) -> None:
        self._cpu_state = torch.get_rng_state()
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        self._cuda_state = None if self._device is None else torch.cuda.get_rng_state(self._device)

    def restore(self) -> None:
        torch.set_rng_state(self._cpu_state)
        if self._device is not None and self._cuda_state is not None:
            torch.cuda.set_rng_state(self._cuda_state, self._device)
