"""The whole job of `examples/train_reward_model.py`: pairs and a trunk in, a head file and its model card out."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from reinforce_rl.reward.features import (
    CutSequence,
    features_fingerprint,
    load_features,
    pooled_features,
    save_features,
)
from reinforce_rl.reward.model_card import HeadReport, PoolingResult, sha256_of_files, write_head
from reinforce_rl.reward.pairs import EncodedPair, encode_pairs, read_pairs, split_by_prompt
from reinforce_rl.reward.training import PairFeatures, head_accuracy, pair_accuracy, train_head
from reinforce_rl.reward.training_config import TrainRewardModelConfig
from reinforce_rl.tokenizer import load_tokenizer

LINE_EVERY_SECONDS = 30.0
