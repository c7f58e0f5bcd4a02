"""`mcore-train quickstart`: the main job on real text, with nothing to download."""

from mcore_train.quickstart.run import Quickstart, quickstart_config, run_quickstart

__all__ = ["Quickstart", "quickstart_config", "run_quickstart"]
