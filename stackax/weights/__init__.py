"""Checkpoints of other libraries, read into stackax's models and written from them."""

from ._models import load_model as load_model
from ._models import save_model as save_model
