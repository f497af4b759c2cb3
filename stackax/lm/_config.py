"""How a decoder is trained."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a decoder is trained: AdamW, warmup and cosine decay, clipped gradients.

    Args:
        steps: Number of optimizer steps in all.
        batch: Number of sequences in a step.
        learning_rate: The peak, reached after the first 20th of the steps; it falls along a
            cosine to a tenth by the last.
        weight_decay: Decoupled decay of the matrices and the embedding, not of the norms.
        clip_norm: The gradient's largest global norm.
        seed: Decides the first weights and which text each step sees.
        dtype: What the blocks compute in, "float32" or "bfloat16". Weights stay in float32.

    Raises:
        TypeError: if `steps`, `batch` or `seed` is not an int.
        ValueError: if a number is out of range, or `dtype` is another one.

    Example:
        >>> from stackax.lm import TrainingConfig
        >>> TrainingConfig(steps=100, batch=8, learning_rate=3e-3).warmup_steps
        5
    """

    steps: int
    batch: int
    learning_rate: float
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    seed: int = 0
    dtype: str = "float32"

    def __post_init__(self):
        for name in ("steps", "batch", "seed"):
            if not isinstance(getattr(self, name), int):
                raise TypeError(f"{name}={getattr(self, name)!r} must be a whole number")
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("learning_rate", "clip_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay} must not be negative")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must not be negative")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32' or 'bfloat16'")

    @property
    def warmup_steps(self) -> int:
        """Number of steps until the learning rate is at its peak."""
        return max(1, self.steps // 20)
