"""What a guide program saw: a hook that notes every batch, and the report of a rank."""

import json
from pathlib import Path


class Recorder:
    frequency = 1

    def __init__(self):
        self.batches = []

    def _runs_on_stage(self, stage):
        return stage.name == "AFTER_BATCH"

    def __call__(self, ctx, stage):
        self.batches.append((ctx.epoch, ctx.batch.metadata["index"].tolist()))

    def report(self, manager, strategy, loader):
        model = strategy.models["main"]
        return {
            "rank": manager.rank,
            "world_size": manager.world_size,
            "batches": self.batches,
            "parameters": [float(p.detach().double().sum()) for p in model.parameters()],
            "wrapped_after": type(model).__name__ == "DistributedDataParallel",
            "sampler_after": type(loader.sampler).__name__,
            "batch_sampler_after": type(loader.batch_sampler).__name__,
            "steps": strategy.step_count,
            "epochs": strategy.epoch_count,
        }


def save(report, folder):
    Path(folder, f"rank{report['rank']}.json").write_text(json.dumps(report))
