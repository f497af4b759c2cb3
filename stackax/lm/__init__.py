"""Language models, transformers or Mamba-2: loss, training, checkpoints and generation.

Axes: those of `stackax.transformer` and `stackax.mamba2`, and `Batch`, `"batch"`, the sequences of
a training step.
"""

from ._checkpoint import load_checkpoint as load_checkpoint
from ._checkpoint import read_about as read_about
from ._checkpoint import save_checkpoint as save_checkpoint
from ._checkpoint import set_checkpoint_aside as set_checkpoint_aside
from ._config import TrainingConfig as TrainingConfig
from ._corpus import FILE_START as FILE_START
from ._corpus import Corpus as Corpus
from ._corpus import corpus_of as corpus_of
from ._corpus import read_corpus as read_corpus
from ._decay import weight_decay_mask as weight_decay_mask
from ._decoder import Decoder as Decoder
from ._generate import generate as generate
from ._loss import cross_entropy as cross_entropy
from ._loss import next_token_loss as next_token_loss
from ._sample import sample as sample
from ._state import TrainState as TrainState
from ._state import load_state as load_state
from ._state import save_state as save_state
from ._train import train as train
from ._train import train_step as train_step
from ._train import training_windows as training_windows
from ._train import validation_loss as validation_loss
