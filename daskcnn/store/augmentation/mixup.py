"""Images that are mixed of two."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from pydantic import Field

from daskcnn.store.augmentation.step import Chance, Mixture, Pictures, Step


class Mixup(Step):
    """Mix each image with the next one of its minibatch, and their labels alike (Zhang et al. 2018).

    The sample's own share is the larger of λ and 1 - λ, where λ is Beta(alpha, alpha). It counts as the right answer.
    The share is the sample's; which other image it is mixed with depends on the minibatch.
    """

    name: ClassVar[str] = "mixup"
    draws: ClassVar[int] = 1
    alpha: float = Field(0.2, ge=0.01, le=100, description="Of the shares' distribution: they are more even if higher.")

    def mixture(self, chance: Chance) -> Mixture:
        """Return who is mixed with whom."""
        from scipy.special import betaincinv

        shares = betaincinv(self.alpha, self.alpha, chance.numbers[0].astype(np.float64))
        return Mixture(np.roll(np.arange(len(shares)), -1), np.maximum(shares, 1 - shares))

    def apply(self, pictures: Pictures, chance: Chance) -> Pictures:
        """Mix the images."""
        from daskcnn.compiled import augmentation

        mixture, y = self.mixture(chance), np.empty_like(pictures.x)
        augmentation.mix(pictures.x, mixture.partners, mixture.shares.astype(y.dtype), y)
        return replace(pictures, x=y, mixture=mixture)
