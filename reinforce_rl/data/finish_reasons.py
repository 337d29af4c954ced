"""Why a response ended. Torch-free."""

from __future__ import annotations

FINISH_STOP = "stop"  # a stop token or a stop string was produced
FINISH_LENGTH = "length"  # max_length was reached first: the response is truncated
FINISH_OUTSIDE = "outside_vocabulary"  # the engine gave a token id that the model does not have
