"""The disk space that a run needs, in bytes that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from helpers.tiny_run import compose, tiny_overrides

from reinforce_rl.config.load import load_config
from reinforce_rl.megatron.size import ModelSize
from reinforce_rl.trainer.disk import DiskNeed, disk_need


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    return tiny_overrides(tmp_path_factory.mktemp("run"))


def test_a_disk_that_might_not_hold_all_records_is_no_fault():
    """Few runs come near this bound, and one that ends by its time not near its steps."""
    need = DiskNeed(
        Path("run"), checkpoint=10, checkpoints=2, export=5, records=1000, held=0, free=100
    )
    assert need.fault is None
    assert "record_tokens_every" in str(need.warning)
    assert replace(need, free=24).fault
    assert replace(need, free=24).warning is replace(need, free=2000).warning is None


class TestDisk:
    """What a run writes at most at a time.

    The sizes are bytes of 1,000 weights, of which the second case trains 100.
    """

    def need(self, overrides, *extra, parameters=1000, trained=1000, steps=100):
        keys = (
            "trainer.reinforce.save_interval=10",
            "exp_manager.checkpoint_callback_params.keep_last=2",
            *extra,
        )
        cfg = load_config(compose(*overrides, *keys))
        return disk_need(cfg, ModelSize(parameters, trained), steps)

    def test_the_checkpoint_that_is_being_written_is_there_besides_those_that_are_kept(
        self, overrides
    ):
        need = self.need(overrides)
        assert need.checkpoints == 2 + 1
        best = (
            "exp_manager.checkpoint_callback_params.keep_best=3",
            "trainer.reinforce.val_check_interval=5",
        )
        assert self.need(overrides, *best).checkpoints == 2 + 3 + 1

    def test_no_more_checkpoints_than_the_run_saves(self, overrides):
        assert self.need(overrides, steps=10).checkpoints == 1
        assert self.need(overrides, steps=11).checkpoints == 2
        assert self.need(overrides, steps=21).checkpoints == 3
        assert self.need(overrides, steps=31).checkpoints == 3

    def test_a_checkpoint_has_weights_main_weights_and_moments(self, overrides):
        """Two moments of 4 bytes; in bf16 a weight has 2 bytes, and 4 more in fp32."""
        assert self.need(overrides).checkpoint == 1000 * (4 + 8)
        expected = 1000 * (2 + 4 + 8)
        assert self.need(overrides, "trainer.precision=bf16").checkpoint == expected
        assert self.need(overrides, trained=100).checkpoint == 100 * (4 + 8)

    def test_the_exported_folder_has_all_weights(self, overrides):
        export = "exp_manager.checkpoint_callback_params.save_hf_on_train_end=true"
        assert self.need(overrides, export, trained=100).export == 1000 * 4
        assert self.need(overrides, trained=100).export == 0

    def test_what_is_there_already_is_not_needed_again(self, overrides):
        need = replace(
            self.need(overrides), checkpoint=10, checkpoints=3, export=5, records=7, held=12
        )
        assert need.needed == 30 - 12 + 5 + 7
        assert replace(need, held=50).needed == 5 + 7

    def test_a_disk_that_holds_it_exactly_is_large_enough(self, overrides):
        need = replace(
            self.need(overrides), checkpoint=10, checkpoints=3, export=5, records=7, held=0
        )
        assert replace(need, free=35).fault is None
        assert replace(need, free=34).fault is not None
